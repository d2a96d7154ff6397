"""The decoding loop over a cache of fixed size: each token is the same work on the same tensors, a CUDA graph on CUDA.

Shapes: ``N`` rows of a call, of which ``n`` are in the batch, with a row of the cache each; ``C`` columns of the cache;
``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from grail_lightning.core.engines.hf.cache import GrowingCache, moved_to_fixed
from grail_lightning.core.engines.hf.decoding import Decoding
from grail_lightning.core.policy.model import Policy

_TOKENS_BETWEEN_LOOKS = 8
"""Tokens between two looks at how many rows have finished, for which the host waits. Up to as many are decoded for
rows that have all finished."""

_FEWEST_ROWS = 8
"""Fewer rows of a batch take as long to decode."""

_GROWTH_COLUMNS = 256
"""The fewest free columns of a new cache, unless it needs fewer. Making one costs as much as some tokens."""

_COLUMN_MULTIPLE = 64

_ATTENTION = ("sdpa", "eager")
"""Implementations of attention that take any mask."""

_NO_TOKEN = 2**31
"""An id beyond every vocabulary, in place of tokens before the first."""


def obstacle(policy: Policy) -> str | None:
    """Why `StaticDecoding` cannot sample from a policy from which `Decoding` can; None if nothing is known."""
    if has_window(policy):
        return "layers of its cache keep a sliding window"
    attention = str(policy.model.config._attn_implementation)
    if attention not in _ATTENTION:
        return f"its attention is {attention}, which takes no mask of columns"
    return "its weights are sharded" if isinstance(policy, FSDPModule) else None


def has_window(policy: Policy) -> bool:
    """Whether a layer of the policy's cache keeps a sliding window of tokens."""
    return not GrowingCache(policy.model.config.get_text_config(decoder=True), 0, 0).takes_padding


class StaticDecoding(Decoding):
    """The loop in buckets, in each of which the cache has a fixed number of rows and columns.

    A bucket ends when its columns are full, or when half of its rows have finished. The rows that are left then move to
    a new cache. Inside a bucket the host reads nothing from the device but, every few tokens, the number of rows that
    are left. On CUDA a token is one graph, which is captured once a bucket; on a CPU the same operations are called.
    Rows of one prompt share its pass, and have a row of the cache each from their first token on. The tokens are those
    of `Decoding`.

    Ranks do not wait for each other: weights are not sharded, see `obstacle`.
    """

    def _draw_responses(self, logits: Tensor) -> None:
        self.synchronised = False
        self.tokens = self._record(logits, 0)
        self.step = self.lengths.new_ones(1)  # The number of tokens so far.
        missing = self.sampling.max_response_length - 1
        while missing and not self._all_finished():
            missing -= self._run_bucket(self._begin_bucket(missing))

    def _begin_bucket(self, missing: int) -> int:
        """Move the rows that are left to a cache with room for some of the `missing` tokens; returns their number."""
        rows = self._fitting_rows()
        order = (~self.alive).long().argsort(stable=True)  # Some rows that have finished fill the bucket up.
        self._store(order[rows:])
        kept = order[:rows]
        places = kept if self.place is None else self.place[kept]
        valid = self.valid[places, : self.column]
        begin = int(valid.any(0).long().argmax())
        valid = valid[:, begin:]
        filled = valid.shape[1]
        columns = filled + min(missing, max(_GROWTH_COLUMNS, filled // 4))
        columns += -columns % _COLUMN_MULTIPLE
        dtype = self.policy.compute_dtype
        self.cache: Any = moved_to_fixed(self.cache, places, slice(begin, self.column), columns, dtype)
        lowest = torch.finfo(dtype).min
        self.mask = torch.full((rows, 1, 1, columns), lowest, dtype=dtype, device=valid.device)
        self.mask[:, 0, 0, :filled].masked_fill_(valid, 0)
        self.rows, self.alive, self.tokens = self.rows[kept], self.alive[kept], self.tokens[kept]
        self.positions, self.place = self.positions[..., places], None
        self.column, self.next_column = filled, self.step.new_full((1,), filled)
        return min(missing, columns - filled)

    def _fitting_rows(self) -> int:
        """The rows of a new bucket: half of those of this one, and so on, as long as all that are left have room."""
        rows = len(self.rows)
        while rows > _FEWEST_ROWS and (half := (rows + 1) // 2) >= self.left:
            rows = half
        return rows

    def _run_bucket(self, tokens: int) -> int:
        """Decode up to as many `tokens`; returns how many. It ends earlier where rows can leave."""
        done = 1
        self._decode_token()  # What is called for the first time cannot be captured.
        decode = captured(self._decode_token, self.rows.device) if tokens > 1 else self._decode_token
        while done < tokens:
            looks = done % _TOKENS_BETWEEN_LOOKS == 0
            if looks and (self._all_finished() or self._fitting_rows() < len(self.rows)):
                break
            decode()
            done += 1
        self.column += done
        self.valid = self.mask[:, 0, 0] == 0
        return done

    def _decode_token(self) -> None:
        """Decode one token of each row. Results are written into tensors that exist: a graph knows no others."""
        self.mask.index_fill_(3, self.next_column, 0)
        logits = self._next_logits(self.tokens, self.positions, self.mask)
        self.tokens.copy_(self._record(logits, self.step))
        self.step += 1
        self.next_column += 1
        self.positions += 1

    def _newest(self, step: Any) -> Tensor:
        if isinstance(step, int):
            return super()._newest(step)
        columns = step + torch.arange(1 - self.ending.reach, 1, device=step.device)
        ids = self.ids[self.rows[:, None], columns.clamp(min=0)]
        return ids.masked_fill(columns < 0, _NO_TOKEN)


def captured(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """`work` as a CUDA graph, which captures it without doing it; on a CPU it is called as it is."""
    if device.type != "cuda":
        return work
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # Other threads may copy batches.
        work()
    return graph.replay
