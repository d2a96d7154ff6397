"""Which decoding loop samples from a policy, and whether its blocks are compiled: found by sampling a few tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.distributed.fsdp import FSDPModule

from grail_lightning.core.engines.hf.decoding import Decoding, TurnOptions, why_generate
from grail_lightning.core.engines.hf.draw import Ending
from grail_lightning.core.engines.hf.static import StaticDecoding, has_window, obstacle
from grail_lightning.core.policy.capabilities import agree
from grail_lightning.core.policy.compile import SHOWN_OF_ERROR, Compile, CompiledBlocks, chosen_backend
from grail_lightning.core.policy.layout import padded_layout
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.rollout.batch import Sampling, lengths_to_mask, pad_left
from grail_lightning.core.runtime.collectives import all_reduce
from grail_lightning.core.runtime.guard import said_in_a_line

Method = Literal["auto", "static", "compact", "generate"]
Loop = Callable[..., Decoding]

_TRIAL_TOKENS = 6


def find_loop(policy: Policy, method: Method, compiles: Compile) -> Loop | None:
    """The loop that samples from a policy; None if Transformers' `generate` does.

    What cannot be done for a policy is said in one line, as a warning if the options ask for it. A collective: all
    ranks find the same loop.
    """
    if method == "generate" or why_generate(policy.model):
        return None
    name = f"`HFEngine` samples from `{type(policy.model).__name__}`"
    loop: Loop = Decoding
    if method == "static" or (method == "auto" and policy.device.type == "cuda"):
        failed = obstacle(policy) or _failure(policy, StaticDecoding)
        if failed is None:
            loop = StaticDecoding
            rank_zero_info(f"{name} over a static cache.")
        else:
            say = rank_zero_warn if method == "static" else rank_zero_info
            say(f"{name} with a cache that grows, not with a static one: {failed}. This is no error.")
    backend = _backend(policy, compiles)
    if backend is None:
        return loop
    rank_zero_info(f"{name} with compiled blocks ({backend}). Compiling them may take a minute.")
    compiled = partial(loop, blocks=CompiledBlocks(policy.blocks, backend))
    if (failed := _failure(policy, compiled)) is None:
        return compiled
    say = rank_zero_info if compiles == "auto" else rank_zero_warn
    say(f"{name} without compiling its blocks: {failed}. This is no error.")
    return loop


def _backend(policy: Policy, compiles: Compile) -> str | None:
    """The backend that compiles the blocks, None if they run as they are.

    auto leaves out sliding windows, whose caches count tokens in Python and so need code for many cases; sharded
    weights, which hooks gather; and autocast, which would cast weights in compiled code at every token.
    """
    if compiles == "auto" and (
        has_window(policy) or isinstance(policy, FSDPModule) or torch.is_autocast_enabled(policy.device.type)
    ):
        return None
    return chosen_backend(compiles, policy.device)


def _failure(policy: Policy, loop: Loop) -> str | None:
    """Why a loop cannot sample; None if a trial gives log-probabilities that are those of the whole rows."""
    failed = ""
    try:
        with policy.trial(2, 9) as (ids, _):
            prompts = [ids[0].tolist(), ids[1, 3:].tolist()]
            noise = [torch.linspace(0.1, 0.9, _TRIAL_TOKENS, dtype=torch.float64)] * 2
            sampling = Sampling(max_response_length=_TRIAL_TOKENS)
            ending = Ending(policy, sampling)
            ending.end_tokens = ending.end_tokens[:0]  # No row ends before the last token.
            turn = TurnOptions(ending, limits=[_TRIAL_TOKENS] * 2, begin=(), keep=[False] * 2)
            sampled = loop(policy, prompts, sampling, noise, turn=turn).run()
            prompt_ids, prompt_mask = (part.to(ids.device) for part in pad_left(prompts, 0))
            mask = lengths_to_mask(sampled.lengths, _TRIAL_TOKENS)
            rows = torch.cat([prompt_ids, sampled.ids], 1), torch.cat([prompt_mask, mask], 1)
            expected = policy(padded_layout(*rows, mask), decode=partial(policy.decode, compiled=False))[mask]
        found = sampled.logprobs[mask]
        dtype = max(policy.compute_dtype, found.dtype, key=lambda kind: torch.finfo(kind).eps)
        if not agree(found, expected, spread=expected, dtype=dtype):
            failed = "its log-probabilities would be others"
    except Exception as error:  # Compilers and kernels raise many types.
        failed = said_in_a_line(error, SHOWN_OF_ERROR)
    on_any = bool(all_reduce(torch.tensor(int(bool(failed)), device=policy.device), "max"))
    return (failed or "it failed on another rank") if on_any else None
