"""Sampled rows as the later stages of a batch, with the rewards and advantages that a test wants."""

import dataclasses

import torch

from grail_lightning.answers import Verdict
from grail_lightning.batch import AnswerMasks, GradedBatch, SampledBatch
from grail_lightning.functional import group_advantages
from grail_lightning.grading import align_rows, answer_masks


def graded(sampled, rewards=None, *, correct=None, answer=None, tokenizer=None, **changes):
    """A graded batch; without rewards all are 0, what earns more than 0 is right, and no answer is located.

    With a tokenizer answers are where they stand.
    """
    rewards = torch.zeros(len(sampled)) if rewards is None else rewards
    correct = rewards > 0 if correct is None else correct
    if tokenizer is not None:
        answer = answer_masks(sampled, align_rows(sampled, tokenizer))
    if answer is None:
        nowhere = torch.zeros_like(sampled.response_mask)
        answer = AnswerMasks(whole=nowhere, content=nowhere, marker=nowhere, after=nowhere)
    verdicts = [
        Verdict(correct=right, status="right" if right else "wrong", layer="string", gold="", prediction="")
        for right in correct.tolist()
    ]
    names = [f.name for f in dataclasses.fields(SampledBatch)]
    rows = {name: getattr(sampled, name) for name in names}
    made = {"answer": answer, "rewards": rewards, "correct": correct, "verdicts": verdicts}
    return GradedBatch(**rows | made | changes)


def rollouts(sampled, rewards=None, advantages=None, *, group_size=4, **more):
    """A batch that is ready to train on; without advantages they are the rewards beside those of each group."""
    made = graded(sampled, rewards, **more)
    if advantages is None:
        advantages = group_advantages(made.rewards, group_size)
    return made.with_advantages(advantages)
