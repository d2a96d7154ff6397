"""EGCA and the mask of executed statements on programs, by hand."""

import textwrap

import pytest
import torch

from grail_lightning import CodeTask, build_batch
from grail_lightning.core.credit.base import check_weights, token_advantages
from grail_lightning.credit import EGCA, ExecutedMask
from grail_lightning.worlds.programs.outcome import ProgramLimits
from tests.batches import in_turns, rollouts
from tests.core.credit.rollouts import context
from tests.worlds.programs.traced import REFERENCE, Trusted, changed

ROW = {
    "problem": "Add the values up to a limit.",
    "entry": "total",
    "tests": [[[[], 3], 0], [[[1, 5], 9], 6], [[[1, 5, 2, 3], 3], 6]],
    "reference": textwrap.dedent(REFERENCE),
}
TASK = Trusted()


def text_of(program):
    return f"So:\n```python\n{textwrap.dedent(program).strip()}\n```"


SLIP = changed("value <= limit", "value < limit")
LATE = changed("return result", "return result + 1")
NO_SYNTAX = changed("if value <= limit:", "if value <= limit")
RAISES = changed("result += value", "result += values[9]")
OTHER_SHAPE = "def total(values, limit):\n    return sum(values)"


@pytest.fixture(scope="module")
def grouped(golden_policy):
    """A batch of groups of programs, each a list of responses to a row; a response is right if its program passes."""

    def made(*groups, rewards=None, row=ROW, task=TASK):
        texts = [text_of(text) if "def" in text else text for group in groups for text in group]
        ids = [[*golden_policy.tokenizer(text)["input_ids"], golden_policy.end_token_ids[0]] for text in texts]
        batch = build_batch(golden_policy, [task.prompt(row)] * len(groups), len(groups[0]), ids, [True] * len(ids))
        if rewards is None:
            rewards = [verdict.correct for verdict in task.verdicts(batch.texts, batch.prompts)]
        return rollouts(batch, torch.tensor(rewards).float(), group_size=len(groups[0]))

    return made


def weighted(policy, batch, weights, row):
    """The text of the tokens with a weight, and the sum of the weights over the number of tokens."""
    tokens = weights.values[row].nonzero().flatten()
    text = policy.tokenizer.decode(batch.response_ids[row, tokens], skip_special_tokens=True).strip()
    return text, round(float(weights.values[row].sum() / batch.response_mask[row].sum()), 4)


def is_uniform(batch, weights, row):
    return torch.equal(weights.values[row], batch.response_mask[row].float())


def test_each_mode_blames_its_statement_on_all_of_its_tokens_alike(golden_policy, grouped):
    nothing = "I cannot."
    batch = grouped([REFERENCE, SLIP, LATE, NO_SYNTAX, RAISES, OTHER_SHAPE, REFERENCE, nothing])
    weights = EGCA()(golden_policy, batch, context())
    check_weights(EGCA(), weights, batch)
    assert [weighted(golden_policy, batch, weights, row) for row in (1, 2, 3, 4)] == [
        ("if value < limit:", 1.0),
        ("return result + 1", 1.0),
        ("if value <= limit", 1.0),
        ("result += values[9]", 1.0),
    ]
    assert [row for row in range(8) if is_uniform(batch, weights, row)] == [0, 5, 6, 7]
    assert weights.fallback.tolist() == [False] * 5 + [True, False, True]
    shares = {name: (mean.total, mean.size) for name, mean in weights.metrics.items()}
    modes = {"syntax": (2, 6), "constraint": (2, 6), "correct": (0, 6), "logic": (2, 6)}
    assert shares == modes | {"trace_cut": (0, 3)}  # Of the one with another shape, too.
    assert [len(weights.values[row].unique()) for row in (1, 2, 3, 4)] == [2] * 4
    for w_max in (1.0, 3.0, 0.25):
        capped = EGCA(w_max=w_max)(golden_policy, batch, context()).values
        assert torch.equal(capped[1:5], weights.values[1:5].clamp(max=w_max))
        assert is_uniform(batch, EGCA(w_max=w_max)(golden_policy, batch, context()), 0)


def test_an_endless_loop_has_a_trace_and_a_statement(golden_policy, grouped, programs_run):
    counted = "def total(values, limit):\n    k = 0\n    while k < len(values):\n        k += 1\n    return k"
    row = {**ROW, "tests": [[[[1, 2], 0], 2]], "reference": counted}
    task = CodeTask(limits=ProgramLimits(seconds=0.5))
    batch = grouped([counted, counted.replace("k += 1", "k += 0")], row=row, rewards=[1, 0], task=task)
    weights = EGCA()(golden_policy, batch, context())
    task.executor.close()
    assert weighted(golden_policy, batch, weights, 1) == ("k += 0", 1.0)


MEAN = """
    def total(values, limit):
        n = 0
        s = 0
        for value in values:
            n += 1
            s += value
        return s / n
"""
LONG = {"problem": "Average.", "entry": "total", "tests": [[[[1] * 400, 0], 1.0]], "reference": textwrap.dedent(MEAN)}


def test_a_program_that_raises_after_a_long_loop_is_blamed_where_it_raises(golden_policy, grouped):
    """400 rounds are more than a trace holds: what raises, and where, is told by a run without one."""
    late = changed("return s / n", "return s / (n - 400)", MEAN)
    inside = changed("s += value", "s += values[n + 2]", MEAN)  # Raises in the 398th round.
    shared = changed("s = 0", "s = 0; q = 7", changed("return s / n", "t = s; return t / 0", MEAN))
    batch = grouped([MEAN, late, inside, shared], row=LONG)
    weights = EGCA()(golden_policy, batch, context())
    assert [weighted(golden_policy, batch, weights, row) for row in (1, 2, 3)] == [
        ("return s / (n - 400)", 1.0),
        ("s += values[n + 2]", 1.0),
        ("return t / 0", 1.0),  # Not all that stands on the line.
    ]
    shares = {name: (mean.total, mean.size) for name, mean in weights.metrics.items()}
    assert shares["syntax"] == (3, 3)
    assert shares["trace_cut"] == (0, 0), "nothing was traced"


def test_a_trace_that_ends_early_is_a_figure(golden_policy, grouped):
    """What differs before its end is blamed all the same."""
    early = changed("n = 0", "n = 1", MEAN)
    late = changed("return s / n", "return s / n + 1", MEAN)
    batch = grouped([MEAN, early, late, MEAN], row=LONG)
    weights = EGCA()(golden_policy, batch, context())
    assert weighted(golden_policy, batch, weights, 1) == ("n = 1", 1.0)
    assert is_uniform(batch, weights, 2)
    assert weights.fallback.tolist() == [False, False, True, False]
    shares = {name: (mean.total, mean.size) for name, mean in weights.metrics.items()}
    assert shares["logic"] == shares["constraint"] == (1, 2)
    assert shares["trace_cut"] == (2, 2)


@pytest.mark.parametrize("line", [10**6, 10**9, -3, 0, 3])
def test_a_line_that_a_program_forges_is_one_of_its_statements_or_none(line, golden_policy, grouped):
    forged = f"""
        import sys, types
        def total(values, limit):
            result = 0
            here = types.TracebackType(None, sys._getframe(), 0, {line})
            raise ValueError("x").with_traceback(here)
    """
    batch = grouped([REFERENCE, forged])
    weights = EGCA()(golden_policy, batch, context())
    check_weights(EGCA(), weights, batch)
    assert weights.fallback.tolist() == [False, line != 3]
    if line == 3:  # Where the statement begins in Python's own format.
        assert weighted(golden_policy, batch, weights, 1) == ("def total(values, limit):", 1.0)


def test_only_a_negative_advantage_is_treated(golden_policy, grouped):
    batch = grouped([SLIP, LATE, REFERENCE, REFERENCE], rewards=[0.5, 0, 0, 1])
    batch = batch.replace(advantages=torch.tensor([0.1, -0.3, -0.3, 0.5]), correct=torch.tensor([0, 0, 1, 1]).bool())
    weights = EGCA()(golden_policy, batch, context())
    assert [row for row in range(4) if is_uniform(batch, weights, row)] == [0, 2, 3]
    assert not weights.fallback.any()
    assert {name: mean.total for name, mean in weights.metrics.items() if mean.total} == {"logic": 1, "correct": 1}


def test_right_programs_are_moved_to_the_same_statements_on_request(golden_policy, grouped):
    """Two of the group depart at the `if`, one at the `return`; a right program of another shape has neither."""
    spaced = REFERENCE.replace("result", "r").replace("value <= limit", "value<=limit")
    batch = grouped([spaced, SLIP, SLIP, LATE], [OTHER_SHAPE, SLIP, LATE, LATE], rewards=[1, 0, 0, 0] * 2)
    weights = EGCA(right="balanced")(golden_policy, batch, context())
    length, values = int(batch.response_mask[0].sum()), weights.values[0]
    of_weight = {float(v): golden_policy.tokenizer.decode(batch.response_ids[0][values == v]) for v in values.unique()}
    shares = {of_weight[v].strip(): v * int((values == v).sum()) / length for v in of_weight if v}
    assert shares == {"if value<=limit:": pytest.approx(2 / 3), "return r": pytest.approx(1 / 3)}
    assert is_uniform(batch, weights, 4)
    assert weights.fallback.tolist() == [False] * 4 + [True] + [False] * 3
    # Only right programs are praised: the second row is wrong, with an advantage.
    praised = batch.replace(advantages=torch.tensor([2.0, 1, -1, -2] * 2))
    weights = EGCA(right="balanced")(golden_policy, praised, context())
    assert [is_uniform(batch, weights, row) for row in (0, 1)] == [False, True]
    assert not weights.fallback[1]


def test_controls_blame_other_statements_of_the_same_rollouts(golden_policy, grouped):
    batch = grouped([REFERENCE, SLIP, LATE, RAISES, NO_SYNTAX, OTHER_SHAPE])
    found = {
        name: EGCA(blamed=name)(golden_policy, batch, context()) for name in ("divergent", "random", "last", "permuted")
    }
    told = {name: [weighted(golden_policy, batch, w, row)[0] for row in range(1, 5)] for name, w in found.items()}
    assert told["last"] == ["return result", "return result + 1", "return result", "return result"]
    # The numbers of the statements are 3, 5, 4 and 3; each has that of another one of these rollouts.
    lines = [[line.strip() for line in text.splitlines()[2:-1]] for text in batch.texts[1:5]]
    permuted = [lines[k].index(told["permuted"][k]) for k in range(4)]
    assert permuted in ([5, 4, 3, 3], [4, 3, 3, 5], [3, 3, 5, 4])
    # One that is alone has a random one: its own would be no control.
    alone = grouped([REFERENCE, SLIP])
    ones = [EGCA(blamed="permuted")(golden_policy, alone, context(seed=seed)) for seed in range(5)]
    assert len({weighted(golden_policy, alone, one, 1)[0] for one in ones}) > 1
    draws = [EGCA(blamed="random")(golden_policy, batch, context(seed=seed)) for seed in range(40)]
    assert {weighted(golden_policy, batch, one, 1)[0] for one in draws} == set(lines[0])
    for name, weights in found.items():
        assert torch.equal(weights.fallback, found["divergent"].fallback), name
        assert weights.metrics == found["divergent"].metrics
        assert all(weighted(golden_policy, batch, weights, row)[1] == 1 for row in range(6))


def test_statements_that_no_test_executes_get_no_weight(golden_policy, grouped):
    dead = changed(
        "return result", "later: int\n        if result == 99:\n            result = 1\n        return result"
    )
    odd = "import math\ndef never(x):\n    return x; x = 1\n" + textwrap.dedent(OTHER_SHAPE)
    caught = "def total(values, limit):\n  try:\n    return values[9]\n  except IndexError:\n    return sum(values)"
    batch = grouped([REFERENCE, dead, odd, NO_SYNTAX, caught])
    method = ExecutedMask()
    weights = method(golden_policy, batch, context())
    check_weights(method, weights, batch)
    missing = [batch.response_mask[row] & (weights.values[row] == 0) for row in range(5)]
    texts = [
        golden_policy.tokenizer.decode(ids[mask]).strip() for ids, mask in zip(batch.response_ids, missing, strict=True)
    ]
    assert texts == ["", "result = 1", "return x x = 1", "", ""]
    assert weights.values.max() == 1
    assert weights.fallback.tolist() == [False, False, False, True, False]
    assert weights.metrics["not_executed"].total == sum(int(mask.sum()) for mask in missing)
    assert weights.metrics["not_executed"].size == int(batch.response_mask.sum())
    # A trace that is cut at the end of a call inside of the function does not show what is executed behind it.
    for padding in range(3):
        pads = "".join(f"  x{k} = 1\n" for k in range(padding))
        calls = f"def g(x):\n  return x\ndef total(values, limit):\n{pads}  for k in range(400):\n    g(k)\n  r = 0\n"
        calls += "  for x in values:\n    if x <= limit:\n      r += x\n  return r"
        cut = method(golden_policy, grouped([calls, SLIP]), context())
        assert cut.fallback.tolist() == [True, False]
    # Rows without an advantage are not run.
    silent = method(golden_policy, batch.replace(advantages=torch.zeros(5)), context())
    assert torch.equal(silent.values, batch.response_mask.float())


def test_the_program_of_several_turns_is_that_of_the_last(golden_policy):
    """What an environment answers is in none of the weights, and counts for no length."""
    rows = [[text_of(SLIP), "told: 3 failed", text_of(LATE)], [text_of(LATE), "told", text_of(REFERENCE)]]
    sampled = in_turns(golden_policy, [TASK.prompt(ROW)] * 2, rows).replace(group=torch.tensor([0, 0]))
    batch = rollouts(sampled, torch.tensor([0.0, 1.0]), group_size=2)
    weights = EGCA(right="balanced")(golden_policy, batch, context())
    check_weights(EGCA(), weights, batch)
    assert weighted(golden_policy, batch, weights, 0) == ("return result + 1", 1.0)
    assert weighted(golden_policy, batch, weights, 1) == ("return result", 1.0)
    assert (weights.values[~batch.response_mask] == 0).all()
    assert int(batch.response_mask.sum()) < int(batch.valid_mask.sum())


def test_nothing_divides_by_zero_where_nothing_is_to_blame(golden_policy, grouped):
    batch = grouped([REFERENCE, REFERENCE], ["", "  "], rewards=[1, 1, 0, 0])
    for method in (EGCA(), EGCA(right="balanced"), EGCA(blamed="permuted"), ExecutedMask()):
        weights = method(golden_policy, batch, context())
        check_weights(method, weights, batch)
        assert torch.equal(token_advantages(batch.advantages, weights), torch.zeros_like(weights.values))
        weights = method(golden_policy, batch.replace(advantages=torch.tensor([1.0, -1.0, 1.0, -1.0])), context())
        check_weights(method, weights, batch)
        assert torch.equal(weights.values, batch.response_mask.float())
    empty = batch.replace(response_mask=torch.zeros_like(batch.response_mask), advantages=torch.ones(4))
    check_weights(EGCA(), EGCA(right="balanced")(golden_policy, empty, context()), empty)
