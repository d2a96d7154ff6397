r"""``python -m grail_lightning.plan``: the memory of a training run, before a machine is rented.

All figures are closed forms; no weights are loaded. Symbols: ``P`` parameters, ``T`` trained ones, ``w`` bytes of a
weight, ``c`` bytes of an element of a matrix product (2 in half precision), ``N`` ranks over which FSDP2 shards, ``L``
blocks of width ``D`` with ``I`` columns in their MLP, ``H`` columns of queries and ``K`` of keys, ``V`` vocabulary.

==============  ======================================================================================================
kept            weights ``P·w/N``, float32 masters of weights in half precision, the optimiser's state (that of one step
                on a small matrix), a frozen reference, a model that the credit method trains, DDP's buckets
sampling        the cache of `HFEngine`, ``rows · length · L · K · (bytes of a key and a value)``; on a GPU a copy of
                one block's part for every head of queries, ``rows · length · H · …``; weights cast by autocast, and
                gathered by FSDP2
update          gradients; the input of each block, ``tokens · L · D``; one block's activations, ``(4I + 4D + 5(H +
                K)) · c`` a token, with 9 for 5 where queries and keys are normalised (those of all blocks without
                checkpointing); the logits of a chunk
step            gradients; on a GPU the temporary of an optimiser that goes through lists of weights (`foreach`)
==============  ======================================================================================================

`reference/performance.md` of the documentation says how exact this is.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from pydoc import locate
from typing import Any

import pandas as pd
import torch
from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveFloat, PositiveInt
from torch import nn

from grail_lightning.app.cli.app import FitOptions, mistakes_in_one_line
from grail_lightning.core.advantages import AdvantageEstimator
from grail_lightning.core.credit.base import TokenCredit
from grail_lightning.core.credit.service import Service, listed
from grail_lightning.core.engines.hf.engine import HFEngine
from grail_lightning.core.objective import Objective
from grail_lightning.core.policy.load import add_adapters
from grail_lightning.core.policy.source import LoRA, first_line, read_config

_GIB = 2**30
_PHASES = ("sampling", "update", "step")
# Bytes of state for each trained parameter, of optimisers that need a GPU; two moments for others that cannot be tried.
_STATES = {"AdamW8bit": 2.1, "AdamW4bit": 1.1, "AdamWFp8": 2.1}


class _Model:
    """The sizes of a policy, counted on a model that is built without data; see the symbols above."""

    def __init__(self, config: Any, lora: LoRA | None) -> None:
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            try:
                model = AutoModelForCausalLM.from_config(config)
            except ValueError as error:
                raise ValueError(
                    f"A plan is made for models of text alone, but got {type(config).__name__}."
                ) from error
            if lora is not None:
                add_adapters(model, lora)
        text = config.get_text_config()
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        self.parameters = sum(p.numel() for p in model.parameters())
        self.trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.blocks, self.width, self.vocabulary = text.num_hidden_layers, text.hidden_size, text.vocab_size
        self.mlp = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        self.queries = head * text.num_attention_heads
        self.keys = head * (getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
        self.normalised = any("q_norm" in name for name, _ in model.named_parameters())


def _services(model: Any) -> set[type[Service]]:
    """The services that objective, estimator and credit method of parsed options list."""
    parser = ArgumentParser()
    for name, kind in (("objective", Objective), ("advantage", AdvantageEstimator), ("credit", TokenCredit)):
        parser.add_argument(f"--{name}", type=kind | None)
    options = {name: getattr(model, name) for name in ("objective", "advantage", "credit")}
    parts = parser.instantiate_classes(parser.parse_object(options)).as_dict().values()
    return {*listed(part for part in parts if part is not None)}


def _state_bytes(optimizer: Any, updated: int) -> float:
    """Bytes of state for each trained parameter, of a step on a small matrix whose numbers have so many bytes."""
    matrix = nn.Parameter(torch.zeros(64, 64, dtype=torch.float32 if updated == 4 else torch.bfloat16))
    matrix.grad = torch.zeros_like(matrix)
    try:
        instance: Any = locate(optimizer.class_path)
        instance = instance([matrix], **optimizer.init_args.as_dict())
        instance.step()
    except Exception:  # Some need a GPU, or several ranks.
        return _STATES.get(optimizer.class_path.rpartition(".")[2], 2.0 * updated)
    parts = [part for part in instance.state[matrix].values() if isinstance(part, torch.Tensor) and part.numel() > 1]
    return sum(part.numel() * part.element_size() for part in parts) / matrix.numel()


def _temporary_bytes(optimizer: Any, updated: int) -> int:
    """Bytes of each trained parameter that a step allocates on a GPU; fused optimisers allocate none.

    Of torch's optimisers those with an option `foreach` go through lists of all weights there by default. `Adam` and
    `AdamW` are fused instead (`Gradients.make_optimizer`).
    """
    options, name = optimizer.init_args.as_dict(), optimizer.class_path.rpartition(".")[2]
    foreach, fused = options.get("foreach"), options.get("fused")
    if fused is None and foreach is None and name in ("Adam", "AdamW"):
        return 0
    return 0 if fused or foreach is False or "foreach" not in options else updated


def _plan(fit: Any, model: _Model, services: set[type[Service]], ranks: int, prompt: int) -> dict[str, Any]:
    """Bytes on one of so many devices: of each part of the three phases that need most, with the longest prompt."""
    loading, execution, limit = fit.model.loading, fit.model.execution, fit.model.sampling.max_response_length
    precision, on_cpu = str(fit.trainer.precision or "32-true"), fit.trainer.accelerator == "cpu"
    w = 2 if loading.dtype == "bfloat16" or precision == "bf16-true" else 4
    c = 2 if "16" in precision else w
    sharded = ranks > 1 and "ModelParallel" in str(fit.trainer.strategy)
    shards = ranks if sharded else 1
    masters = w == 2 and loading.master_weights and not sharded
    updated = 4 if masters else w  # Bytes of what the optimiser moves.
    state = _state_bytes(fit.model.optimizer, updated) * model.trained
    # Of a model that the credit method trains, which is taken to have two moments for each weight.
    second = float(model.trained * updated * any(kind.trains_model for kind in services))
    weights = model.parameters * w / shards
    copies = sum(kind.copies_of_model for kind in services) * (loading.lora is None)
    trained = model.trained * (8 if masters else w)  # Masters and gradients, or gradients.
    base = {
        "weights": weights,
        "master weights": 4.0 * model.trained * masters,
        "optimizer state": state / shards,
        "reference": weights * copies,
        "model of the credit method": weights + (trained + 2 * second) / shards if second else 0.0,
        "DDP's buckets": float(model.trained * w * (ranks > 1 and not sharded)),
    }
    in_batch, engine = (fit.get("data.init_args") or {}).get("prompts_per_batch") or 32, fit.model.engine
    of_rank = math.ceil(in_batch / ranks) * execution.group_size  # Rows.
    ours = engine is None or engine.class_path.endswith("HFEngine")
    cached = (engine.init_args.cache_tokens if engine else HFEngine().cache_tokens) if ours else 0
    in_call = min(of_rank, max(1, cached // (prompt + limit)))
    # Rotary positions leave keys in the dtype of the weights; values have that of the product.
    entry = model.blocks * model.keys * (w + c)
    copied = bool(cached) and model.queries > model.keys and not on_cpu
    sampling = {
        "cast weights": model.parameters * 2.0 * (c < w),
        "gathered weights": float(model.parameters * w * sharded),
        "KV cache": 1.03 * in_call * (prompt + limit) * entry * bool(cached),
        # Behind prompts of unequal lengths attention has a mask, and Transformers then copies keys and values.
        "grouped keys and values": float(copied * in_call * (prompt + limit) * model.queries * (w + c)),
    }
    rows, prompts = _micro_batch(execution, of_rank, prompt, limit, execution.share_prefixes and not loading.packing)
    tokens = rows * limit + prompts * prompt
    attention = (9 if model.normalised else 5) * (model.queries + model.keys)
    block = (4 * model.mlp + 4 * model.width + attention) * c * tokens
    chunk = min(rows * limit, loading.chunk_tokens, max(1, (2**25 if on_cpu else 2**28) // model.vocabulary))
    head = model.vocabulary * model.width * (c + w) * (model.trained == model.parameters)
    # A CPU goes through a chunk a few rows at a time; a GPU has float32 copies of it.
    logits = chunk * model.vocabulary * (c if on_cpu else c + 12) + head * (c == 2 or ranks > 1)
    live = max(block, logits) if loading.gradient_checkpointing else model.blocks * block + logits
    whole = 3 * model.parameters / model.blocks + 2 * model.vocabulary * model.width
    update = {
        "gradients": model.trained * (4 if masters else w) / (1 if loading.reduce_once else shards),
        "activations": tokens * model.blocks * model.width * w + live,
        "whole blocks": whole * 2 * w * sharded,
    }
    temporary = 0 if on_cpu else _temporary_bytes(fit.model.optimizer, updated) * model.trained / shards
    step = {"gradients": model.trained * (4 if masters else w) / shards, "temporary of the optimizer": float(temporary)}
    checkpoint = model.trained * updated + state + 3 * second
    phases = {"sampling": base | sampling, "update": base | update, "step": base | step}
    return {"devices": ranks, "checkpoint": checkpoint} | phases


def _micro_batch(execution: Any, most: int, prompt: int, limit: int, shares: bool) -> tuple[int, int]:
    """The most rows of a micro-batch, of `most` of a rank, and the prompts that it holds."""
    group, budget = execution.group_size, execution.token_budget
    whole_group = prompt + group * limit
    if not shares:
        rows = prompts = max(1, budget // (prompt + limit))
    elif whole_group <= budget:  # Groups stay together while they fit.
        prompts = budget // whole_group
        rows = group * prompts
    else:
        rows, prompts = max(1, (budget - prompt) // limit), 1
    return min(rows, most), min(prompts, most)


def main(arguments: list[str] | None = None) -> None:
    """Print the plan for several numbers of devices. A user's mistake is one line, with exit code 2."""
    parser = argparse.ArgumentParser(
        "python -m grail_lightning.plan",
        description="Memory of each device of a run. All further options are those of `fit`.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--gpus", type=PositiveInt, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="numbers of devices"
    )
    parser.add_argument("--gpu_memory_gib", type=PositiveFloat, help="memory of one (default: 80, or this machine's)")
    parser.add_argument(
        "--prompt_tokens", type=PositiveInt, help="longest prompt (default: data.max_prompt_length, or 256)"
    )
    parser.add_argument("--model_config", type=Path, help="a config.json, if the policy's cannot be read here")
    parser.add_argument("--json", action="store_true", help="print bytes as JSON")
    options, others = parser.parse_known_args(arguments)
    with mistakes_in_one_line():
        fit = FitOptions().parse(others)
        lora = fit.model.loading.lora
        policy = options.model_config.absolute() if options.model_config else fit.model.policy
        try:
            config = read_config(str(policy), fit.model.loading.trust_remote_code)
        except ValueError as error:
            if options.model_config:
                message = f"`--model_config` must be the config.json of a model, but got {options.model_config}"
                raise ValueError(f"{message}: {first_line(error.__cause__ or error)}") from error
            raise ValueError(f"{error} For a plan its config.json is enough: --model_config FILE.") from error
        model = _Model(config, LoRA(**lora.as_dict()) if lora else None)
        on_cpu = fit.trainer.accelerator == "cpu"
        default_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB if on_cpu else 80
        prompt = options.prompt_tokens or (fit.get("data.init_args") or {}).get("max_prompt_length") or 256
        services = _services(fit.model)
        plans = [_plan(fit, model, services, ranks, prompt) for ranks in options.gpus]
    if options.json:
        print(json.dumps(plans, indent=2))
    else:
        print(f"{fit.model.policy}: {model.parameters:,} parameters, {model.trained:,} trained")
        nodes = int(fit.trainer.num_nodes or 1)
        # The ranks of a machine without GPUs share its memory.
        sharing = [max(1, ranks // nodes) if on_cpu and not options.gpu_memory_gib else 1 for ranks in options.gpus]
        print(_table(plans, options.gpu_memory_gib or default_gib, sharing))


def _table(plans: list[dict[str, Any]], limit: float, sharing: list[int]) -> str:
    """One column for each number of devices, in GiB. 8 % of a device stay free for libraries.

    `sharing` ranks of each plan have the memory of one device together.
    """
    columns = {}
    for plan, together in zip(plans, sharing, strict=True):
        peaks = {phase: sum(plan[phase].values()) for phase in _PHASES}
        column: dict[str, float | str] = {}
        for phase, peak in peaks.items():
            column |= {f"  {phase}: {part}": size / _GIB for part, size in plan[phase].items()}
            column[f"peak of {phase}"] = peak / _GIB
        column[f"fits {limit:.0f} GiB"] = "yes" if together * max(peaks.values()) < 0.92 * limit * _GIB else "NO"
        column["a checkpoint on disk"] = plan["checkpoint"] / _GIB
        columns[plan["devices"]] = column
    table = pd.DataFrame(columns).rename_axis(columns="GiB of each device")
    needed = table[(table != 0).any(axis=1)]
    text = needed.to_string(float_format="{:.2f}".format, justify="right", col_space=9)
    if "NO" not in text:
        return str(text)
    return (
        f"{text}\nLess memory: model.engine.cache_tokens (sampling), model.execution.token_budget (update),\n"
        "model.loading.gradient_checkpointing=true, trainer.strategy=ModelParallelStrategy, model.loading.lora."
    )
