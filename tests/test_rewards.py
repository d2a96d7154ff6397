"""Rewards of several parts on their way through grading into the reports."""

import torch

from grail_lightning.answers import Verifier
from grail_lightning.engines import HFEngine
from grail_lightning.grading import grade
from grail_lightning.reports import rollout_report
from grail_lightning.rollout import Sampling
from grail_lightning.tasks import MathTask
from grail_lightning.tasks.rewards import RewardSpec


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
        graded, verdicts = grade(batch, verifier)
    assert graded.correct.tolist() == [True, False, True, True]
    penalty = -(batch.response_lengths.float() / 4)  # limit = buffer: the slope begins at no token
    assert torch.allclose(graded.rewards, graded.correct.float() + 2 * penalty)
    assert torch.allclose(graded.reward_values["long"], penalty)
    assert torch.equal(graded.select(torch.tensor([1, 3])).reward_values["correctness"], torch.tensor([0.0, 1.0]))
    report = rollout_report(graded, verdicts)
    assert report["rewards/correctness/mean"] == report["accuracy"] == 0.75
    assert report["frac_correct_zero_std"] == 0.5  # the second group is right throughout
    assert report["verdict/missing"] == 0.25
    assert report["verdict/timeout"] == report["verdict/crashed"] == 0.0
