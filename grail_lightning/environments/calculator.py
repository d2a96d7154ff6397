"""An environment with a calculator."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_ALLOWED = re.compile(r"[0-9.+\-*/() ]*")
_MAX_CHARACTERS = 100  # So few that neither a nested expression nor a long number takes time.


class Calculator:
    """An environment whose one tool computes an expression exactly. It has no state and no reward of its own."""

    def reset(self, **row: object) -> None:
        """Begin a rollout; the problem is in the prompt."""

    def calculator(self, expression: str) -> str:
        """Compute an arithmetic expression.

        Args:
            expression: Numbers, + - * / and parentheses, such as 12*(3+4).
        """
        text = expression.strip()
        if len(text) > _MAX_CHARACTERS:
            raise ValueError(f"an expression must have at most {_MAX_CHARACTERS} characters")
        try:
            if not _ALLOWED.fullmatch(text):  # No names, and no exponents: 1e999999999 is a number of that many digits.
                raise SyntaxError
            value = _value(ast.parse(text, mode="eval").body, text)
        except (SyntaxError, RecursionError, MemoryError):
            raise ValueError("an expression has numbers, + - * / and parentheses alone") from None
        except ZeroDivisionError:
            raise ValueError("division by zero") from None
        return str(value) if value.denominator == 1 else f"{float(value):.6g}"


def _value(node: ast.expr, text: str) -> Fraction:
    """The value of a parsed expression, by our own walk over it: nothing that a model writes is evaluated."""
    match node:
        case ast.Constant():
            return Fraction(ast.get_source_segment(text, node) or "0")  # Its digits, so that 0.1 is a tenth.
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, text)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, text), _value(right, text))
    raise ValueError("an expression has numbers, + - * / and parentheses alone")
