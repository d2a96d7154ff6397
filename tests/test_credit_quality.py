"""The statistics and the counterfactual of benchmarks/credit_quality.py, against loops and greedy decoding by hand."""

import math
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from grail_lightning.credit import RLSD
from grail_lightning.worlds.search.environment import Search
from tests.benchmark_modules import benchmark
from tests.core.credit.groups import LATE, SOUND, groups
from tests.runs import TASK
from tests.steps import context_for
from tests.tolerance import assert_near

FLAWED = "7+5=2\n2-3=-1\n-1+8=6\n\\boxed{6}"  # misconception, inherited, slip


@pytest.fixture(scope="module")
def truth():
    return benchmark("credit_truth")


def greedy_lab(world, group_size):
    """A lab whose continuations are greedy."""
    values = benchmark("credit_values")
    where = values.setting(world, 5, 5, 3)
    return values.open_lab(replace(where, group_size=group_size, sampling=replace(where.sampling, temperature=0)))


def test_lines_are_found_with_the_tokens_of_their_results(truth, arithmetic):
    batch = groups(arithmetic, ("7+5-3+8", [SOUND, FLAWED, "Then\n" + LATE]))
    lines = truth.label_lines(batch, arithmetic)
    results = [
        [arithmetic.tokenizer.decode(batch.response_ids[b, lines.begin[b, s] : lines.stop[b, s]]) for s in range(3)]
        for b in range(3)
    ]
    assert results == [["12", "9", "17"], ["2", "-1", "6"], ["12", "9", "16"]]
    kinds = [[name for s in range(3) for name in truth.KINDS if lines.kind[name][b, s]] for b in range(3)]
    assert kinds == [["sound"] * 3, ["misconception", "inherited", "slip"], ["sound", "sound", "slip"]]
    columns = torch.arange(batch.response_mask.shape[1]).float().expand(batch.response_mask.shape)
    assert torch.equal(lines.of(columns), lines.stop - 1.0)


def test_teachers_with_right_and_wrong_answers_in_their_prompts_are_those_of_rlsd(arithmetic):
    batch = groups(arithmetic, ("7+5-3+8", [SOUND, LATE, FLAWED, SOUND]))
    right, own = ("17", "17", "17", "6"), ("17", "16", "6", "17")  # The last row as if of another problem.
    batch = batch.replace(
        prompts=[replace(prompt, reference=answer) for prompt, answer in zip(batch.prompts, right, strict=True)],
        verdicts=[replace(verdict, prediction=answer) for verdict, answer in zip(batch.verdicts, own, strict=True)],
        advantages=torch.tensor([1.0, -1.0, -1.0, -1.0]),
    )
    found = benchmark("credit_quality").teachers(arithmetic, batch)
    for name, answers in (("right", right), ("another problem's", ("6", "6", "6", "17")), ("the rollout's own", own)):
        shown = [replace(prompt, reference=answer) for prompt, answer in zip(batch.prompts, answers, strict=True)]
        expected = RLSD(refresh_steps=1)(arithmetic, batch.replace(prompts=shown), context_for(arithmetic)).scores
        assert_near(found[name][0] * batch.response_mask, expected, 1000, torch.float32)
    assert torch.equal(found["the rollout's own"][:, 0], found["right"][:, 0])
    assert (found["right"][1] >= 0).all()  # A product with itself.


def test_forks_are_where_a_wrong_and_a_sound_result_part(truth, arithmetic):
    other = "7+5=11\n11-3=8\n8+8=16\n\\boxed{16}"  # a slip
    texts = [SOUND, FLAWED, LATE, other, SOUND, LATE, "Then\n" + LATE, SOUND]
    batch = groups(arithmetic, ("7+5-3+8", texts))
    lines, used = truth.label_lines(batch, arithmetic), torch.tensor([True] * 7 + [False])
    slips = truth.forks(batch, lines, used, "slip", 4)
    pairs = [*zip(*slips.row.tolist(), slips.line.tolist(), slips.token.tolist(), strict=True)]
    # `other` (3) parts from 0 and 2 in the second digit of its 11. 2 parts from 0 in the second digit of 16, behind two
    # lines of 7 tokens and "9+8=1"; so does 5 from 4, but not 6, which began with filler.
    assert sorted(pairs) == [(2, 0, 2, 19), (3, 0, 0, 5), (3, 2, 0, 5), (5, 4, 2, 19)]
    misconceptions = truth.forks(batch, lines, used, "misconception", 4)
    assert sorted(misconceptions.row.T.tolist()) == [[1, 0], [1, 2]]
    assert misconceptions.token.tolist() == [4, 4]
    above, below, unknown = (torch.tensor([value]).expand(4) for value in (2.0, 1.0, torch.nan))
    assert [x.tolist() for x in slips.wins(above, below)] == [[3, 1], [3, 1]]
    assert [x.tolist() for x in slips.wins(below, above)] == [[0, 0], [3, 1]]
    assert [x.tolist() for x in slips.wins(below, below)] == [[1.5, 0.5], [3, 1]]
    assert [x.tolist() for x in slips.wins(unknown, above)] == [[0, 0], [0, 0]]


def test_gains_under_greedy_decoding_are_those_of_decoding_by_hand(truth, arithmetic):
    sound = "9+9=18\n18-3=15\n15-2=13\n13-1=12\n\\boxed{12}"
    cut = "9+9=1\n1-3=-2\n-2-2=-4\n-4-1=-5\n\\boxed{-5}"  # behind the "1" there could still come an "8"
    batch = groups(arithmetic, ("9+9-3-2-1", [sound, cut]))

    def right(row, length):
        beginning = torch.cat([batch.input_ids[row, : batch.prompt_width], batch.response_ids[row, :length]])
        out = arithmetic.model.generate(beginning[None], do_sample=False, max_new_tokens=64 - length)[0]
        text = arithmetic.tokenizer.decode(out[batch.prompt_width :], skip_special_tokens=True)
        return float(TASK.answer(text) == "12")

    lines = truth.label_lines(batch, arithmetic)
    with greedy_lab("chains", group_size=2) as lab:
        gains = truth.gains_of_lines(lab, batch, lines, torch.arange(2), samples=2, seed=0)
    expected = torch.tensor(
        [[right(b, lines.stop[b, s] + 1) - right(b, lines.begin[b, s]) for s in range(4)] for b in range(2)]
    )
    assert torch.equal(gains, torch.stack([expected, expected]))
    assert expected[:, 0].tolist() == [0, -1], "greedily right before the slip, wrong after it"


@pytest.fixture(scope="module")
def searched():
    """The policy of the world of search, and rollouts of five problems."""
    values = benchmark("credit_values")
    with values.open_lab(values.setting("search", 0, 5, 3)) as lab:
        return lab.policy, benchmark("credit_subjects").respond(lab, lab.setting.data.load("test")[0].prompts, 1)


def test_a_turn_is_bad_if_its_search_brings_no_new_document_of_the_path(truth, searched):
    policy, batch = searched
    lines, scores = truth.label_turns(batch), torch.randn(batch.response_mask.shape, dtype=torch.float64)
    means, found = lines.of(scores), []
    for b, ids in enumerate(batch.response_ids):
        path, seen = set(batch.prompts[b].columns["path"]), set()
        whole = policy.tokenizer.decode(ids[batch.valid_mask[b]], skip_special_tokens=True)
        for s, turn in enumerate(whole.split("</result>\n")):
            said, _, told = turn.partition("\n<result>")
            own = slice(lines.begin[b, s], lines.stop[b, s])
            assert policy.tokenizer.decode(ids[own], skip_special_tokens=True) == said
            assert float(means[b, s]) == pytest.approx(float(scores[b, own].mean()))
            shown = {line.removeprefix("- ") for line in told.split("\n")} & path
            found.append(None if not told else "sound" if shown - seen else "bad turn")
            assert [name for name, kind in lines.kind.items() if kind[b, s]] == [found[-1]] * bool(told)
            seen |= shown
    assert len(found) == int(lines.known.sum())
    assert min(found.count("sound"), found.count("bad turn")) > 5


def test_gains_of_turns_under_greedy_decoding_are_those_of_a_loop_by_hand(truth, searched):
    policy, batch = searched
    text, rows = policy.tokenizer.decode, torch.arange(len(batch))[batch.advantages != 0][:2]
    most = {"stop_strings": ["</search>"], "tokenizer": policy.tokenizer, "max_new_tokens": 20, "do_sample": False}

    def right(b, turns):
        environment, ids = Search(), policy.encode(batch.prompts[b].messages)
        environment.reset(**batch.prompts[b].columns)
        for number in range(8):
            more = turns[number : number + 1] or [policy.model.generate(torch.tensor([ids]), **most)[0, len(ids) :]]
            own = [int(token) for token in more[0]]
            if (call := re.fullmatch(r"<search>(.*)</search>", text(own))) is None:
                answer = batch.prompts[b].task.answer(text(own, skip_special_tokens=True))
                return float(answer == batch.prompts[b].reference)
            said = f"\n<result>{environment.search(call[1])}</result>\n"
            ids = [*ids, *own, *policy.tokenizer(said)["input_ids"]]
        return 0.0

    with greedy_lab("search", group_size=8) as lab:
        gains = truth.gains_of_lines(lab, batch, truth.label_turns(batch), rows, samples=2, seed=0)
    for b in rows.tolist():
        turns = truth.beginning(batch, b, batch.response_mask.shape[1])
        by_hand = [right(b, turns[:k]) for k in range(len(turns) + 1)]
        expected = [after - before for before, after in pairwise(by_hand)]
        assert gains[:, b, : len(turns)].tolist() == [expected, expected]


def test_auroc_equals_the_loop_over_pairs(truth):
    generator = torch.Generator().manual_seed(1)
    scores = torch.randint(0, 4, (12, 9), generator=generator).float()  # few values, so many ties
    labels = torch.randint(0, 4, (12, 9), generator=generator)
    labels[3], labels[4] = 2, 0  # a row without a positive token, and one without a negative one
    expected = []
    for row, kinds in zip(scores.tolist(), labels.tolist(), strict=True):
        pairs = [
            (a, b) for a, x in zip(row, kinds, strict=True) for b, y in zip(row, kinds, strict=True) if (x, y) == (0, 2)
        ]
        wins = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs)
        expected.append(wins / len(pairs) if pairs else float("nan"))
    assert truth.pairwise_auroc(scores, labels == 0, labels == 2).tolist() == pytest.approx(expected, nan_ok=True)
    assert [math.isnan(one) for one in expected[3:5]] == [True, True]
    # A sigmoid would make these equal.
    scores, flawed = torch.tensor([[100.0, 200.0]]), torch.tensor([[False, True]])
    assert truth.pairwise_auroc(scores, flawed, ~flawed).item() == 1
