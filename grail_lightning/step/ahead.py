"""One step ahead: while a batch trains, the next one is sampled with the weights from before its update.

Batch ``k + 1`` is sampled with the weights that batch ``k`` starts from, so from the second batch on rollouts are one
batch off-policy; truncated importance weights (`execution.sampler_cap`) correct for it::

    engine   | b0 |    b1    |    b2    |    b3    |
    trainer       |  train b0  |  train b1  |  train b2  |
    weights       W0           W1           W2              b1 is sampled with W0, b2 with W1, b3 with W2

A checkpoint waits for the batch in flight and contains its tokens, since the weights that sampled it are gone by then.
A resumed run grades them again, and equals one that did not stop. The loader's position stays before that batch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from grail_lightning.batch import GradedBatch, SampledBatch
from grail_lightning.credit import TokenCredit
from grail_lightning.engines import RolloutEngine, build_batch
from grail_lightning.runtime.collectives import all_gather_objects, world_size
from grail_lightning.runtime.seeds import SeedKey
from grail_lightning.step.options import Execution
from grail_lightning.step.sampler import Sampler, training_key
from grail_lightning.tasks.base import Prompt

_PATIENCE = 2.0  # Seconds that the end of a process waits for a sampling in flight, whose thread ends with it.


def check_engine(engine: RolloutEngine, execution: Execution, credit: TokenCredit) -> None:
    """Check that the engine can sample while the policy trains, if that is asked for.

    Raises:
        ValueError: If it samples with the weights that are being trained, or has to sample for the credit method, too.
    """
    if execution.sample_ahead and credit.needs_continuations:
        raise ValueError(
            f"`execution.sample_ahead` must be off with `{type(credit).__name__}`, which asks the engine for "
            "continuations while it samples the next batch. Set it to false."
        )
    if execution.sample_ahead and not engine.samples_elsewhere:
        raise ValueError(
            "`execution.sample_ahead` needs an engine that samples elsewhere, with a copy of the weights, such as "
            f"VLLMServer, but got {type(engine).__name__}, whose weights or device are those of the update. Set "
            "`model.engine`, or set it to false."
        )


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """A sampled batch.

    Attributes:
        batch: This rank's rollouts.
        step: The number of optimiser steps that the weights had taken with which it was sampled.
        seconds: The time that sampling took; None for a batch that was not sampled in this process.
    """

    batch: SampledBatch
    step: int
    seconds: float | None = None


class _Flight(NamedTuple):
    """A sampling in a thread.

    Attributes:
        drawn: What it will have sampled.
        engine: The engine that samples.
        options: What it samples with, as text.
    """

    drawn: Future[_Drawn]
    engine: RolloutEngine
    options: str


class Ahead:
    """The batch in flight: it is sampled in a thread, and kept by checkpoints.

    The thread calls `RolloutEngine.generate` and nothing else of the engine. All collectives are on the main thread.
    """

    def __init__(self) -> None:
        self._flight: _Flight | None = None
        self._restored: dict[str, Any] = {}

    def collect(
        self, prompts: list[Prompt], sampler: Sampler, peek: Callable[[], list[Prompt]], step: int, planned: int
    ) -> tuple[GradedBatch, dict[str, float]]:
        """The graded rollouts of a batch, sampled ahead if possible. The next batch begins to be sampled.

        Args:
            prompts: This rank's prompts.
            sampler: What samples and grades.
            peek: A function that returns this rank's prompts of the next batch.
            step: The number of optimiser steps that the policy has taken.
            planned: The number of optimiser steps of a batch.

        Returns:
            The rollouts, and their staleness in optimiser steps and seconds of sampling, to log.
        """
        with sampler.clock.phase("sample"):
            drawn = self._landed(prompts, sampler)
            sampler.push()  # After the engine has finished with the weights before, and before these change.
            if drawn is None:
                drawn = _Drawn(batch=sampler.draw(prompts, training_key(step)), step=step)
            self._begin(sampler, peek(), step, training_key(step + planned))
        figures = {"sampling/staleness": float(step - drawn.step)}
        if drawn.seconds is not None:
            figures["time/sample_ahead"] = drawn.seconds
        return sampler.grade(drawn.batch), figures

    def settle(self) -> None:
        """Wait until no sampling is in flight, so that the engine can be used for something else.

        Raises:
            BaseException: What the thread raised.
        """
        if self._flight is not None:
            self._flight.drawn.result()

    def cancel(self, patience: float | None = None) -> None:
        """Give up a sampling in flight.

        Args:
            patience: The seconds after which its thread is left alone; None waits until it has ended.
        """
        if self._flight is not None and not self._flight.drawn.done():
            self._flight.engine.cancel()
            wait([self._flight.drawn], patience)

    def reset(self) -> None:
        """Forget the batch of an earlier run."""
        self.cancel()
        self._flight, self._restored = None, {}

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The tokens of the batch in flight, of all ranks; empty if there is none. A collective, after a wait."""
        if self._flight is None:
            return self._restored
        drawn = self._flight.drawn.result()
        ranks = all_gather_objects(_to_tensors(drawn.batch))
        rows = {name: torch.cat([rank[name] for rank in ranks]) for name in ranks[0]}
        return {"step": drawn.step, "options": self._flight.options, "rows": rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the batch for the next `collect`."""
        self.reset()
        self._restored = state

    # --- the flight -------------------------------------------------------------------------------------------------

    def _begin(self, sampler: Sampler, prompts: list[Prompt], step: int, key: SeedKey) -> None:
        """Sample in a thread. It is no pool's, for which an interrupted process would wait at its end."""
        drawn: Future[_Drawn] = Future()

        def sample() -> None:
            try:
                if sampler.policy.device.type == "cuda":
                    torch.cuda.set_device(sampler.policy.device)  # Threads begin with the first one.
                begun = time.perf_counter()
                batch = sampler.draw(prompts, key)
                drawn.set_result(_Drawn(batch=batch, step=step, seconds=time.perf_counter() - begun))
            except BaseException as error:
                drawn.set_exception(error)

        self._flight = _Flight(drawn, sampler.engine, _options(sampler))
        _IN_USE.add(self)
        threading.Thread(target=sample, name="sample-ahead", daemon=True).start()

    def _landed(self, prompts: list[Prompt], sampler: Sampler) -> _Drawn | None:
        """The batch that was in flight, or in the checkpoint; None if there is none, or if it is of other prompts."""
        if self._flight is not None:
            drawn = self._flight.drawn.result()
            given = [prompt.messages for prompt in drawn.batch.prompts[:: sampler.group_size]]
            found = drawn if given == [prompt.messages for prompt in prompts] else None
            again = "The training loader yields another batch than the one at which it peeked"
        elif self._restored:
            found = _from_tensors(self._restored, prompts, sampler)
            again = "Prompts or sampling are not the checkpoint's"
        else:
            return None
        self._flight, self._restored = None, {}
        if found is None:
            rank_zero_warn(f"{again}: a batch that was sampled ahead is sampled anew, with the present weights.")
        return found


_IN_USE: WeakSet[Ahead] = WeakSet()


def _cancel_all() -> None:
    """End what is in flight when the process ends, also after an error or an interrupt.

    Lightning calls no hook of a module's then. An interpreter that ends while a thread runs torch may abort.
    """
    for ahead in list(_IN_USE):
        ahead.cancel(_PATIENCE)


# Not `atexit`, whose functions are called after the threads of pools, such as an engine's, have been waited for.
threading._register_atexit(_cancel_all)  # type: ignore[attr-defined]


def _options(sampler: Sampler) -> str:
    """What a batch was sampled with, as text."""
    return repr((sampler.group_size, sampler.sampling))


def _to_tensors(batch: SampledBatch) -> dict[str, Tensor]:
    """The rollouts without their padding: tokens row after row, and the number of tokens of each row."""
    responses, prompts = batch.response_mask, batch.attention_mask[:, : batch.prompt_width]
    found = {
        "row": batch.row,
        "finished": batch.finished,
        "prompt_lengths": batch.prompt_lengths,
        "prompt_ids": batch.input_ids[:, : batch.prompt_width][prompts].int(),
        "response_lengths": batch.response_lengths,
        "response_ids": batch.response_ids[responses].int(),
    }
    if batch.sampling_logprobs is not None:
        found["sampling_logprobs"] = batch.sampling_logprobs[responses]
    return {name: values.cpu() for name, values in found.items()}


def _from_tensors(state: dict[str, Any], prompts: list[Prompt], sampler: Sampler) -> _Drawn | None:
    """This rank's share of the rollouts, also for another number of ranks; None if they answer other prompts."""
    rows, size = state["rows"], sampler.group_size
    groups = torch.arange(len(prompts)).repeat_interleave(size) * world_size() + sampler.rank
    wanted = groups * size + torch.arange(size).repeat(len(prompts))
    place = {row: k for k, row in enumerate(rows["row"].tolist())}
    if state["options"] != _options(sampler) or not place.keys() >= set(wanted.tolist()):
        return None
    at = [place[row] for row in wanted.tolist()]

    def of_rows(name: str, lengths: str) -> list[Any]:
        parts = rows[name].split(rows[lengths].tolist())
        return [parts[k].tolist() for k in at]

    if of_rows("prompt_ids", "prompt_lengths")[::size] != [sampler.policy.encode(p.messages) for p in prompts]:
        return None
    batch = build_batch(
        sampler.policy,
        prompts,
        size,
        of_rows("response_ids", "response_lengths"),
        rows["finished"][at].tolist(),
        of_rows("sampling_logprobs", "response_lengths") if "sampling_logprobs" in rows else None,
    )
    return _Drawn(batch=sampler.numbered(batch), step=int(state["step"]))
