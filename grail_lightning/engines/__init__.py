"""Rollout engines: they sample responses to prompts, as token ids."""

from grail_lightning.engines.base import RolloutEngine, build_batch
from grail_lightning.engines.hf import HFEngine

__all__ = ["HFEngine", "RolloutEngine", "build_batch"]
