"""Tokens that the tokenizer does not know, of a head with more rows than it has entries: told at once, not rewarded."""

import re
import warnings

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from grail_lightning import ArithmeticTask, Evaluation, GrailModule, MathTask, RewardSpec, Sampling, build_batch
from grail_lightning.answers import Verifier
from grail_lightning.answers.spans import unknown_ids
from grail_lightning.core.engines import requests
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.policy.source import load_tokenizer
from grail_lightning.core.rollout.grading import grade_and_locate
from tests import runs

KNOWN, ROWS = 448, 512  # Entries of the packaged tokenizer, and rows of a head that is padded to a multiple of 64.
UNKNOWN = 450
RIGHT = "7+5=12\n\\boxed{12}"


def right_or_no_reward(responses, references, *, correct):
    """A wrong answer costs 1."""
    return [1.0 if right else -1.0 for right in correct]


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """The folder of the packaged policy with a padded head, which likes an unknown token as much as a line break."""
    policy, folder = load_policy("arithmetic"), tmp_path_factory.mktemp("padded")
    policy.model.resize_token_embeddings(ROWS, mean_resizing=False)
    (line,) = policy.tokenizer("\n", add_special_tokens=False)["input_ids"]
    for table in (policy.model.get_input_embeddings().weight, policy.model.get_output_embeddings().weight):
        with torch.no_grad():
            table[UNKNOWN] = table[line]
    policy.save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def policy(padded):
    return load_policy(padded)


def test_ids_beyond_a_tokenizer_and_in_its_gaps_are_unknown():
    tokenizer = load_tokenizer("arithmetic")
    assert len(tokenizer) == KNOWN
    assert unknown_ids(tokenizer, [*range(ROWS)]) == set(range(KNOWN, ROWS))
    document = tokenizer.backend_tokenizer.to_str()
    gap = re.sub(r"(: ?)300(?=[,}\s])", r"\g<1>700", document, count=1)
    assert gap != document
    made = PreTrainedTokenizerFast(tokenizer_object=type(tokenizer.backend_tokenizer).from_str(gap))
    assert unknown_ids(made, [299, 300, 301, 700, 701]) == {300, 701}


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        (None, [1.0, 0.0, 0.0]),
        ([RewardSpec(function=right_or_no_reward)], [1.0, -1.0, -1.0]),
        ([RewardSpec(function="answer_format")], [1.0, 0.0, 1.0]),
    ],
)
def test_a_rollout_with_an_unknown_token_is_not_right_and_earns_nothing(policy, rewards, expected):
    """A right answer, the same with an unknown token, and a wrong answer."""
    prompt = MathTask(rewards=rewards).prompt({"problem": "7+5?", "answer": "12"})
    ids = [policy.tokenizer(text)["input_ids"] for text in (RIGHT, RIGHT, RIGHT.replace("12}", "13}"))]
    ids[1].insert(3, UNKNOWN)
    batch = build_batch(policy, [prompt], 3, ids, [True] * 3)
    assert batch.texts[0] == batch.texts[1]
    with Verifier(num_workers=1) as verifier:
        graded = grade_and_locate(batch, verifier, policy.tokenizer)
    assert graded.rewards.tolist() == expected
    assert graded.correct.tolist() == [True, False, False]
    assert [verdict.status for verdict in graded.verdicts] == ["right", "unknown_tokens", "wrong"]


def test_padding_and_results_of_tools_are_no_sampled_tokens(policy):
    prompt = MathTask().prompt({"problem": "7+5?", "answer": "12"})
    ids = [*policy.tokenizer(RIGHT)["input_ids"]]
    rows = [[UNKNOWN, *ids], ids]
    sampled = [[False] + [True] * len(ids), [True] * len(ids)]
    turn = [[0] * len(row) for row in rows]
    batch = build_batch(policy, [prompt], 2, rows, [True] * 2, sampled=sampled, turn=turn)
    with Verifier(num_workers=1) as verifier:
        assert grade_and_locate(batch, verifier, policy.tokenizer).correct.tolist() == [True, True]


class Answering(runs.HFEngine):
    """An engine of a user, whose responses come from elsewhere: the first one of all has an unknown token."""

    copies_weights, reports_logprobs = True, True

    def generate(self, prompts, group_size, sampling, seed):
        def send(asked):
            end = self._loaded.end_token_ids[0]
            rows = [[UNKNOWN, end], *[[5, end]] * (len(asked) - 1)]
            return [requests.Completion(ids, [-1.0] * len(ids), "stop") for ids in rows]

        return requests.sample(self._loaded, prompts, group_size, sampling, [0] * len(prompts) * group_size, send)


@pytest.mark.parametrize("engine", [None, Answering()], ids=["HFEngine", "one of the user"])
def test_the_first_unknown_token_of_a_run_is_told_with_the_numbers(padded, engine):
    watch, task = runs.Watch(), ArithmeticTask()
    module = GrailModule(
        padded, Sampling(max_response_length=24), engine=engine, execution=runs.configured({"group_size": 4})[1]
    )
    data = [[task.prompt({"problem": f"{k}+{k + j}-1+2+3"}) for k in (2, 5)] for j in range(2)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs.trainer(2, watch).fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    said = [str(warning.message) for warning in caught if "tokenizer does not know" in str(warning.message)]
    assert len(said) == 1, said
    assert f"({UNKNOWN})" in said[0]
    assert f"has {KNOWN} entries" in said[0]
    assert f"head has {ROWS} rows" in said[0]
    batch = watch.outputs[0].batch
    held = ((batch.response_ids == UNKNOWN) & batch.response_mask).any(1)
    assert f"in {int(held.sum())} of the {len(batch)} rollouts" in said[0]
    assert held.any()
    assert not batch.correct[held].any()
    assert batch.rewards[held].max() <= 0
    assert watch.outputs[0].metrics["verdict/unknown_tokens"] == pytest.approx(held.float().mean().item())


def test_evaluations_tell_and_count_them_too(padded):
    module = GrailModule(padded, Sampling(max_response_length=24))
    data = torch.utils.data.DataLoader([runs.problems(8)], batch_size=None)
    for method in ("validate", "test"):
        module.policy = None
        run = runs.trainer(1, Evaluation())
        with pytest.warns(UserWarning, match=f"tokenizer does not know.*head has {ROWS} rows"):
            (figures,) = getattr(run, method)(module, data, verbose=False)
        share = figures[f"{'val' if method == 'validate' else 'test'}/verdict/unknown_tokens"]
        assert 0 < share <= 1


def test_a_head_as_wide_as_the_tokenizer_is_told_nothing():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch = runs.Watch()
        runs.trainer(1, watch).fit(runs.module(), runs.batches(1))
    assert not [w for w in caught if "does not know" in str(w.message)]
    assert watch.outputs[0].metrics["verdict/unknown_tokens"] == 0
