"""What credit methods may ask for (`Needs`): continuations of rollouts, and a model trained beside the policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from grail_lightning.batch import GradedBatch, RolloutBatch
from grail_lightning.credit.base import Continuations, Prefix, SecondModel, Training, check_one_turn
from grail_lightning.distributed.gradients import Gradients
from grail_lightning.engines.base import build_batch, longest_row
from grail_lightning.grading import grade_and_locate
from grail_lightning.policy.micro_batch import MicroBatch
from grail_lightning.policy.model import Policy
from grail_lightning.policy.source import PolicySource, load_tokenizer, read_config
from grail_lightning.policy.vision import takes_pictures
from grail_lightning.runtime.collectives import all_reduce, rank, whole_tensor, world_size
from grail_lightning.runtime.seeds import derive_seed, run_seed, seeded
from grail_lightning.step.optimizer import ConfiguredOptions, check_optimizer, take_step
from grail_lightning.step.sampler import Sampler, sample_rollouts
from grail_lightning.tasks.base import TokenText


class SampledContinuations(Continuations):
    """Continuations that the sampler of training samples; `step`, the optimiser steps so far, is a key of the draws."""

    def __init__(self, sampler: Sampler, step: int) -> None:
        self.sampler, self.step = sampler, step

    @torch.no_grad()
    def draw(
        self, batch: RolloutBatch, places: Sequence[Prefix], number: int, budget: int
    ) -> tuple[list[list[float] | None], int]:
        """See `Continuations.draw`. Calls of the engine are filled from the earliest place on."""
        check_one_turn(self, batch, "continues rollouts from places within them", "Set another `model.credit`.")
        outcomes: list[list[float] | None] = [None] * len(places)
        keys = batch.row.tolist()
        waiting = sorted(range(len(places)), key=lambda k: (places[k].length, keys[places[k].row]))
        spent = 0
        self.sampler.push()
        while True:
            fitting = self._fitting(batch, [places[k] for k in waiting], number, budget - spent)
            if not all_reduce(torch.tensor(fitting, device=self.sampler.policy.device), "max"):
                return outcomes, spent
            drawn, waiting = waiting[:fitting], waiting[fitting:]
            graded, tokens = self._call(batch, [places[k] for k in drawn], number)
            spent += tokens
            rewards = graded.rewards.tolist()
            for start, k in zip(range(0, len(rewards), number), drawn, strict=True):
                outcomes[k] = [reward for reward in rewards[start : start + number] if not math.isnan(reward)]

    def _fitting(self, batch: RolloutBatch, places: list[Prefix], number: int, budget: int) -> int:
        """How many of the places, whose lengths rise, fit into one call and the budget."""
        if not places:
            return 0
        longest = self._limit(places)
        room = longest_row(self.sampler.engine, self.sampler.policy)
        prompts = batch.prompt_lengths.tolist()
        affordable = places[: max(0, budget) // (number * longest)]
        for k, (row, length) in enumerate(affordable):
            # The first place of a call sets the limit of all; the original limit was possible by itself.
            if k and prompts[row] + length + longest > room:
                return k
        return len(affordable)

    def _limit(self, places: list[Prefix]) -> int:
        return self.sampler.sampling.max_response_length - min((place.length for place in places), default=0)

    def _call(self, batch: RolloutBatch, places: list[Prefix], number: int) -> tuple[GradedBatch, int]:
        """The whole responses, graded, and the number of tokens sampled for them.

        The prompts are token ids, so that nothing is tokenised again.
        """
        policy, limit, keys = self.sampler.policy, self.sampler.sampling.max_response_length, batch.row.tolist()
        prompts, seeds = [], []
        for row, length in places:
            prompt = batch.attention_mask[row, : batch.prompt_width].nonzero().flatten()
            ids = [*batch.input_ids[row, prompt].tolist(), *batch.response_ids[row, :length].tolist()]
            prompts.append(replace(batch.prompts[row], messages=TokenText(policy.tokenizer.decode(ids), ids)))
            seeds += [derive_seed(run_seed(), "continuation", self.step, keys[row], length, k) for k in range(number)]
        sampling = replace(self.sampler.sampling, max_response_length=self._limit(places))
        sampled = sample_rollouts(self.sampler.engine, policy, prompts, number, sampling, seeds)
        responses, finished = [], []
        lengths = sampled.response_lengths.tolist()
        for k, (row, length) in enumerate(place for place in places for _ in range(number)):
            own = sampled.response_ids[k, : min(lengths[k], limit - length)].tolist()
            responses.append([*batch.response_ids[row, :length].tolist(), *own])
            finished.append(bool(sampled.finished[k]) and lengths[k] <= limit - length)
        whole = build_batch(policy, [batch.prompts[row] for row, _ in places], number, responses, finished)
        graded = grade_and_locate(whole, self.sampler.verifier, policy.tokenizer)
        return graded, int(sampled.response_mask.sum())


def check_training(training: Training, policy: PolicySource, *, trust_remote_code: bool) -> None:
    """Check the optimiser of the model that a credit method trains, and that another model has the policy's tokens."""
    try:
        check_optimizer(training.optimizer, training.scheduler)
    except ValueError as error:
        raise ValueError(f"`model.credit`: {error}") from error
    if training.model is None:
        return
    read_config(training.model, trust_remote_code, "model.credit.model")  # It says what is wrong with the name.
    if takes_pictures(policy, trust_remote_code):
        raise ValueError("`model.credit.model` must be null with a policy that takes pictures, which it then copies.")
    ours, theirs = (load_tokenizer(name, trust_remote_code).get_vocab() for name in (policy, training.model))
    if ours != theirs:
        raise ValueError(
            f"`model.credit.model` must have the tokens of the policy {policy!r}, but got {training.model!r}, "
            "which has others. Take a model with the same tokenizer, or null."
        )


class _Optimisation(NamedTuple):
    """What the first use of a second model makes, when the strategy has placed the policy."""

    gradients: Gradients
    optimizer: Optimizer
    scheduler: Any
    options: ConfiguredOptions


class TrainedModel(SecondModel):
    """A second model under a strategy of Lightning, which knows nothing of it.

    Its first use makes the optimiser, and restores the state of a checkpoint. Gradients of replicated weights are
    averaged over ranks here. The state is whole in checkpoints, gathered tensor by tensor if the weights are sharded.
    """

    def __init__(self, policy: Policy, training: Training, strategy: Strategy, max_grad_norm: float | None) -> None:
        self.policy, self.training, self.strategy, self.max_grad_norm = policy, training, strategy, max_grad_norm
        self.steps = 0  # The number of optimiser steps taken.
        self._optimisation: _Optimisation | None = None
        self._restored: Mapping[str, Any] = {}

    def beside(self, policy: Policy) -> Policy:
        """See `SecondModel.beside`."""
        if self._optimisation is None and not isinstance(self.policy, FSDPModule):
            self.policy.to(device=policy.device, dtype=policy.model.dtype)
        self._opened()
        return self.policy

    def step(self, parts: Sequence[MicroBatch], loss: Callable[[MicroBatch], Tensor]) -> dict[str, float]:
        """See `SecondModel.step`. An error before any weight has changed if the gradients are not finite."""
        gradients, optimizer, scheduler, _ = self._opened()
        self._reshard()
        with torch.enable_grad(), seeded(self.policy.device, self._seed("second model", rank())):
            for number, micro in enumerate(parts, start=1):
                summand = loss(micro) * world_size()  # Reductions average.
                with gradients.accumulating(last=number == len(parts)):
                    summand.backward()  # type: ignore[no-untyped-call]
        try:
            figures = take_step(gradients, optimizer, self.max_grad_norm, seed=self._seed("second optimizer"))
        except ValueError as error:
            raise ValueError(f"The model that `model.credit` trains: {error}") from error
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return figures

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimiser and schedule as plain values. A collective; if sharded, the first rank has them."""
        if self._optimisation is None:
            return dict(self._restored)
        gradients, optimizer, scheduler, _ = self._optimisation
        self._reshard()
        weights = {name: whole_tensor(weight).cpu() for name, weight in gradients.by_name.items()}
        state = optimizer.state_dict()
        moments = _of_tensors(state["state"], lambda _, value: whole_tensor(value).cpu())
        if isinstance(self.policy, FSDPModule) and rank():
            return {}
        return {
            "steps": self.steps,
            "weights": weights,
            "optimizer": state | {"state": moments},
            "scheduler": None if scheduler is None else scheduler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint, when the model is next used; of an empty one the optimiser begins anew."""
        self._restored, self._optimisation = state, None

    def _opened(self) -> _Optimisation:
        if self._optimisation is None:
            self._reshard()
            gradients = Gradients(self.policy, self.strategy, apart=True)
            optimizer, make_schedule = gradients.make_optimizer(self.training.optimizer), self.training.scheduler
            options = ConfiguredOptions(optimizer, make_schedule)  # Before the schedule writes into them.
            scheduler = None if make_schedule is None else make_schedule(optimizer)
            made, self.steps = _Optimisation(gradients, optimizer, scheduler, options), 0
            if self._restored:
                self._restore(made, self._restored)
            self._optimisation, self._restored = made, {}
        return self._optimisation

    @torch.no_grad()
    def _restore(self, made: _Optimisation, state: Mapping[str, Any]) -> None:
        gradients, optimizer, scheduler, options = made
        weights = gradients.by_name
        if weights.keys() != state["weights"].keys():
            raise ValueError(
                "`ckpt_path` must hold the model that `model.credit` trains, but its weights have other names. Set "
                "`model.credit.model` and `model.loading.lora` to what they were, or begin anew."
            )
        for name, weight in weights.items():
            weight.copy_(_like(weight, state["weights"][name]))
        if gradients.masters is not None:
            gradients.masters.write_back()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        moments = _of_tensors(state["optimizer"]["state"], lambda index, value: _like(parameters[index], value))
        optimizer.load_state_dict(state["optimizer"] | {"state": moments})
        self.steps = state["steps"]
        options.apply(optimizer, scheduler, self.steps)

    def _seed(self, purpose: str, *more: int) -> int:
        return derive_seed(run_seed(), purpose, self.steps, *more)

    def _reshard(self) -> None:
        """Leave each rank with its shards.

        After a forward pass FSDP2 keeps the root's weights whole. Those of a pass with frozen weights need no gradient,
        and the next pass would use them as they are.
        """
        for unit in self.policy.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()


def _of_tensors(
    state: Mapping[int, Mapping[str, object]], change: Callable[[int, Tensor], Tensor]
) -> dict[int, dict[str, object]]:
    """An optimiser's state with `change` applied to the parameter's index and each of its tensors."""
    return {
        index: {name: change(index, value) if isinstance(value, Tensor) else value for name, value in tensors.items()}
        for index, tensors in state.items()
    }


def _like(weight: Tensor, value: Tensor) -> Tensor:
    """A whole tensor of a weight's shape, sharded as the weight is; a tensor of another shape unchanged."""
    if not isinstance(weight, DTensor) or value.shape != weight.shape:
        return value
    return distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements)
