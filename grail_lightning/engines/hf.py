"""Sampling with Transformers models, with the weights that are being trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from grail_lightning.batch import SampledBatch, Sampling, pad_left
from grail_lightning.engines.base import RolloutEngine, build_batch, check_room
from grail_lightning.engines.decoding import Decoding, supports
from grail_lightning.engines.draw import Ending, Sampled, warpers
from grail_lightning.policy import Policy
from grail_lightning.policy.reference import requiring_grad
from grail_lightning.runtime.collectives import pad_to_longest_rank, world_size
from grail_lightning.runtime.seeds import derive_seed, seeded
from grail_lightning.tasks.base import Prompt


class HFEngine(RolloutEngine):
    """An engine that samples from the trained policy itself, with left-padded prompts and a KV cache.

    The method "compact" runs a prompt once for its whole group, decodes rows as one until they draw different tokens,
    and removes finished rows. A row's random numbers depend on the seed and on the row's index in the batch, not on the
    other rows, on `cache_tokens` or on the device. Transformers' `generate` runs each prompt once a response and
    computes finished rows until the last one ends. Both methods draw from the same distributions; for one seed the
    texts differ.

    Args:
        cache_tokens: Most tokens in the KV cache, rows × (prompt + `max_response_length`); the remaining rows are
            decoded in a further call. A token of Qwen3-4B takes 147 KB in half precision and 295 KB in float32.
        synchronised: Whether all ranks make the same number of forward passes. Fully sharded weights (FSDP) require
            it; by default it is on if there are several ranks.
        method: "compact", or "generate" for Transformers' own loop. Models that "compact" does not support (state
            spaces, caches other than keys and values per token) are sampled by "generate", with a warning.

    Raises:
        ValueError: If `cache_tokens` is not positive or the method is unknown.
    """

    def __init__(
        self,
        cache_tokens: int = 131_072,
        synchronised: bool | None = None,
        method: Literal["compact", "generate"] = "compact",
    ) -> None:
        if cache_tokens < 1:
            raise ValueError(f"`cache_tokens` must be at least 1, but got {cache_tokens}.")
        if method not in ("compact", "generate"):
            raise ValueError(f'`method` must be "compact" or "generate", but got {method!r}.')
        self.cache_tokens = cache_tokens
        self.synchronised = synchronised
        self.method = method
        self._policy: Policy | None = None
        self._told = False

    def update_weights(self, policy: Policy) -> None:
        """Store the policy. No weights are copied, since the policy itself samples."""
        self._policy = policy

    def generate(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: int) -> SampledBatch:
        """See `RolloutEngine.generate`."""
        generator = torch.Generator().manual_seed(seed)
        # Drawn row by row from one stream, so that the division of rows into calls has no effect.
        width = sampling.max_response_length
        return self._sample(
            prompts,
            group_size,
            sampling,
            seed,
            lambda start, number: torch.rand(number, width, dtype=torch.float64, generator=generator),
        )

    def generate_seeded(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seeds: Sequence[int]
    ) -> SampledBatch:
        """See `RolloutEngine.generate_seeded`. Transformers' `generate` draws the whole call from one seed."""

        def noise(start: int, number: int) -> Tensor:
            # A synchronised rank may run a call without a row of its own; whatever it draws is left out.
            own = [*seeds[start : start + number], *[0] * number][:number]
            streams = [torch.Generator().manual_seed(seed) for seed in own]
            width = sampling.max_response_length
            return torch.stack([torch.rand(width, dtype=torch.float64, generator=stream) for stream in streams])

        return self._sample(prompts, group_size, sampling, derive_seed(*seeds), noise)

    def _sample(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: int,
        noise: Callable[[int, int], Tensor],
    ) -> SampledBatch:
        """Sample with the method of the engine.

        Transformers' `generate` draws from torch's random state, seeded by `seed`; "compact" from `noise`, the uniform
        numbers ``[number, T]`` of `number` rows from a given one on, called in their order.
        """
        if self._policy is None:
            raise ValueError("`HFEngine` has no policy yet. Call `update_weights(policy)` first.")
        policy = self._policy
        encoded = [policy.encode(prompt.messages) for prompt in prompts]
        check_room(policy, encoded, sampling)
        rows = [ids for ids in encoded for _ in range(group_size)]
        responses: list[list[int]] = []
        logprobs: list[list[float]] = []
        finished: list[bool] = []
        compact = self._removes_finished(policy)
        with policy.evaluating(), seeded(policy.device, seed), torch.no_grad(), weights_cast_once(policy):
            for part in self._calls(policy, rows, sampling):
                call = part or [policy.encode(".")]
                if compact:
                    numbers = noise(len(responses), len(call))
                    drawn = Decoding(
                        policy, call, sampling, numbers, synchronised=self._equal_passes, idle=not part
                    ).run()
                else:
                    drawn = self._generate(policy, call, sampling)
                lengths = drawn.lengths.tolist()[: len(part)]
                responses += [ids[:length] for ids, length in zip(drawn.ids.tolist(), lengths, strict=False)]
                logprobs += [row[:length] for row, length in zip(drawn.logprobs.tolist(), lengths, strict=False)]
                finished += drawn.finished.tolist()[: len(part)]
        return build_batch(policy, prompts, group_size, responses, finished, logprobs)

    def _calls(self, policy: Policy, rows: list[list[int]], sampling: Sampling) -> list[list[list[int]]]:
        """The rows cut into calls. Synchronised ranks make equally many; an additional call samples a dummy prompt."""
        longest = max((len(row) for row in rows), default=0) + sampling.max_response_length
        size = max(self.cache_tokens // longest, 1)
        parts = [rows[k : k + size] for k in range(0, len(rows), size)]
        return pad_to_longest_rank(parts, [], policy.device) if self._equal_passes else parts

    @property
    def _equal_passes(self) -> bool:
        return world_size() > 1 if self.synchronised is None else self.synchronised

    def _removes_finished(self, policy: Policy) -> bool:
        """Whether finished rows are removed; warns once if the model does not support it."""
        if self.method == "generate" or supports(policy.model):
            return self.method == "compact"
        if not self._told:
            rank_zero_warn(
                f"`HFEngine` samples from `{type(policy.model).__name__}` by Transformers' `generate`: finished rows "
                'cannot be removed from its cache. This is no error; set `method="generate"` to silence this warning.'
            )
        self._told = True
        return False

    def _generate(self, policy: Policy, rows: list[list[int]], sampling: Sampling) -> Sampled:
        """Sample with Transformers' own loop."""
        from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

        ids, mask = pad_left(rows, policy.tokenizer.pad_token_id)
        recorder = _LogprobRecorder(sampling.logprob_temperature)
        ends = _EndRecorder(Ending(policy, sampling), ids.shape)
        out = policy.model.generate(
            input_ids=ids.to(policy.device),
            attention_mask=mask.long().to(policy.device),
            generation_config=GenerationConfig(
                do_sample=sampling.temperature > 0,
                # Without these options `generate` would apply top-k 50. Our own top-k and top-p follow the recorder.
                **({"top_k": 0, "top_p": 1.0} if sampling.temperature > 0 else {}),
                max_new_tokens=sampling.max_response_length,
                eos_token_id=list(policy.end_token_ids) or None,
                pad_token_id=policy.tokenizer.pad_token_id,
                use_cache=True,
                return_dict_in_generate=True,
            ),
            logits_processor=LogitsProcessorList([recorder, *warpers(sampling)]),
            stopping_criteria=StoppingCriteriaList([ends]),
            synced_gpus=self._equal_passes,
        )
        assert out.past_key_values is not None, "`generate` ran without its KV cache"
        sampled = out.sequences[:, ids.shape[1] :]
        return Sampled(sampled, recorder.finish(sampled), ends.lengths, ends.finished)


@contextmanager
def weights_cast_once(policy: Policy) -> Iterator[None]:
    """Under autocast, keep the cast weights for the whole call; Lightning's context would cast them at every token."""
    kind = policy.device.type
    if not torch.is_autocast_enabled(kind):
        yield
        return
    # Autocast caches no casts of frozen weights (those below adapters).
    frozen = [p for p in policy.parameters() if not p.requires_grad and p.is_floating_point()]
    with torch.autocast(kind, dtype=policy.compute_dtype, cache_enabled=True), requiring_grad(frozen, True):
        try:
            yield
        finally:
            torch.clear_autocast_cache()  # The casts have no gradient: an update must not use them.


class _LogprobRecorder:
    """A logits processor that divides by the temperature and records the log-probability of each sampled token.

    It precedes top-k and top-p, so that its values can be compared with those of the training forward pass. It stores
    the log-probabilities of one position for the whole vocabulary, not of all positions.
    """

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self._pending: Tensor | None = None
        self._chosen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores ``[n, V]`` divided by the temperature."""
        self._gather(input_ids[:, -1])
        scaled = scores / self.temperature
        self._pending = scaled.log_softmax(-1)
        return scaled

    def finish(self, sampled: Tensor) -> Tensor:
        """``[n, T]`` log-probabilities of the sampled ids."""
        self._gather(sampled[:, -1])
        return torch.stack(self._chosen, 1)

    def _gather(self, last_ids: Tensor) -> None:
        if self._pending is not None:
            self._chosen.append(self._pending.gather(1, last_ids[:, None]).squeeze(1))


class _EndRecorder:
    """A stopping criterion for Transformers' `generate` that records where each row ends.

    The ids do not show it afterwards: `generate` pads finished rows, and the pad token may be an end token.
    """

    def __init__(self, ending: Ending, shape: torch.Size) -> None:
        self.ending, self.prompt_width = ending, shape[1]
        self.lengths = torch.zeros(shape[0], dtype=torch.long, device=ending.end_tokens.device)
        self.finished = torch.zeros_like(self.lengths, dtype=torch.bool)

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        """``[n]`` bool: the rows that have finished."""
        self.lengths = self.lengths + ~self.finished
        self.finished = self.finished | self.ending(input_ids[:, self.prompt_width :])
        return self.finished
