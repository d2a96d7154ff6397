r"""From LaTeX to a tree: a recursive-descent parser for the formulas that stand in answers.

It knows numbers, letters, arithmetic, powers, roots, functions, mixed numbers and repeating decimals, and refuses the
rest (integrals, sums, sets): a refusal costs a slower layer, a guess would cost a wrong verdict. Input is normalised
and within the caps, so recursion is bounded.

Readings where people differ: `\log` without a base is natural; `1/2x` is read from left to right; `2\frac{1}{3}` with
two literal integers is a mixed number; `\sin 2x \cos x` is (sin 2x)(cos x); a letter before a bracket is a factor,
except in `f(x)` and `I(0)`.
"""

from collections.abc import Callable
from fractions import Fraction

from grail_lightning.answers.grammar.functions import FUNCTIONS, INVERSE
from grail_lightning.answers.grammar.nodes import Node, number
from grail_lightning.answers.grammar.tokens import (
    BARE_WORDS,
    CLOSING,
    DOTS,
    FUNCTION_LETTERS,
    GREEK,
    SCIENTIFIC,
    TOKEN,
)

__all__ = ["Unreadable", "parse"]


class Unreadable(ValueError):  # noqa: N818 (it is caught, not reported)
    """A formula outside of the grammar."""


def parse(text: str) -> Node:
    r"""The tree of a formula.

    Args:
        text: a normalised formula such as `\frac{1}{2}x^2-1`.

    Raises:
        Unreadable: If it is not one, or has something outside of the grammar.
    """
    scientific = SCIENTIFIC.fullmatch(text.replace(" ", ""))
    if scientific:
        exponent = int(scientific[2])
        return number(Fraction(scientific[1]) * Fraction(10) ** exponent)
    parser = _Parser(text)
    tree = parser.over(parser.sum())
    parser.expect("")
    return tree


class _Parser:
    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str]] = []
        for found in TOKEN.finditer(text):
            if found.lastgroup is not None:
                self.tokens.append((found.lastgroup, found[found.lastgroup]))
        self.tokens.append(("end", ""))
        self.place = 0
        self.bars = 0

    def peek(self, ahead: int = 0) -> str:
        """The next token: itself, commands with their backslash."""
        kind, value = self.tokens[min(self.place + ahead, len(self.tokens) - 1)]
        return "\\" + value if kind == "command" else value

    @property
    def kind(self) -> str:
        return self.tokens[self.place][0]

    def take(self) -> str:
        piece = self.peek()
        self.place += 1
        return piece

    def accept(self, *tokens: str) -> str:
        return self.take() if self.peek() in tokens and self.kind != "end" else ""

    def expect(self, piece: str) -> None:
        if self.peek() != piece or (piece == "" and self.kind != "end"):
            raise Unreadable(f"expected {piece!r}, got {self.peek()!r}")
        self.place += piece != ""

    def sum(self) -> Node:
        terms = [self.signed()]
        while self.peek() in ("+", "-", r"\pm", r"\mp"):
            terms.append(self.signed())
        return terms[0] if len(terms) == 1 else Node("add", "", tuple(terms))

    def signed(self) -> Node:
        sign = self.accept("+", "-", r"\pm", r"\mp")
        if not sign:
            return self.product()
        term = self.signed() if self.peek() in ("+", "-") else self.rest_of_series() or self.product()
        if sign == "+":
            return term
        return Node("negate", "", (term,)) if sign == "-" else Node("sign", "+" if sign == r"\pm" else "-", (term,))

    def rest_of_series(self) -> Node | None:
        r"""`\cdots` as the last term: a name for what is not written, equal to nothing but itself."""
        if self.peek() in DOTS and self.peek(1) in ("", "+", "-", ")", "]", "}"):
            self.place += 1
            return Node("symbol", "...")
        return None

    def product(self) -> Node:
        left = self.factor()
        while True:
            if self.accept("*"):
                left = Node("multiply", "", (left, self.signed_factor()))
            elif self.accept("/"):
                left = Node("divide", "", (left, self.signed_factor()))
            elif self.begins_factor():
                if self.kind == "number":
                    raise Unreadable("two numbers side by side")
                left = Node("multiply", "", (left, self.factor()))
            else:
                return left

    def signed_factor(self) -> Node:
        if self.accept("-"):
            return Node("negate", "", (self.signed_factor(),))
        self.accept("+")
        return self.factor()

    def begins_factor(self) -> bool:
        if self.kind in ("number", "word", "letter"):
            return True
        piece = self.peek()
        if self.kind == "command":
            name = piece[1:]
            return name in FUNCTIONS or name in GREEK or name in _ATOMS or piece == r"\{"
        return piece in ("(", "[", "{") or (piece == "|" and self.bars == 0)

    def factor(self) -> Node:
        base = self.atom()
        while True:
            if self.peek() == "^" and self.peek(1) == r"\circ":
                self.place += 2
                base = Node("function", "degrees", (base,))
            elif self.peek() == "^" and self.peek(1) == "{" and self.peek(2) == r"\circ" and self.peek(3) == "}":
                self.place += 4
                base = Node("function", "degrees", (base,))
            elif self.accept("^"):
                base = Node("power", "", (base, self.script()))
            elif self.accept("!"):
                base = Node("function", "factorial", (base,))
            elif self.accept("%"):
                base = Node("divide", "", (base, number(100)))
            else:
                return base

    def script(self) -> Node:
        """What stands raised: a group, or one token (`x^23` is x²·3 in TeX; here the whole number is taken)."""
        if self.peek() == "{":
            return self.group()
        if self.accept("-"):
            return Node("negate", "", (self.script(),))
        return self.atom()

    def group(self) -> Node:
        self.expect("{")
        bars, self.bars = self.bars, 0
        inner = self.sum()
        inner = self.over(inner)
        self.bars = bars
        self.expect("}")
        return inner

    def over(self, upper: Node) -> Node:
        r"""`{a \over b}` and `{n \choose k}`."""
        if self.accept(r"\over"):
            return Node("divide", "", (upper, self.sum()))
        if self.accept(r"\choose"):
            return Node("function", "binomial", (upper, self.sum()))
        return upper

    def atom(self) -> Node:
        piece = self.peek()
        if self.kind == "number":
            return self.numeral()
        if self.kind == "word":
            return self.word()
        if self.kind == "letter":
            return self.symbol(self.take())
        if self.kind == "command" and piece[1:] in FUNCTIONS:
            return self.function(self.take()[1:])
        if self.kind == "command" and piece[1:] in GREEK:
            return self.symbol(self.take()[1:])
        if self.kind == "command" and piece[1:] in _ATOMS:
            self.place += 1
            return _ATOMS[piece[1:]](self)
        if piece == "|":
            return self.absolute()
        if piece in CLOSING:
            return self.bracketed()
        raise Unreadable(f"unexpected {piece!r}")

    def bracketed(self) -> Node:
        if self.peek() == "{":
            return self.group()
        if self.peek() not in CLOSING:
            raise Unreadable(f"expected a bracket, got {self.peek()!r}")
        closing = CLOSING[self.take()]
        bars, self.bars = self.bars, 0
        inner = self.sum()
        self.bars = bars
        self.expect(closing)
        return inner

    def absolute(self) -> Node:
        self.expect("|")
        self.bars += 1
        inner = self.sum()
        self.bars -= 1
        self.expect("|")
        return Node("function", "abs", (inner,))

    def numeral(self) -> Node:
        literal = self.take()
        value = Fraction(literal)
        if self.peek() == r"\overline":
            return self.repeating(literal)
        # `\frac` copies no tokens unless an integer comes right before it: the parser stays linear on sums of fractions
        if (literal.isdigit() and self.peek() in ("\\frac",)) or (literal.isdigit() and self.kind == "number"):
            fraction = self.mixed()
            if fraction is not None:
                value += fraction
        return number(value)

    def repeating(self, literal: str) -> Node:
        r"""`0.1\overline{6}`: 0.1 + 6/9 · 10⁻¹."""
        self.place += 1
        self.expect("{")
        digits = self.take()
        self.expect("}")
        if "." not in literal or not digits.isdigit():
            raise Unreadable("a bar over something that is not the end of a decimal")
        places = len(literal.partition(".")[2])
        return number(Fraction(literal) + Fraction(int(digits), (10 ** len(digits) - 1) * 10**places))

    def mixed(self) -> Fraction | None:
        r"""The fraction that follows an integer in `2\frac{3}{5}`, `2\frac35` or `2 3/5`."""
        start, saved = self.place, list(self.tokens)
        if self.accept(r"\frac"):
            parts = [self.literal_argument() for _ in range(2)]
            if parts[0] is not None and parts[1] is not None and 0 < parts[0] < parts[1]:
                return Fraction(parts[0], parts[1])
        elif self.kind == "number" and self.peek(1) == "/" and self.tokens[self.place + 2][0] == "number":
            upper, _, lower = self.take(), self.take(), self.take()
            if upper.isdigit() and lower.isdigit() and 0 < int(upper) < int(lower):
                return Fraction(int(upper), int(lower))
        self.place, self.tokens = start, saved
        return None

    def literal_argument(self) -> int | None:
        if self.peek() == "{" and self.peek(1).isdigit() and self.peek(2) == "}":
            self.place += 3
            return int(self.peek(-2))
        if self.kind == "number" and self.peek().isdigit():
            return int(self.digit())
        return None

    def digit(self) -> str:
        r"""One digit of a number: `\frac12` has the arguments 1 and 2."""
        kind, value = self.tokens[self.place]
        if len(value) == 1:
            self.place += 1
        elif value.isdigit():
            self.tokens[self.place] = (kind, value[1:])
        else:
            raise Unreadable("half of a decimal as an argument")
        return value[0]

    def argument(self) -> Node:
        """A command's argument: a group, or one token."""
        if self.peek() == "{":
            return self.group()
        if self.kind == "number" and self.peek()[0].isdigit():
            return number(int(self.digit()))
        return self.atom()

    def fraction(self) -> Node:
        return Node("divide", "", (self.argument(), self.argument()))

    def root(self) -> Node:
        degree = number(2)
        if self.accept("["):
            degree = self.sum()
            self.expect("]")
        # `\sqrt 17` means the whole number, whatever TeX would draw
        inner = number(Fraction(self.take())) if self.kind == "number" else self.argument()
        return Node("function", "root", (inner, degree))

    def word(self) -> Node:
        name = self.take()
        if name == "sqrt":
            return self.root()
        if name in BARE_WORDS:
            return Node("constant", BARE_WORDS[name])
        return self.function(name)

    def symbol(self, name: str) -> Node:
        while self.peek() == "'":
            name += self.take()
        if self.accept("_"):
            name += "_" + self.subscript()
        if name in ("e", "i"):
            return Node("constant", name)
        return Node("symbol", name + self.applied(name))

    def applied(self, name: str) -> str:
        """`(0)` or `(x)` after the usual name of a function: I(0) is not I times zero."""
        argument = self.tokens[min(self.place + 1, len(self.tokens) - 1)]
        if self.peek() != "(" or self.peek(2) != ")":
            return ""
        if argument != ("number", "0") and not (name[0] in FUNCTION_LETTERS and argument[0] in ("number", "letter")):
            return ""
        self.place += 3
        return f"({argument[1]})"

    def accented(self, accent: str) -> Node:
        r"""`\bar{x}`: a name of its own."""
        return self.symbol(f"\\{accent} {self.subscript()}")

    def subscript(self) -> str:
        if not self.accept("{"):
            return self.take()
        depth, name = 1, ""
        while depth:
            if self.kind == "end":
                raise Unreadable("an open subscript")
            piece = self.take()
            depth += (piece == "{") - (piece == "}")
            name += piece if depth else ""
        return name.removeprefix(r"\text").strip("{}() ")

    def function(self, name: str) -> Node:
        base, power = None, None
        while self.peek() in ("_", "^"):
            if self.take() == "_":
                base = self.script()
            else:
                power = self.script()
        if power == Node("negate", "", (number(1),)) and name in INVERSE:
            name, power = INVERSE[name], None
        argument = self.function_argument()
        result = Node("function", name, (argument,))
        if base is not None:
            if name != "log":
                raise Unreadable("a base under something other than a logarithm")
            result = Node("divide", "", (result, Node("function", "log", (base,))))
        return result if power is None else Node("power", "", (result, power))

    def function_argument(self) -> Node:
        if self.peek() in ("(", "[", "{", r"\{"):
            inner = self.bracketed()
            while self.peek() == "!":
                self.place += 1
                inner = Node("function", "factorial", (inner,))
            return inner
        if self.accept("-"):
            return Node("negate", "", (self.function_argument(),))
        argument = self.factor()
        while self.begins_factor() and self.kind != "number" and not self.begins_function():
            argument = Node("multiply", "", (argument, self.factor()))
        return argument

    def begins_function(self) -> bool:
        piece = self.peek()
        return (self.kind == "word" and piece not in BARE_WORDS) or piece[1:] in FUNCTIONS or piece == "("

    def binomial(self) -> Node:
        return Node("function", "binomial", (self.argument(), self.argument()))

    def rounded(self, name: str, closing: str) -> Node:
        inner = self.sum()
        self.expect(closing)
        return Node("function", name, (inner,))


_ATOMS: dict[str, Callable[[_Parser], Node]] = {
    "frac": _Parser.fraction,
    "sqrt": _Parser.root,
    "binom": _Parser.binomial,
    "pi": lambda parser: Node("constant", "pi"),
    "infty": lambda parser: Node("constant", "inf"),
    "lfloor": lambda parser: parser.rounded("floor", r"\rfloor"),
    "lceil": lambda parser: parser.rounded("ceil", r"\rceil"),
    "bar": lambda parser: parser.accented("bar"),
    "hat": lambda parser: parser.accented("hat"),
    "vec": lambda parser: parser.accented("vec"),
    "tilde": lambda parser: parser.accented("tilde"),
}
