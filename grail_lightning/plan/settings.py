"""The options of `fit` on which memory and time depend, in one record."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from jsonargparse import Namespace

from grail_lightning.batch import Sampling
from grail_lightning.engines import HFEngine
from grail_lightning.policy import Loading, LoRA
from grail_lightning.step.options import Execution, Objective

Strategy = Literal["single", "ddp", "fsdp2"]
Device = Literal["cpu", "cuda"]

ASSUMED_PROMPT_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class Credit:
    """What a credit method computes for each row.

    Attributes:
        name: The name of the class.
        forwards: Forward passes of the scored rows.
        backwards: Backward passes to the embeddings.
        fused: Whether saliency may be taken from the update's own forward pass.
        refreshed: Whether it is computed before every optimiser step, not once a batch.
        known: Whether the numbers of passes are known. A user's own class may do anything.
        compares: Whether it needs the frozen reference.
        trains: Whether it trains a second model.
    """

    name: str
    forwards: float = 0.0
    backwards: float = 0.0
    fused: bool = False
    refreshed: bool = False
    known: bool = True
    compares: bool = False
    trains: bool = False

    @property
    def runs(self) -> bool:
        """Whether the method runs the policy."""
        return self.forwards > 0


# Forward passes, and backward passes to the embeddings, of a scored row.
PASSES: dict[str, tuple[float, float]] = {
    "Uniform": (0, 0),
    "AdvantageReweighting": (1, 0),
    "GRAIL": (1, 1),
    "OARGradient": (2, 1),
    "HighEntropy": (1, 0),
    "LESS": (1, 0),
    "UCAS": (1, 0),
    "RLSD": (2, 0),
    "DGPO": (2, 0),
    "PRIME": (4, 0),  # The reference, and a training pass of the second model, whose backward pass counts as two.
    "AttentionRhythm": (1, 0),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the options of a `fit` ask for.

    Attributes:
        policy: The name of the policy.
        loading: How it is loaded.
        sampling: How training responses are sampled.
        objective: What is optimised.
        execution: How a step is run.
        credit: The credit method.
        controlled: Whether a control experiment wraps it.
        optimizer: A function from parameters to the optimiser.
        optimizer_name: The import path of its class.
        cache_tokens: Most tokens in the cache of `HFEngine`; None with another engine.
        precision: `trainer.precision`.
        strategy: The strategy with several devices.
        devices: The number of devices of the config.
        device: The kind of device.
        prompts_per_batch: Prompts of a batch, over all ranks.
        prompt_tokens: The longest prompt, in tokens.
        response_tokens: The mean length of a response, in tokens, on which times depend.
    """

    policy: str
    loading: Loading
    sampling: Sampling
    objective: Objective = field(default_factory=Objective)
    execution: Execution = field(default_factory=Execution)
    credit: Credit = field(default_factory=lambda: Credit(name="Uniform"))
    controlled: bool = False
    optimizer: Callable[[Any], Any]
    optimizer_name: str = "torch.optim.AdamW"
    cache_tokens: int | None = 131_072
    precision: str = "32-true"
    strategy: Strategy = "single"
    devices: int = 1
    device: Device = "cuda"
    prompts_per_batch: int = 32
    prompt_tokens: int = ASSUMED_PROMPT_TOKENS
    response_tokens: float

    @property
    def compares(self) -> bool:
        """Whether the run needs the frozen reference."""
        return self.objective.kl_coefficient > 0 or self.credit.compares

    @property
    def autocast(self) -> bool:
        """Whether blocks compute in half precision although the weights are not."""
        return self.precision in ("bf16-mixed", "16-mixed")

    @property
    def width(self) -> int:
        """The most tokens of a row."""
        return self.prompt_tokens + self.sampling.max_response_length

    def weight_dtype(self, own: torch.dtype) -> torch.dtype:
        """The dtype of the weights, given that of the checkpoint."""
        if self.precision in ("bf16", "bf16-true"):
            return torch.bfloat16
        if self.precision in ("64", "64-true"):
            return torch.float64
        dtype = self.loading.dtype
        return own if dtype == "auto" else getattr(torch, dtype)


def read_settings(
    fit: Namespace, *, prompt_tokens: int | None = None, response_tokens: float | None = None
) -> Settings:
    """The settings of the parsed options of `fit`.

    Args:
        fit: The namespace of jsonargparse, with the groups ``trainer``, ``model`` and ``data``.
        prompt_tokens: Tokens of the longest prompt; None takes ``data.max_prompt_length``, or else an assumption.
        response_tokens: Tokens of a mean response; None takes half of the limit.

    Raises:
        ValueError: If an option is out of range, or the run cannot be planned.
    """
    model, trainer = fit.model, fit.trainer
    sampling = Sampling(**model.sampling.as_dict())
    data = fit.get("data.init_args") or {}
    loading = model.loading.as_dict()
    lora = loading.pop("lora")
    strategy, devices = _strategy(trainer)
    limit = sampling.max_response_length
    prompt = prompt_tokens or data.get("max_prompt_length") or ASSUMED_PROMPT_TOKENS
    mean = limit / 2 if response_tokens is None else response_tokens
    if not 0 < mean <= limit:
        raise ValueError(f"`--response_tokens` must lie between 1 and the limit of {limit}, but got {mean:g}.")
    if prompt < 1:
        raise ValueError(f"`--prompt_tokens` must be at least 1, but got {prompt}.")
    return Settings(
        policy=model.policy,
        loading=Loading(**loading, lora=LoRA(**lora) if lora else None),
        sampling=sampling,
        objective=Objective(**model.objective.as_dict()),
        execution=Execution(**model.execution.as_dict()),
        credit=_credit(model.credit),
        controlled=model.control is not None,
        optimizer=partial(_imported(model.optimizer.class_path), **_options(model.optimizer)),
        optimizer_name=model.optimizer.class_path,
        cache_tokens=_cache_tokens(model.engine),
        precision=str(trainer.precision or "32-true"),
        strategy=strategy,
        devices=devices,
        device="cpu" if trainer.accelerator == "cpu" else "cuda",
        prompts_per_batch=data.get("prompts_per_batch", 32),
        prompt_tokens=prompt,
        response_tokens=mean,
    )


def _strategy(trainer: Namespace) -> tuple[Strategy, int]:
    """The strategy with several devices, and the number of devices of all nodes."""
    given = trainer.strategy
    name = (given if isinstance(given, str) else given.class_path).rpartition(".")[2]
    devices = trainer.devices if isinstance(trainer.devices, int) else 1
    number = max(devices, 1) * int(trainer.num_nodes or 1)
    if name == "ModelParallelStrategy":
        return "fsdp2", number
    if name == "auto" or name.lower().startswith("ddp"):
        return "ddp", number
    raise ValueError(
        f"`trainer.strategy` must be auto, ddp or ModelParallelStrategy (FSDP2) to be planned, but got {name}."
    )


def _credit(given: Namespace | None) -> Credit:
    if given is None:
        return Credit(name="Uniform")
    name = given.class_path.rpartition(".")[2]
    options = _options(given)
    saliency = options.get("saliency") or {}
    forwards, backwards = PASSES.get(name, (0.0, 0.0))
    refreshed = saliency.get("refresh", "rollout") == "update"
    return Credit(
        name=name,
        forwards=forwards,
        backwards=backwards,
        fused=name == "GRAIL" and saliency.get("fuse", True) and not refreshed,
        refreshed=refreshed,
        known=name in PASSES,
        compares=name in ("DGPO", "PRIME"),
        trains=name == "PRIME",
    )


def _cache_tokens(engine: Namespace | None) -> int | None:
    if engine is None:
        return HFEngine().cache_tokens
    if engine.class_path.rpartition(".")[2] != HFEngine.__name__:
        return None
    tokens = int(_options(engine).get("cache_tokens", HFEngine().cache_tokens))
    return HFEngine(tokens).cache_tokens  # It checks the number.


def _options(given: Namespace) -> dict[str, Any]:
    init = given.get("init_args")
    return {} if init is None else {**init.as_dict(), **(given.get("dict_kwargs") or {})}


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def ranks_rows(settings: Settings, ranks: int) -> tuple[int, int]:
    """The most prompts and rows of one rank."""
    prompts = math.ceil(settings.prompts_per_batch / ranks)
    return prompts, prompts * settings.execution.group_size
