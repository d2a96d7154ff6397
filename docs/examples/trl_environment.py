"""An environment, a tool and rewards as they are written for TRL."""

from __future__ import annotations

from typing import Any


class House:
    """A visitor is to be brought to a floor."""

    def __init__(self) -> None:
        self.floor = 0

    def reset(self, target: int, **row: Any) -> str:
        """Begin on the ground floor; the text goes to the end of the prompt."""
        self.floor, self.target = 0, target
        return f" You are on floor 0. Go to floor {target}."

    def climb(self, floors: int) -> str:
        """Go up, or down.

        Args:
            floors: The number of floors; below 0 to go down.

        Returns:
            The floor on which you are.
        """
        if not 0 <= self.floor + floors <= 20:
            raise ValueError("There is no such floor.")
        self.floor += floors
        return f"Floor {self.floor}."


def multiply(one: int, other: int) -> int:
    """Multiply two numbers.

    Args:
        one: A number.
        other: A number.
    """
    return one * other


def arrived(environments: list[House], **columns: Any) -> list[float]:
    """1 for a visitor on the right floor."""
    return [float(house.floor == house.target) for house in environments]


def few_calls(completions: list[list[dict[str, Any]]], **columns: Any) -> list[float | None]:
    """Less for each call; no opinion about a rollout without one."""
    calls = [sum(message["role"] == "tool" for message in messages) for messages in completions]
    return [-float(number) if number else None for number in calls]
