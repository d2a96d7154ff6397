"""The records of a training step: sampling options, the batches in their three stages, and functions of their rows."""

from grail_lightning.batch.records import AnswerMasks, GradedBatch, RolloutBatch, SampledBatch, Sampling
from grail_lightning.batch.rows import join, lengths_to_mask, micro_batches, pad_left

__all__ = [
    "AnswerMasks",
    "GradedBatch",
    "RolloutBatch",
    "SampledBatch",
    "Sampling",
    "join",
    "lengths_to_mask",
    "micro_batches",
    "pad_left",
]
