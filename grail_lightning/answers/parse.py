r"""From LaTeX to a tree: a recursive-descent parser for the formulas that stand in answers.

It knows numbers, letters, arithmetic, powers, roots, functions, mixed numbers and repeating decimals, and refuses the
rest (integrals, sums, sets): a refusal costs a slower layer, a guess would cost a wrong verdict. Input is normalised
and within the caps, so recursion is bounded.

Readings where people differ: `\log` without a base is natural; `1/2x` is read from left to right; `2\frac{1}{3}` with
two literal integers is a mixed number; `\sin 2x \cos x` is (sin 2x)(cos x); a letter before a bracket is a factor,
except in `f(x)` and `I(0)`.
"""

import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import NamedTuple

from grail_lightning.answers.normalise import BARE_WORDS, FUNCTIONS, GREEK, INVERSE


class Node(NamedTuple):
    """A formula: `kind` is number | symbol | constant | add | multiply | divide | power | negate | function | sign.

    `value` is a number's Fraction, or a name. A `sign` is a plus-minus that applies to its one operand.
    """

    kind: str
    value: Fraction | str
    args: tuple["Node", ...] = ()


def number(value: Fraction | int) -> Node:
    """A literal."""
    return Node("number", Fraction(value))


def negated(node: Node) -> Node:
    """Minus a formula."""
    return Node("negate", "", (node,))


def subtrees(node: Node) -> Iterator[Node]:
    """A formula and all formulas in it."""
    waiting = [node]
    while waiting:
        part = waiting.pop()
        yield part
        waiting.extend(part.args)


def letters(node: Node) -> set[str]:
    """The symbols of a formula."""
    return {str(part.value) for part in subtrees(node) if part.kind == "symbol"}


def mentions(node: Node, constant: str) -> bool:
    """Whether a constant such as i or infinity occurs in a formula."""
    return any(part.kind == "constant" and part.value == constant for part in subtrees(node))


def signed(node: Node, sign: str) -> Node:
    """The formula with each plus-minus read as `+` or as `-`."""
    args = tuple(signed(argument, sign) for argument in node.args)
    if node.kind != "sign":
        return Node(node.kind, node.value, args)
    return args[0] if node.value == sign else negated(args[0])


_E_NOTATION = re.compile(r"[+-]?(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)[eE][+-]?[0-9]{1,3}", re.ASCII)
_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
    r"|(?P<command>\\(?:[a-zA-Z]+|.))"
    r"|(?P<word>((arc)?(sinh?|cosh?|tanh?|cot|sec|csc)|ln|log|exp|sqrt|infinity|infty|inf|oo|pi)(?![a-z]))"
    r"|(?P<letter>[a-zA-Z])|(?P<other>\S))?",
    re.ASCII,
)
_CLOSING = {"(": ")", "[": "]", r"\{": r"\}", "{": "}"}
_SIGNS = {"-": ("negate", ""), r"\pm": ("sign", "+"), r"\mp": ("sign", "-")}
_DEGREES = re.compile(r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})")
_OVERLINED = re.compile(r"\\overline\s*\{\s*([0-9]+)\s*\}")
# What an integer makes a mixed number with.
_FRACTION = re.compile(
    r"\\frac\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))|([0-9]+)\s*/\s*([0-9]+)(?![0-9.])"
)
# `f(2)` and `f(x)` are one name where f is the usual name of a function, and I(0) is not I times zero.
_APPLIED = re.compile(r"\(\s*([a-zA-Z]|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*\)")
_AT_ZERO = re.compile(r"\(\s*(0)\s*\)")
# The third derivative of f is no cube of it, and neither d nor a letter of dy/dx cancels.
DIFFERENTIABLE = "fghFGHuvy"
_LAGRANGE = re.compile(r"\^\s*\{\s*\(([0-9]+|n)\)\s*\}")
_TIMES = r"(?:\^\s*\{?\s*[2-9]\s*\}?\s*)?"
_OF = r"(?:\\[a-z]+|[a-zA-Z])\s*"
_UPPER, _LOWER = rf"d\s*{_TIMES}{_OF}", rf"d\s*{_OF}{_TIMES}"
DERIVATIVE = rf"(?:\\frac\s*\{{\s*{_UPPER}\}}\s*\{{\s*{_LOWER}\}}|{_UPPER}/\s*{_LOWER}(?![a-zA-Z]))"
_CHOSEN = re.compile(r"([CP])\(\s*([0-9]{1,4})\s*,\s*([0-9]{1,4})\s*\)")
_LEIBNIZ = re.compile(DERIVATIVE)
_SUBSCRIPT = re.compile(r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")
SEVERAL = ("max", "min", "gcd", "lcm")
_FUNCTION_LETTERS = "fghFGHPQVTIuvy"


class Unreadable(ValueError):  # noqa: N818 (it is caught, not reported)
    """A formula outside of the grammar."""


def parse(text: str) -> Node:
    """The tree of a formula."""
    if _E_NOTATION.fullmatch(literal := text.replace(" ", "")):
        return number(Fraction(literal))
    parser = _Parser(text)
    tree = parser.over(parser.sum())
    if parser.kind != "end":
        raise Unreadable(f"expected the end, got {parser.piece!r}")
    return tree


class _Parser:
    """A place in a text, and the token there: its kind and itself, a command with its backslash."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.bars = 0
        self.go_to(0)

    def go_to(self, place: int) -> None:
        token = _TOKEN.match(self.text, place)
        assert token is not None
        self.kind = token.lastgroup or "end"
        self.piece = token[token.lastgroup] if token.lastgroup else ""
        self.start, self.stop = token.end() - len(self.piece), token.end()

    def take(self) -> str:
        piece = self.piece
        if not piece:
            raise Unreadable("the end, too early")
        self.go_to(self.stop)
        return piece

    def accept(self, *pieces: str) -> str:
        return self.take() if self.piece in pieces else ""

    def expect(self, piece: str) -> None:
        if self.take() != piece:
            raise Unreadable(f"expected {piece!r}")

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Take what a pattern matches here."""
        match = pattern.match(self.text, self.start)
        if match is not None:
            self.go_to(match.end())
        return match

    def sum(self) -> Node:
        terms = [self.signed()]
        while self.piece in ("+", "-", r"\pm", r"\mp"):
            terms.append(self.signed())
        return terms[0] if len(terms) == 1 else Node("add", "", tuple(terms))

    def signed(self) -> Node:
        sign = self.accept("+", "-", r"\pm", r"\mp")
        term = self.signed() if sign and self.piece in ("+", "-") else self.product()
        return Node(*_SIGNS[sign], (term,)) if sign in _SIGNS else term

    def product(self) -> Node:
        left = self.factor()
        while True:
            operator = self.accept("*", "/", r"\bmod", r"\mod")
            if not operator and not self.begins_factor():
                return left
            if not operator and self.kind == "number" and not self.text[: self.start].rstrip().endswith("!"):
                raise Unreadable("two numbers side by side")
            right = self.signed_factor() if operator else self.factor()
            if operator.endswith("mod"):
                left = Node("function", "mod", (left, right))
            else:
                left = Node("divide" if operator == "/" else "multiply", "", (left, right))

    def signed_factor(self) -> Node:
        if self.accept("-"):
            return negated(self.signed_factor())
        self.accept("+")
        return self.factor()

    def begins_factor(self) -> bool:
        if self.piece == "|":
            return self.bars == 0
        is_command = self.kind == "command" and self.piece[1:] in _COMMANDS
        return is_command or self.kind in ("number", "word", "letter") or self.piece in _CLOSING

    def factor(self) -> Node:
        base = self.atom()
        while True:
            if self.match(_DEGREES):
                base = Node("function", "degrees", (base,))
            elif self.accept("^"):
                base = Node("power", "", (base, self.script()))
            elif self.accept("!"):
                base = Node("function", "double factorial" if self.accept("!") else "factorial", (base,))
                if self.piece == "!":
                    raise Unreadable("more than two signs of a factorial")
            else:
                return base

    def script(self) -> Node:
        """What stands raised: a group, or one token (`x^23` is x²·3 in TeX; here the whole number is taken)."""
        return negated(self.script()) if self.accept("-") else self.atom()

    def over(self, upper: Node) -> Node:
        r"""`{a \over b}` and `{n \choose k}`."""
        if self.accept(r"\over"):
            return Node("divide", "", (upper, self.sum()))
        return Node("function", "binomial", (upper, self.sum())) if self.accept(r"\choose") else upper

    def atom(self) -> Node:
        if self.kind == "number":
            return self.numeral()
        if chosen := self.match(_CHOSEN):
            n, k = number(int(chosen[2])), number(int(chosen[3]))
            binomial = Node("function", "binomial", (n, k))
            return (
                binomial if chosen[1] == "C" else Node("multiply", "", (binomial, Node("function", "factorial", (k,))))
            )
        if derivative := self.match(_LEIBNIZ):
            return Node("symbol", re.sub(r"\\frac|[^a-zA-Z2-9]", "", derivative[0]))
        if self.kind == "letter":
            return self.symbol(self.take())
        name = self.piece.removeprefix("\\")
        if self.kind == "word" or (self.kind == "command" and name in _COMMANDS):
            self.take()
            read = _COMMANDS.get("pi" if name in BARE_WORDS else name, _Parser.function)
            return read(self, name)
        return self.bracketed()

    def bracketed(self) -> Node:
        opening = self.take()
        if opening not in _CLOSING and opening != "|":
            raise Unreadable(f"unexpected {opening!r}")
        bars, self.bars = self.bars, self.bars + 1 if opening == "|" else 0
        inner = self.sum()
        if opening == "{":
            inner = self.over(inner)
        self.bars = bars
        self.expect(_CLOSING.get(opening, "|"))
        return Node("function", "abs", (inner,)) if opening == "|" else inner

    def numeral(self) -> Node:
        r"""A literal, perhaps with the block that repeats (`0.1\overline{6}` is 0.1 + 6/9 · 10⁻¹) or a fraction."""
        value = Fraction(literal := self.take())
        if self.piece == r"\overline":
            block = self.match(_OVERLINED)
            if block is None or "." not in literal:
                raise Unreadable("a bar over something that is not the end of a decimal")
            places = len(literal.partition(".")[2])
            return number(value + Fraction(int(block[1]), (10 ** len(block[1]) - 1) * 10**places))
        start = self.start
        if literal.isdigit() and (fraction := self.match(_FRACTION)):
            upper, lower = map(int, filter(None, fraction.groups()))
            if 0 < upper < lower:
                return number(value + Fraction(upper, lower))
            self.go_to(start)
        return number(value)

    def argument(self) -> Node:
        r"""A command's argument: a group, or one token, of a number one digit: `\frac12` has the arguments 1 and 2."""
        if self.kind != "number" or not self.piece.isdigit():
            return self.atom()
        digit = int(self.piece[0])
        self.go_to(self.start + 1)
        return number(digit)

    def root(self, name: str) -> Node:
        degree = number(2)
        if self.accept("["):
            degree = self.sum()
            self.expect("]")
        # `\sqrt 17` means the whole number, whatever TeX would draw
        inner = number(Fraction(self.take())) if self.kind == "number" else self.argument()
        return Node("function", "root", (inner, degree))

    def symbol(self, name: str) -> Node:
        if self.accept("_"):
            name += "_" + self.subscript()
        if name in ("e", "i"):
            return Node("constant", name)
        if name[0] in DIFFERENTIABLE and (order := self.match(_LAGRANGE)):
            name += f"^({order[1]})"
        argument = self.match(_APPLIED if name[0] in _FUNCTION_LETTERS else _AT_ZERO)
        return Node("symbol", f"{name}({argument[1]})" if argument else name)

    def accented(self, accent: str) -> Node:
        r"""`\bar{x}`: a name of its own."""
        return self.symbol(f"\\{accent} {self.subscript()}")

    def conjugate(self, accent: str) -> Node:
        r"""`\overline{3+4i}`: the conjugate of a number; over letters a name, which the grammar leaves out."""
        start = self.start
        inner = self.bracketed() if self.piece == "{" else self.atom()
        if mentions(inner, "i") and not letters(inner):
            return Node("function", "conjugate", (inner,))
        if accent == "overline":
            raise Unreadable("a line over letters")
        self.go_to(start)
        return self.accented(accent)

    def several(self, name: str) -> Node:
        r"""`\max(3,5)`, `\gcd\{4,6\}`."""
        opening = self.take()
        if opening not in ("(", r"\{"):
            raise Unreadable(f"{name} of something other than a list")
        arguments = [self.sum()]
        while self.accept(","):
            arguments.append(self.sum())
        self.expect(_CLOSING[opening])
        return Node("function", name, tuple(arguments))

    def subscript(self) -> str:
        if self.piece != "{":
            return self.take()
        group = self.match(_SUBSCRIPT)
        if group is None:
            raise Unreadable("an open subscript")
        return "".join(group[0].split()).replace(r"\text", "").strip("{}()")

    def function(self, name: str) -> Node:
        base, power = None, None
        while self.piece in ("_", "^"):
            if self.take() == "_":
                base = self.script()
            else:
                power = self.script()
        if power == negated(number(1)) and name in INVERSE:
            name, power = INVERSE[name], None
        result = Node("function", name, (self.function_argument(),))
        if base is not None:
            if name != "log":
                raise Unreadable("a base under something other than a logarithm")
            result = Node("divide", "", (result, Node("function", "log", (base,))))
        return result if power is None else Node("power", "", (result, power))

    def function_argument(self) -> Node:
        if self.piece in _CLOSING:
            return self.bracketed()
        if self.accept("-"):
            return negated(self.function_argument())
        argument = self.factor()
        while self.begins_factor() and self.kind != "number" and self.piece != "(":
            if self.piece.removeprefix("\\") in FUNCTIONS:
                break
            argument = Node("multiply", "", (argument, self.factor()))
        return argument


_COMMANDS: dict[str, Callable[[_Parser, str], Node]] = {
    **dict.fromkeys(FUNCTIONS, _Parser.function),
    **dict.fromkeys(GREEK, _Parser.symbol),
    **dict.fromkeys(["pi", "infty"], lambda _, name: Node("constant", BARE_WORDS[name])),
    **dict.fromkeys(["hat", "vec"], _Parser.accented),
    **dict.fromkeys(["bar", "overline"], _Parser.conjugate),
    **dict.fromkeys(["Re", "Im"], _Parser.function),
    "cis": lambda parser, _: Node(
        "function", "exp", (Node("multiply", "", (Node("constant", "i"), parser.function_argument())),)
    ),
    **dict.fromkeys(SEVERAL, _Parser.several),
    "sqrt": _Parser.root,
    "frac": lambda parser, _: Node("divide", "", (parser.argument(), parser.argument())),
    "binom": lambda parser, _: Node("function", "binomial", (parser.argument(), parser.argument())),
}
