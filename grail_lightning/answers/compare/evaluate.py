"""The value of a formula: one walk over its tree for all kinds of numbers, each of which says what is its own."""

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from grail_lightning.answers.grammar.nodes import Node

__all__ = ["Evaluator", "TooLarge", "Undefined"]

Value = TypeVar("Value")


class TooLarge(ValueError):  # noqa: N818 (it is caught, not reported)
    """A number beyond the caps."""


class Undefined(ValueError):  # noqa: N818 (it is caught, not reported)
    """A value that does not exist, such as one over zero."""


class Evaluator(ABC, Generic[Value]):
    """Computes formulas in one kind of number.

    A formula has no value (None) if one of its parts has none in this kind of number, such as a letter.
    """

    def value(self, node: Node) -> Value | None:
        """The value of a formula, or None.

        Args:
            node: a formula.

        Raises:
            TooLarge: If a step passes the caps.
            Undefined: If a step has no value.
        """
        known = self.known(node)
        if known is not None or not node.args or node.kind == "sign":
            return known
        values: list[Any] = []
        for argument in node.args:
            values.append(self.value(argument))
            if values[-1] is None:
                return None
        return self.applied(node, values)

    def applied(self, node: Node, values: list[Any]) -> Value | None:
        """The value of an operation on numbers."""
        result: Value | None
        match node.kind:
            case "add":
                result = sum(values[1:], values[0])
            case "multiply":
                result = values[0] * values[1]
            case "negate":
                result = -values[0]
            case "divide":
                if not values[1]:
                    raise Undefined("a division by zero")
                result = values[0] / values[1]
            case "power":
                result = self.power(values[0], values[1])
            case _:
                result = self.function(str(node.value), values)
        return result

    @abstractmethod
    def known(self, node: Node) -> Value | None:
        """The value of a number, a symbol or a constant, or of any formula of which it is known without a walk."""

    @abstractmethod
    def power(self, base: Value, exponent: Value) -> Value | None:
        """A power."""

    @abstractmethod
    def function(self, name: str, values: list[Value]) -> Value | None:
        """The value of a function, of which roots are one."""
