"""Rollout engines: they sample responses to prompts, as token ids."""

from grail_lightning.engines.base import RolloutEngine, build_batch
from grail_lightning.engines.hf import HFEngine
from grail_lightning.engines.vllm.server import VLLMServer

__all__ = ["HFEngine", "RolloutEngine", "VLLMServer", "build_batch"]
