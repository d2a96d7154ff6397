"""Services: what parts of a run use beside the policy and the rollouts, such as the frozen reference.

A part that uses a service lists its class in `services`: the objective, the estimator of the advantage, or the credit
method. The run opens each listed class once, when it begins, and passes all of them in the context of credit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, TypeVar

from lightning.pytorch.strategies import Strategy

from grail_lightning.core.policy.model import Policy
from grail_lightning.core.policy.reference import Reference
from grail_lightning.core.policy.source import Loading, PolicySource
from grail_lightning.core.records.task import Prompt
from grail_lightning.core.rollout.batch import GradedBatch, SampledBatch, Sampling


class RolloutSampler(Protocol):
    """The sampler of training: it samples with the present weights of the policy, and grades."""

    @property
    def sampling(self) -> Sampling:
        """The options with which training responses are sampled."""

    @property
    def policy(self) -> Policy:
        """The policy with whose weights the engine samples."""

    @property
    def longest_row(self) -> float:
        """The tokens that engine and policy have room for, prompt and response together."""

    def update_weights(self) -> None:
        """Give the engine the present weights. Every rank must call it."""

    def responses(
        self, prompts: Sequence[Prompt], number: int, sampling: Sampling, seeds: Sequence[int]
    ) -> SampledBatch:
        """`number` responses of one turn to each prompt, from the weights that the engine has; one seed for each."""

    def grade(self, sampled: SampledBatch) -> GradedBatch:
        """The responses with their rewards and the positions of their answers."""


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """The parts of a run from which a service is made.

    Attributes:
        policy: The policy that is trained, as it is loaded; it may still be moved to its device.
        source: The name of the policy before training, or the model that was given.
        loading: The options with which it was loaded.
        load_model: A function ``(source, trainable=…) -> Policy`` that loads a model as the policy is loaded: with
            the same options, sharded alike. A collective: every rank must call it.
        sampler: A function that returns the sampler of training with the engine's present state.
        step: A function that returns the number of optimiser steps behind the policy's weights.
        strategy: Lightning's strategy, which averages gradients over ranks.
        max_grad_norm: `execution.max_grad_norm`.
    """

    policy: Policy
    source: PolicySource
    loading: Loading
    load_model: Callable[..., Policy]
    sampler: Callable[[], RolloutSampler]
    step: Callable[[], int]
    strategy: Strategy
    max_grad_norm: float | None


class Service(ABC):
    """What a part of a run may use beside the policy and the rollouts; the base class of services.

    A class of your own works like those of the package: list it in `services` of your credit method, and get the
    opened service with `CreditContext.service`.

    Attributes:
        uses_engine: Whether it samples with the rollout engine in a training step. `execution.sample_ahead` is then
            refused, because the engine is busy with the next batch.
        trains_model: Whether it trains a model, with two moments for each weight. It is then opened for `fit` alone.
        copies_of_model: The number of frozen copies of the policy that it holds where the policy has no adapters, for
            the plan of memory.
    """

    uses_engine: ClassVar[bool] = False
    trains_model: ClassVar[bool] = False
    copies_of_model: ClassVar[int] = 0

    @classmethod
    @abstractmethod
    def open(cls, owner: Any, run: RunParts) -> Self:
        """Make the service for a run, on every rank; `owner` is the first part that lists it, with its options.

        It is called once for a module, so a second run of the same module uses the same service.
        """

    @classmethod
    def check(cls, owner: Any, source: PolicySource, loading: Loading) -> None:
        """Check the owner's options for the service before a model is loaded; a ValueError names a wrong one."""
        del owner, source, loading  # Most services have no options.

    def models_to_gather(self) -> Sequence[Policy]:
        """The models whose sharded weights must be whole while a credit method or an estimator is called.

        These are the ones that list the service. An objective's companion runs models through their own call instead.
        """
        return ()

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: tensors and plain values. Every rank calls it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint; of an empty one begin anew, as a second fit of a module does."""
        del state  # Most services have no state.


S = TypeVar("S", bound=Service)
Opened = Mapping[type[Service], Service]


class Owner(Protocol):
    """A part of a run that lists services: an objective, an estimator of the advantage or a credit method."""

    @property
    def services(self) -> tuple[type[Service], ...]:
        """The classes of the services that it uses."""


def with_inner(part: Any) -> Iterator[Any]:
    """A part, and the one that it wraps (`inner`), as a control wraps a credit method."""
    yield part
    if (inner := getattr(part, "inner", None)) is not None:
        yield from with_inner(inner)


def listed(owners: Iterable[Owner]) -> dict[type[Service], Owner]:
    """The services that parts and those inside of them list, each with the first part that lists it."""
    first: dict[type[Service], Owner] = {}
    for owner in owners:
        for part in with_inner(owner):
            for kind in part.services:
                first.setdefault(kind, part)
    return first


def check_services(owners: Iterable[Owner], source: PolicySource, loading: Loading) -> None:
    """Check the services that parts of a run list, and the parts' options for them, before a model is loaded."""
    names: dict[str, type[Service]] = {}
    for kind, owner in listed(owners).items():
        if (other := names.setdefault(kind.__name__, kind)) is not kind:
            raise ValueError(
                "`services` must have names of their own, by which checkpoints hold their states, but got two "
                f"classes `{kind.__name__}`, of {kind.__module__} and {other.__module__}. Rename one of them."
            )
        kind.check(owner, source, loading)


class Services:
    """The services of a run: opened when it begins, kept for further runs of the module, and part of checkpoints."""

    def __init__(self) -> None:
        self._further: list[Owner] = []
        self._opened: dict[type[Service], Service] = {}

    def add(self, owner: Owner) -> None:
        """Add a part, such as a further credit method, whose services the run that is about to begin opens, too."""
        self._further.append(owner)

    def open(self, stage: str, owners: Sequence[Owner], run: RunParts) -> None:
        """Open the services that the parts list and that are not open yet. Every rank must call it."""
        for kind, owner in listed([*owners, *self._further]).items():
            if kind not in self._opened and (stage == "fit" or not kind.trains_model):
                self._opened[kind] = kind.open(owner, run)
        self._further.clear()

    def opened(self, stage: str) -> Opened:
        """The open services by their class. Those that train a model are there in `fit` alone."""
        return {kind: service for kind, service in self._opened.items() if stage == "fit" or not kind.trains_model}

    def state_dict(self) -> dict[str, Any]:
        """The states by the name of the class, without empty ones. Every rank must call it."""
        states = {kind.__name__: service.state_dict() for kind, service in self._opened.items()}
        return {name: state for name, state in states.items() if state}

    def restore(self, checkpoint: Mapping[str, Any], stage: str) -> None:
        """Restore the states under the key `services`. A service without a state in it begins anew."""
        if checkpoint.get("second") and stage == "fit":
            raise ValueError(
                "`ckpt_path` must be a checkpoint with the key `services`, but got one with the key `second`, in which "
                "an earlier version kept the model that a credit method trains. Begin a new run; with the old run's "
                "export as `model.policy` it begins with the weights."
            )
        states = checkpoint.get("services", {})
        for kind, service in self.opened(stage).items():
            service.load_state_dict(states.get(kind.__name__, {}))


class FrozenReference(Reference, Service):
    """The policy before training, frozen: of the KL term, and of methods that compare the policy with it."""

    copies_of_model = 1

    @classmethod
    def open(cls, owner: object, run: RunParts) -> Self:
        """A frozen copy of the policy before training; with adapters the policy itself, without them."""
        return cls(run.load_model(run.source, trainable=False) if run.loading.lora is None else run.policy)

    def models_to_gather(self) -> Sequence[Policy]:
        """The frozen copy."""
        return () if self.has_adapters else (self.policy,)
