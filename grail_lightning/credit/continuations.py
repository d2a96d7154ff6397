"""What credit methods may ask of the sampler: responses that continue from a place within a rollout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from grail_lightning.batch import RolloutBatch


class Place(NamedTuple):
    """A place within a rollout.

    Attributes:
        row: The rollout's index in the batch.
        length: The number of its response tokens that are kept.
    """

    row: int
    length: int


class Continued(NamedTuple):
    """The continuations from a place.

    Attributes:
        rewards: The reward of each whole response, kept tokens included.
        correct: Whether each of them is right.
    """

    rewards: list[float]
    correct: list[bool]


class Continuations(ABC):
    """A source of continuations by the policy with its present weights, graded like rollouts."""

    @abstractmethod
    def draw(
        self, batch: RolloutBatch, places: Sequence[Place], number: int, budget: int
    ) -> tuple[list[Continued | None], int]:
        """Continue from places in rollouts. A collective: every rank must call it, also without a place.

        A continuation depends on the run's seed, the step, the row's identity (`RolloutBatch.row`), the place and its
        number, not on the other places. It ends where the rollout would have: at the same limit in tokens.

        Args:
            batch: The rollouts.
            places: Places of this rank's rollouts, each before the rollout's end.
            number: Continuations of each place.
            budget: Most tokens that all continuations of this call may have on this rank.

        Returns:
            The continuations of each place, None where the budget did not suffice; and the number of sampled tokens.
        """
