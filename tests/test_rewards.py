"""Rewards of several parts on their way through grading into the reports."""

import pytest
import torch

from grail_lightning.answers import Verifier
from grail_lightning.batch import Sampling
from grail_lightning.engines import HFEngine
from grail_lightning.grading import grade_and_locate
from grail_lightning.step.report import Tally, add_rollouts
from grail_lightning.tasks import ArithmeticTask, MathTask
from grail_lightning.tasks.rewards import RewardSpec
from tests.tolerance import assert_near


def test_shaped_rewards_leave_correctness_alone_and_are_logged_part_by_part(arithmetic):
    overlong = RewardSpec(function="overlong", weight=2.0, arguments={"limit": 4, "buffer": 4}, name="long")
    task = MathTask(rewards=[RewardSpec(function="correctness"), overlong])
    prompts = [task.prompt({"problem": "Compute 1+1.", "answer": "2"}) for _ in range(2)]
    engine = HFEngine()
    engine.update_weights(arithmetic)
    batch = engine.generate(prompts, 2, Sampling(max_response_length=4), seed=1)
    texts = [r"\boxed{2}", "no", r"\boxed{2}", r"\boxed{2}"]
    batch = batch.replace(texts=texts)
    with Verifier(num_workers=1) as verifier:
        graded = grade_and_locate(batch, verifier, arithmetic.tokenizer)
    assert graded.correct.tolist() == [True, False, True, True]
    penalty = -(batch.response_lengths.float() / 4)  # limit = buffer: the slope begins at no token
    assert_near(graded.rewards, graded.correct.float() + 2 * penalty, 16)
    assert_near(graded.reward_values["long"], penalty, 16)
    assert torch.equal(graded.select(torch.tensor([1, 3])).reward_values["correctness"], torch.tensor([0.0, 1.0]))
    tally = Tally()
    add_rollouts(tally, graded)
    report = tally.compute()
    assert report["rewards/correctness/mean"] == report["accuracy"] == 0.75
    assert report["frac_correct_zero_std"] == 0.5  # the second group is right throughout
    assert report["verdict/missing"] == 0.25
    assert report["verdict/timeout"] == report["verdict/crashed"] == 0.0


class KeyTask(ArithmeticTask):
    """A task of a user's with a bug."""

    def reward(self, texts, prompts, verdicts, lengths=None):
        return [prompt.columns["level"] for prompt in prompts]


class ShortTask(ArithmeticTask):
    """Forgets a response."""

    def earn(self, texts, prompts, verdicts, lengths):
        return type(super().earn(texts, prompts, verdicts, lengths))(total=[1.0], values={})


class PartTask(ArithmeticTask):
    """Forgets a response in one of its parts."""

    def earn(self, texts, prompts, verdicts, lengths):
        return type(super().earn(texts, prompts, verdicts, lengths))(total=[1.0] * len(texts), values={"half": [0.5]})


def divides(responses, references):
    """A reward with a bug."""
    return [1 / 0 for _ in responses]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (KeyTask(), r"`KeyTask\.earn` must return 2 finite numbers.*but it raised KeyError: 'level'"),
        (ShortTask(), r"`ShortTask\.earn` must return 2 finite numbers, one a response, but got \[1\.0\]"),
        (PartTask(), r"`PartTask\.earn` must return 2 values of its part `half`, one a response, but got 1"),
        (
            ArithmeticTask(rewards=[RewardSpec(function=f"{__name__}.divides")]),
            r"`ArithmeticTask\.earn`: The reward `[a-z._]+divides` raised ZeroDivisionError: division by zero",
        ),
    ],
)
def test_a_reward_that_raises_or_has_another_length_is_an_error_that_names_it(task, message, arithmetic):
    engine = HFEngine()
    engine.update_weights(arithmetic)
    batch = engine.generate([task.prompt({"problem": "1+1"})], 2, Sampling(max_response_length=4), seed=1)
    with Verifier(num_workers=1) as verifier, pytest.raises(ValueError, match=message):
        grade_and_locate(batch, verifier, arithmetic.tokenizer)
