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
    """An environment whose one tool computes an expression with fractions. It has no reward of its own.

    Results that are not whole are written with up to twelve digits.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self, solution: str = "", **row: object) -> None:
        """Begin a rollout; the problem is in the prompt.

        Args:
            solution: A worked solution with the results of its calls, as `WordProblemSpace` writes it; without one,
                turns have no score.
            row: The other columns of the row, which are not read.
        """
        self._due = re.findall(r"<result>(.*?)</result>", solution)
        self._scored = bool(self._due)
        self._results: list[str] = []
        self._gain: bool | None = None  # Of the present turn; None without a call.

    def score_turn(self) -> float | None:
        """1 if the turn's call gave a result of the worked solution that was not there before, else 0; None without."""
        gain, self._gain = self._gain, None
        return None if gain is None or not self._scored else float(gain)

    def state_key(self) -> tuple[str, ...]:
        """The results so far."""
        return tuple(self._results)

    def calculator(self, expression: str) -> str:
        """Compute an arithmetic expression.

        Args:
            expression: Numbers, + - * / and parentheses, such as 12*(3+4).
        """
        self._gain = bool(self._gain)  # A call that fails is a wrong one.
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
        result = str(value) if value.denominator == 1 else f"{float(value):.12g}"
        if result in self._due:
            self._due.remove(result)
            self._gain = True
        self._results.append(result)
        return result


def _value(node: ast.expr, text: str) -> Fraction:
    """The value of a parsed expression, by our own walk over it: nothing that a model writes is evaluated."""
    match node:
        case ast.Constant():
            return Fraction(ast.get_source_segment(text, node) or "0")  # Its digits, so that 0.1 is a tenth.
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=operand):
            return _value(operand, text) * (-1 if isinstance(sign, ast.USub) else 1)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, text), _value(right, text))
    raise SyntaxError
