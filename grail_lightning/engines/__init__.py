"""Rollout engines: they sample responses to prompts, as token ids."""

from grail_lightning.engines.base import RolloutEngine, build_batch
from grail_lightning.engines.hf import HFEngine
from grail_lightning.engines.vllm.colocated import VLLMEngine
from grail_lightning.engines.vllm.server import VLLMServer

__all__ = ["HFEngine", "RolloutEngine", "VLLMEngine", "VLLMServer", "build_batch"]
