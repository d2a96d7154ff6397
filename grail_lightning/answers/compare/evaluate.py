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
        values = []
        for argument in node.args:
            value = self.value(argument)
            if value is None:
                return None
            values.append(value)
        return self.checked(self._applied(node, values))

    def _applied(self, node: Node, values: list[Any]) -> Value | None:
        result: Value | None
        if node.kind == "add":
            result = self.total(values)
        elif node.kind == "multiply":
            result = values[0] * values[1]
        elif node.kind == "negate":
            result = -values[0]
        elif node.kind == "divide":
            if not values[1]:
                raise Undefined("a division by zero")
            result = values[0] / values[1]
        elif node.kind == "power":
            result = self.power(values[0], values[1])
        else:
            result = self.function(str(node.value), values)
        return result

    @abstractmethod
    def known(self, node: Node) -> Value | None:
        """The value of a number, a symbol or a constant, or of any formula of which it is known without a walk."""

    @abstractmethod
    def total(self, values: list[Value]) -> Value:
        """The sum of terms."""

    @abstractmethod
    def power(self, base: Value, exponent: Value) -> Value | None:
        """A power."""

    @abstractmethod
    def function(self, name: str, values: list[Value]) -> Value | None:
        """The value of a function, of which roots are one."""

    def checked(self, value: Value | None) -> Value | None:
        """The value of a step if it is within the caps."""
        return value
