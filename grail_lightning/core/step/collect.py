"""Collection of a batch: on policy, where groups that are all right or all wrong may be replaced, or one batch ahead.

One batch ahead: while a batch trains, the next one is sampled with the weights from before its update. Batch ``k + 1``
is sampled with the weights that batch ``k`` starts from, so from the second batch on rollouts are one batch off-policy;
truncated importance weights (`execution.sampler_cap`) correct for it::

    engine   | b0 |    b1    |    b2    |    b3    |
    trainer       |  train b0  |  train b1  |  train b2  |
    weights       W0           W1           W2              b1 is sampled with W0, b2 with W1, b3 with W2

A checkpoint waits for the batch in flight and contains its tokens, since the weights that sampled it are gone by then.
A resumed run grades them again, and equals one that did not stop. The saved position of the loader is the one before
that batch.

Shapes: ``B`` rows in ``K`` groups.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from grail_lightning.core.advantages import AdvantageEstimator
from grail_lightning.core.credit.base import CreditControl, TokenCredit
from grail_lightning.core.credit.service import listed
from grail_lightning.core.engines.base import RolloutEngine
from grail_lightning.core.objective import Objective
from grail_lightning.core.records.episode import Turn, episode_json, read_episode
from grail_lightning.core.records.task import EARNED, Prompt, problem_id
from grail_lightning.core.rollout.batch import GradedBatch, SampledBatch, join
from grail_lightning.core.runtime.collectives import all_gather_objects, all_reduce, sum_by_name, world_size
from grail_lightning.core.runtime.seeds import SeedKey
from grail_lightning.core.step.execution import Execution
from grail_lightning.core.step.sampler import Sampler, training_key

_PATIENCE = 2.0  # Seconds that the end of a process waits for a sampling in flight, whose thread ends with it.


def check_engine(
    engine: RolloutEngine,
    execution: Execution,
    objective: Objective,
    advantage: AdvantageEstimator,
    credit: TokenCredit,
    control: CreditControl | None,
) -> None:
    """Check that the engine can sample while the policy trains, if that is asked for; and, from Python, the types."""
    parts: list[tuple[str, object, type, str]] = [
        ("engine", engine, RolloutEngine, "HFEngine()"),
        ("advantage", advantage, AdvantageEstimator, "GroupMean()"),
        ("credit", credit, TokenCredit, "GRAIL()"),
        ("control", control, CreditControl, "Shuffled()"),
    ]
    for name, part, kind, example in parts:
        if not isinstance(part, kind) and (part is not None or name != "control"):
            raise ValueError(
                f"`{name}` must be an object, an instance of `{kind.__name__}`, but got {part!r:.80}. Call a class of "
                f"that kind, such as `{name}={example}`."
            )
    busy = [owner for kind, owner in listed([objective, advantage, credit]).items() if kind.uses_engine]
    if execution.sample_ahead and busy:
        raise ValueError(
            f"`execution.sample_ahead` must be off with `{type(busy[0]).__name__}`, one of whose services samples with "
            "the engine, which is busy with the next batch. Set it to false."
        )
    if execution.sample_ahead and not engine.samples_elsewhere:
        raise ValueError(
            "`execution.sample_ahead` needs an engine that samples elsewhere, with a copy of the weights, such as "
            f"VLLMServer, but got {type(engine).__name__}, whose weights or device are those of the update. Set "
            "`model.engine`, or set it to false."
        )


def collect(
    prompts: list[Prompt],
    sampler: Sampler,
    ahead: Ahead,
    loader: Any,
    execution: Execution,
    step: int,
    estimator: AdvantageEstimator,
) -> tuple[GradedBatch, dict[str, float]]:
    """The graded rollouts of a training batch, and figures of `refill` or `Ahead` to log, over all ranks.

    By default that is one call of the sampler, and no figures. `step` is the number of optimiser steps that the policy
    has taken. The estimator knows which groups are dead.
    """
    for option, method in (("sample_ahead", "peek"), ("refill_rounds", "take")):
        if getattr(execution, option) and not hasattr(loader, method):
            raise ValueError(
                f"`execution.{option}` asks the training loader for further prompts, but got a "
                f"`{type(loader).__name__}`. Give `fit` a data module of grail_lightning, or leave the option out."
            )
    if execution.sample_ahead:
        return ahead.collect(prompts, sampler, loader.peek, step, execution.steps_per_batch)
    batch = sampler(prompts, training_key(step))
    if not execution.refill_rounds:
        return batch, {}
    return refill(
        batch,
        lambda further, number: sampler(further, training_key(step, number)),
        loader,
        execution.refill_rounds,
        estimator.dead_groups,
    )


def refill(
    batch: GradedBatch,
    sample: Callable[[list[Prompt], int], GradedBatch],
    loader: Any,
    rounds: int,
    dead_groups: Callable[[GradedBatch], Tensor],
) -> tuple[GradedBatch, dict[str, float]]:
    """Replace dead groups, such as those that are all right or all wrong, as far as `rounds` further samplings allow.

    The further prompts are the training loader's next ones, so that a resumed run continues with the right prompt. All
    ranks sample the same number of times.

    `sample` is a function from prompts and the number of the round to graded groups; `dead_groups` is that of the
    estimator of the advantage.

    Source: DAPO, arXiv 2503.14476, section 3.2.
    """
    groups = float(len(dead_groups(batch)))
    drawn, right, num_rounds = groups, float(batch.correct.sum()), 0
    while num_rounds < rounds:
        dead = dead_groups(batch)
        if not (most := int(all_reduce(dead.sum().to(batch.input_ids.device), "max"))):
            break
        num_rounds += 1
        fresh = sample(loader.take(most * world_size()), num_rounds)
        dead_fresh = dead_groups(fresh)
        drawn, right = drawn + len(dead_fresh), right + float(fresh.correct.sum())
        batch = _replace(batch, fresh, dead, dead_fresh)
    total = sum_by_name({"drawn": drawn, "right": right, "kept": groups})
    size = len(batch) / max(groups, 1)
    return batch, {
        "refill/rounds": float(num_rounds),
        "refill/drawn_groups": total["drawn"],
        "refill/dropped_groups": total["drawn"] - total["kept"],
        "refill/accuracy_drawn": total["right"] / max(total["drawn"] * size, 1),
    }


def _replace(batch: GradedBatch, fresh: GradedBatch, dead: Tensor, dead_fresh: Tensor) -> GradedBatch:
    """Replace dead groups by the first of the fresh live groups, which take over their row and group numbers."""
    places = dead.nonzero().flatten()
    useful = (~dead_fresh).nonzero().flatten()[: len(places)]
    places = places[: len(useful)]
    if not len(places):
        return batch
    order = torch.arange(len(batch)).reshape(len(dead), -1)
    size = order.shape[1]
    new = (useful[:, None] * size + torch.arange(size)).flatten()
    order[places] = len(batch) + torch.arange(len(new)).reshape(-1, size)
    joined = join(batch, fresh.select(new)).select(order.flatten())
    return joined.replace(group=batch.group, row=batch.row)


# --- one batch ahead --------------------------------------------------------------------------------------------------


class _AheadBatch(NamedTuple):
    """This rank's rollouts of a batch that was sampled ahead."""

    batch: SampledBatch
    step: int  # The number of optimiser steps that the weights had taken with which it was sampled.
    seconds: float | None = None  # That sampling took; None for a batch that was not sampled in this process.


class _Flight(NamedTuple):
    result: Future[_AheadBatch]
    sampler: Sampler


class Ahead:
    """The batch in flight: it is sampled in a thread, and kept by checkpoints.

    The thread samples with the engine, by `generate` or turn by turn. All collectives are on the main thread.
    """

    def __init__(self) -> None:
        self._flight: _Flight | None = None
        self._restored: dict[str, Any] = {}

    def collect(
        self, prompts: list[Prompt], sampler: Sampler, peek: Callable[[], list[Prompt]], step: int, num_steps: int
    ) -> tuple[GradedBatch, dict[str, float]]:
        """The graded rollouts of a batch, sampled ahead if possible, and figures. The next batch begins to be sampled.

        `peek` returns this rank's prompts of the next batch. The policy has taken `step` optimiser steps, and takes
        `num_steps` with a batch.
        """
        with sampler.clock.phase("sample"):
            sampled = self._landed(prompts, sampler)
            sampler.update_weights()  # After the engine has finished with the weights before, and before these change.
            if sampled is None:
                sampled = _AheadBatch(sampler.generate(prompts, training_key(step)), step)
            self._begin(sampler, peek(), step, training_key(step + num_steps))
        figures = {"sampling/staleness": float(step - sampled.step)}
        if sampled.seconds is not None:
            figures["time/sample_ahead"] = sampled.seconds
        return sampler.grade(sampled.batch), figures

    def settle(self) -> None:
        """Wait until no sampling is in flight, so that the engine can be used for something else."""
        if self._flight is not None:
            self._flight.result.result()

    def cancel(self, patience: float | None = None) -> None:
        """Give up a sampling in flight; wait for the end of its thread, at most `patience` seconds if it is given."""
        if self._flight is not None and not self._flight.result.done():
            self._flight.sampler.engine.cancel()
            wait([self._flight.result], patience)

    def state_dict(self) -> dict[str, Any]:
        """The rollouts of the batch in flight, of all ranks; empty if there is none. A collective, after a wait."""
        if self._flight is None:
            return self._restored
        sampled = self._flight.result.result()
        ranks = all_gather_objects(_record(sampled.batch))
        return {"step": sampled.step, "options": _options(self._flight.sampler), "ranks": ranks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the batch for the next `collect`; an empty state forgets that of an earlier run."""
        self.cancel()
        self._flight, self._restored = None, state

    def _begin(self, sampler: Sampler, prompts: list[Prompt], step: int, key: SeedKey) -> None:
        """Sample in a thread. It is no pool's, for which an interrupted process would wait at its end."""
        result: Future[_AheadBatch] = Future()

        def sample() -> None:
            try:
                if sampler.policy.device.type == "cuda":
                    torch.cuda.set_device(sampler.policy.device)  # Threads begin with the first one.
                begun = time.perf_counter()
                batch = sampler.generate(prompts, key)
                result.set_result(_AheadBatch(batch, step, time.perf_counter() - begun))
            except BaseException as error:
                result.set_exception(error)

        self._flight = _Flight(result, sampler)
        _IN_USE.add(self)
        threading.Thread(target=sample, name="sample-ahead", daemon=True).start()

    def _landed(self, prompts: list[Prompt], sampler: Sampler) -> _AheadBatch | None:
        """The batch that was in flight, or in the checkpoint; None if there is none, or if it is of other prompts."""
        if self._flight is not None:
            sampled: _AheadBatch | None = self._flight.result.result()
            assert sampled is not None
            sampled_for = [prompt.messages for prompt in sampled.batch.prompts[:: sampler.group_size]]
            sampled = sampled if sampled_for == [prompt.messages for prompt in prompts] else None
            reason = "The training loader yields another batch than the one at which it peeked"
        elif self._restored:
            sampled = _restore(self._restored, prompts, sampler)
            reason = "Prompts, sampling or the number of ranks are not the checkpoint's"
        else:
            return None
        self._flight, self._restored = None, {}
        if sampled is None:
            rank_zero_warn(f"{reason}: a batch that was sampled ahead is sampled anew, with the present weights.")
        return sampled


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
    return repr((sampler.group_size, sampler.sampling, sampler.policy.loading.chat_template_kwargs))


def _record(batch: SampledBatch) -> dict[str, Any]:
    """This rank's rollouts as tensors and plain values."""
    record: dict[str, Any] = {
        "tensors": {name: value.cpu() for name, value in batch.fields().items() if isinstance(value, Tensor)},
        "texts": batch.texts,
        "problems": [problem_id(prompt) for prompt in batch.prompts],
    }
    if batch.episodes is not None:
        numbers: dict[Hashable, int] = {}  # A state's key may be any object, and is replaced by its number.

        def numbered(turn: Turn) -> Turn:
            state = None if turn.state is None else numbers.setdefault(turn.state, len(numbers))
            return replace(turn, state=state)

        record["episodes"] = [episode_json(replace(e, turns=tuple(map(numbered, e.turns)))) for e in batch.episodes]
        # The rewards of environments, which may be None; the other columns are the problem's.
        record["columns"] = [{k: v for k, v in p.columns.items() if k in EARNED} for p in batch.prompts]
    return record


def _restore(state: dict[str, Any], prompts: list[Prompt], sampler: Sampler) -> _AheadBatch | None:
    """This rank's rollouts; None if they are of other prompts, of other options or of another number of ranks."""
    ranks: list[dict[str, Any]] = state.get("ranks", [])  # Earlier versions kept the rollouts in another form.
    if state["options"] != _options(sampler) or len(ranks) != world_size():
        return None
    record, copies = ranks[sampler.rank], [prompt for prompt in prompts for _ in range(sampler.group_size)]
    if record["problems"] != [problem_id(prompt) for prompt in copies]:
        return None
    episodes = None
    if "episodes" in record:
        episodes = [read_episode(text) for text in record["episodes"]]
        copies = [replace(p, columns=p.columns | row) for p, row in zip(copies, record["columns"], strict=True)]
    batch = SampledBatch(**record["tensors"], prompts=copies, texts=record["texts"], episodes=episodes)
    return _AheadBatch(batch.to(sampler.policy.device), int(state["step"]))
