"""An environment: the policy finds a number by guesses, and is told whether the number is larger or smaller."""

from __future__ import annotations

import random


class Guess:
    """A number between 1 and `largest` is to be guessed. The reward falls with each guess.

    Args:
        largest: The largest number that may be drawn.
    """

    def __init__(self, largest: int = 100) -> None:
        self.largest = largest

    def reset(self, seed: int = 0, **row: object) -> str:
        """Draw the number; the text goes to the end of the prompt."""
        self.number = random.Random(seed).randint(1, self.largest)  # noqa: S311 - a game
        self.guesses: list[int] = []
        self.guessed = False
        return f"Guess a number between 1 and {self.largest}."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.

        Returns:
            Whether it is right, or whether the number is larger or smaller.
        """
        self.guesses.append(number)
        self.guessed = True
        if number == self.number:
            return "Right."
        return "The number is larger." if self.number > number else "The number is smaller."

    def get_reward(self) -> float:
        """1 for the first guess, less for each further one; 0 if the number was not found."""
        return 1 / len(self.guesses) ** 0.5 if self.number in self.guesses else 0.0

    def score_turn(self) -> float | None:
        """1 for a guess that is still possible after what was said before, else 0; None if the turn made none."""
        guessed, self.guessed = self.guessed, False
        if not guessed:
            return None
        *before, last = self.guesses
        low = max((g for g in before if g < self.number), default=0)
        high = min((g for g in before if g > self.number), default=self.largest + 1)
        return float(low < last < high)

    def state_key(self) -> tuple[int, ...]:
        """The guesses so far: turns that begin after the same guesses can be compared."""
        return tuple(self.guesses)
