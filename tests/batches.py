"""Sampled rows as the later stages of a batch, with the rewards and advantages that a test wants."""

import dataclasses

import torch

from grail_lightning import GradedBatch, SampledBatch, build_batch
from grail_lightning.answers import Verdict
from grail_lightning.core.records.episode import Episode, ToolCall, Turn
from grail_lightning.core.rollout.batch import AnswerMasks, lengths_to_mask, pad_left
from grail_lightning.core.rollout.grading import align_rows, answer_masks
from grail_lightning.functional import group_advantages


def of_ids(prompts, responses, /, **more):
    """Sampled rows of given ids, padded with 0: the ids of each row's prompt, and of its response."""
    begun, begun_mask = pad_left(prompts, 0)
    lengths = torch.tensor([len(ids) for ids in responses])
    width = int(lengths.max())
    ids = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in responses]).reshape(-1, width)
    mask = lengths_to_mask(lengths, width)
    rows = {
        "input_ids": torch.cat([begun, ids], 1).int(),
        "attention_mask": torch.cat([begun_mask, mask], 1),
        "response_ids": ids.int(),
        "response_mask": mask,
        "group": torch.zeros(len(ids), dtype=torch.long),
        "row": torch.arange(len(ids)),
        "finished": torch.ones(len(ids), dtype=torch.bool),
        "prompts": [None] * len(ids),
        "texts": [""] * len(ids),
    }
    return SampledBatch(**rows | more)


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


def in_turns(policy, prompts, rows, finished=True, *, group_size=1, logprobs=None):
    """Rollouts whose texts are in turn what the policy wrote and what it was told by calls of `find`.

    `finished` is said of all rows, or of each; with `logprobs` an engine knows every token's.
    """
    ends = [finished] * len(rows) if isinstance(finished, bool) else finished
    ids, sampled, turn = [], [], []
    for texts, ended in zip(rows, ends, strict=True):
        parts = [policy.tokenizer(text)["input_ids"] for text in texts]
        parts[-1] += [policy.end_token_ids[0]] * ended
        numbers = [number for number, part in enumerate(parts) for _ in part]
        ids.append([token for part in parts for token in part])
        sampled.append([number % 2 == 0 for number in numbers])
        turn.append([number // 2 for number in numbers])
    known = None if logprobs is None else [[logprobs] * len(row) for row in ids]
    batch = build_batch(policy, prompts, group_size, ids, ends, known, sampled=sampled, turn=turn)
    return batch.replace(episodes=[_episode(texts, ended) for texts, ended in zip(rows, ends, strict=True)])


def _episode(texts, finished):
    calls = [(ToolCall(name="find", arguments={"word": told[:3]}, result=told),) for told in texts[1::2]] + [()]
    turns = [Turn(text=text, calls=made, score=0.25) for text, made in zip(texts[::2], calls, strict=True)]
    return Episode(turns=tuple(turns), end="answered" if finished else "tokens", reward=1.0)


def rollouts(sampled, rewards=None, advantages=None, *, group_size=4, **more):
    """A batch that is ready to train on; without advantages they are the rewards beside those of each group."""
    made = graded(sampled, rewards, **more)
    if advantages is None:
        advantages = group_advantages(made.rewards, group_size)
    return made.with_advantages(advantages)
