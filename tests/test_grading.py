"""Rewards and answer masks of a batch of responses."""

import threading

import pytest
import torch

from grail_lightning.answers import Verdict, Verifier
from grail_lightning.engines.base import build_batch
from grail_lightning.grading.grade import grade_and_locate, grade_answers
from grail_lightning.grading.locate import align_rows, answer_masks
from grail_lightning.tasks import MathTask


def _batch(policy):
    prompts = [MathTask().prompt({"problem": "7+5?", "answer": "12"}) for _ in range(3)]
    texts = [r"7+5=12 \boxed{12}.", r"7+5=13 \boxed{13}.", "7+5=12"]
    return build_batch(policy, prompts, 1, [policy.tokenizer.encode(text) for text in texts], [True] * 3)


def test_rewards_and_masks_are_those_of_one_after_the_other(arithmetic):
    batch = _batch(arithmetic)
    with Verifier(num_workers=1) as verifier:
        found = grade_and_locate(batch, verifier, arithmetic.tokenizer)
        expected = grade_answers(batch.texts, batch.prompts, verifier)
    masks = answer_masks(batch, align_rows(batch, arithmetic.tokenizer))
    assert found.verdicts == expected
    assert found.correct.tolist() == [verdict.correct for verdict in expected] == [True, False, False]
    assert found.rewards.tolist() == MathTask().reward(batch.texts, batch.prompts, expected) == [1.0, 0.0, 0.0]
    for name in ("whole", "content", "marker", "after"):
        assert torch.equal(getattr(found.answer, name), getattr(masks, name)), name
    assert found.answer.whole.any(1).tolist() == [True, True, False]


def test_answers_are_located_while_the_verifier_is_at_work(arithmetic):
    """Neither side gets on without the other here: one after the other would not end."""
    grading, locating = threading.Event(), threading.Event()

    class Waiting:
        """A verifier whose workers take as long as it takes to locate the first answer."""

        def grade(self, pairs):
            grading.set()
            assert locating.wait(60), "no answer was located meanwhile"
            return [Verdict.missing(gold) for gold, _ in pairs]

    class Tokenizer:
        def __getattr__(self, name):
            assert grading.wait(60), "grading did not begin meanwhile"
            locating.set()
            return getattr(arithmetic.tokenizer, name)

    batch = grade_and_locate(_batch(arithmetic), Waiting(), Tokenizer())
    assert batch.answer.whole.any(1).tolist() == [True, True, False]


def test_an_error_in_grading_is_the_one_that_is_seen(arithmetic):
    class Broken:
        def grade(self, pairs):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grade_and_locate(_batch(arithmetic), Broken(), arithmetic.tokenizer)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("answer-masks")]


@pytest.mark.parametrize("answer", [7, ("7",), b"7"], ids=["a number", "a tuple", "bytes"])
def test_an_answer_that_is_no_string_is_an_error_that_names_the_task(answer, arithmetic):
    class Mine(MathTask):
        def answer(self, text):
            return answer

    prompts = [Mine().prompt({"problem": "3+4?", "answer": "7"})]
    batch = build_batch(arithmetic, prompts, 1, [arithmetic.tokenizer.encode("7")], [True])
    message = rf"`Mine\.answer` must return a string, or None .*, but got {type(answer).__name__} \("
    with Verifier(num_workers=1) as verifier, pytest.raises(ValueError, match=message):
        grade_and_locate(batch, verifier, arithmetic.tokenizer)
