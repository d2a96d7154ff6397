r"""The memory of a training run in closed forms.

No weights are loaded. Symbols: ``P`` parameters, ``T`` trained ones, ``w`` bytes of a weight, ``c`` bytes of an element
of a matrix product (2 in half precision), ``N`` ranks over which FSDP2 shards, ``L`` blocks of width ``D`` with ``I``
columns in their MLP, ``H`` columns of queries and ``K`` of keys, ``V`` vocabulary.

==============  ======================================================================================================
kept            weights ``P·w/N``, float32 masters of weights in half precision, the optimiser's state (that of one step
                on a small matrix), a frozen reference, a model that the credit method trains, DDP's buckets
sampling        the cache of `HFEngine`, ``rows · length · L · K · (bytes of a key and a value)``, where ``L`` counts
                blocks with attention; on a GPU a copy of one block's part for every head of queries, ``rows · length ·
                H · …``; the states of blocks with linear attention, ``rows · heads · key · value`` in float32; weights
                cast by autocast, and gathered by FSDP2
update          gradients; the input of each block, ``tokens · L · D``; one block's activations, ``(4I + 4D + 5(H +
                K)) · c`` a token, with 9 for 5 where queries and keys are normalised (those of all blocks without
                checkpointing); the logits of a chunk
step            gradients; on a GPU the temporary of an optimiser that goes through lists of weights (`foreach`)
==============  ======================================================================================================

`reference/performance.md` of the documentation says how exact this is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pydoc import locate
from typing import Any

import torch
from jsonargparse import ArgumentParser
from torch import nn

from grail_lightning.core.advantages import AdvantageEstimator
from grail_lightning.core.credit.base import TokenCredit
from grail_lightning.core.credit.service import Service, listed
from grail_lightning.core.engines.hf.engine import HFEngine
from grail_lightning.core.objective import Objective
from grail_lightning.core.policy.load import add_adapters
from grail_lightning.core.policy.source import LoRA

PHASES = ("sampling", "update", "step")

Plan = Mapping[str, Any]
"""What `plan_memory` gives: the bytes of each part of each phase, on one device."""

# Bytes of state for each trained parameter, of optimisers that need a GPU; two moments for others that cannot be tried.
_STATES = {"AdamW8bit": 2.1, "AdamW4bit": 1.1, "AdamWFp8": 2.1}


class ModelSizes:
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
        kinds = getattr(text, "layer_types", None) or ["full_attention"] * self.blocks
        linear = [kind for kind in kinds if kind == "linear_attention" or "attention" not in kind]
        self.attending = self.blocks - len(linear)
        state = [getattr(text, f"linear_{name}", 0) for name in ("num_value_heads", "key_head_dim", "value_head_dim")]
        self.states = len(linear) * math.prod(state)  # Numbers of a row.


def services_of(model: Any) -> set[type[Service]]:
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


def peaks(plan: Plan) -> dict[str, float]:
    """The bytes of each phase."""
    return {phase: sum(plan[phase].values()) for phase in PHASES}


def plan_memory(fit: Any, model: ModelSizes, services: set[type[Service]], ranks: int, prompt: int) -> dict[str, Any]:
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
    entry = model.attending * model.keys * (w + c)
    copied = bool(cached) and model.queries > model.keys and not on_cpu
    sampling = {
        "cast weights": model.parameters * 2.0 * (c < w),
        "gathered weights": float(model.parameters * w * sharded),
        "KV cache": 1.03 * in_call * (prompt + limit) * entry * bool(cached),
        "recurrent states": 4.0 * in_call * model.states * bool(cached),
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
