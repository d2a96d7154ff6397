"""Statements of programs, which of two programs correspond, where two runs first differ, and repairs by lines.

Programs are text from a model: they are parsed, never compiled or run here. Numbers of statements count from 0 in the
order of the text.
"""

from __future__ import annotations

import ast
import re
import warnings
from bisect import bisect_right
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import takewhile
from typing import Any, NamedTuple

from grail_lightning.worlds.programs.outcome import Visit

# Python's parser refuses deep brackets and indentation itself; what else is deep (1+1+…) is as long as it is deep.
MAX_CHARACTERS = 10_000
_MOST_LINES = 100
MOST_EDITS = 5  # Lines. Any of them may be needed together: 31 repairs.
_REFUSED = (SyntaxError, ValueError, LookupError, RecursionError, MemoryError, OverflowError)
_BODIES = ("body", "handlers", "orelse", "finalbody", "cases")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# One is a common slip for the other: they correspond, as statements of one kind do.
_KINDS = {"AugAssign": "Assign", "Break": "Jump", "Continue": "Jump", "Pass": "Jump"}
_SCOPES = (*_FUNCTIONS, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_TO_COLON = re.compile(r"(?:#[^\r\n]*(?=[\r\n])|[^:#])*:")  # A comment goes to the end of its line: one way to match.
_NEW_LINE = re.compile(r"\r\n|\r|\n")  # Not `str.splitlines`, which knows more of them than Python does.
_LINE = re.compile(r"\S(?:[^\r\n]*\S)?")  # Without the space around.


class Statement(NamedTuple):
    """A statement, an `except` or a `case`; of a compound one the header, since its body has its own statements."""

    start: int  # The range of its characters, decorators included.
    stop: int
    # How deep it is, the part of the statement around it (body, orelse, …), and its kind, one for all assignments, and
    # one for `break`, `continue` and `pass`.
    shape: tuple[int, str, str]
    function: int  # The number of the function's statement around it; −1 outside of functions.


@dataclass(frozen=True, slots=True)
class Program:
    """A program that can be parsed. Docstrings and other constants are no statements, since they do nothing."""

    statements: tuple[Statement, ...]
    # For each function, by the number of its statement: its local names, and names by the order of first binding.
    names: Mapping[int, Mapping[str, str]]
    plain: str  # The same program in Python's own format, in which each statement begins on a line of its own.
    at_line: Mapping[int, int]  # For the lines of `plain`, from 1: the number of the statement.


@lru_cache(maxsize=512)
def read_program(text: str) -> Program | None:
    """The statements of a program; None if it cannot be parsed or has more than `MAX_CHARACTERS`."""
    if len(text) > MAX_CHARACTERS:
        return None
    with suppress(*_REFUSED), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Such as that of an invalid escape.
        tree = ast.parse(text)
        plain = ast.unparse(tree)
        if len(plain) > 4 * MAX_CHARACTERS:  # `a;a;a` deep inside of blocks.
            return None
        places, plain_places = _Places(text), _Places(plain)
        at_line: dict[int, int] = {}
        for number, (node, *_) in enumerate(_walk(ast.parse(plain))):
            first, last = (plain_places.line(character) for character in plain_places.of_statement(node))
            at_line |= dict.fromkeys(range(first, last + 1), number)
        statements, names = [], dict[int, ChainMap[str, str]]()
        for number, (node, depth, part, function) in enumerate(_walk(tree)):
            if isinstance(node, _FUNCTIONS):
                names[number] = ChainMap(_local_names(node, depth), names.get(function, {}))  # No copy of those around.
            # `x += 1` and `x: int = 1` are assignments; `x: int` is not, and runs nothing in a function.
            assigns = isinstance(node, ast.AnnAssign) and node.value is not None
            kind = "Assign" if assigns else _KINDS.get(type(node).__name__, type(node).__name__)
            statements.append(Statement(*places.of_statement(node), (depth, part, kind), function))
        return Program(tuple(statements), names, plain, at_line)
    return None


def _walk(tree: ast.Module) -> Iterator[tuple[ast.AST, int, str, int]]:
    """Statements in order with their depth, the part of their parent, and the number of the function around them."""
    number = -1
    pending: list[tuple[ast.AST, int, str, int]] = [(node, 0, "body", -1) for node in reversed(tree.body)]
    while pending:
        node, depth, part, function = pending.pop()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        number += 1
        yield node, depth, part, function
        around = number if isinstance(node, _FUNCTIONS) else function
        for name in reversed(_BODIES):
            pending += [(child, depth + 1, name, around) for child in reversed(getattr(node, name, []))]


def _header(node: ast.AST) -> Iterator[Any]:
    """The nodes of a statement without those of the statements in it."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if name not in _BODIES and isinstance(child, ast.AST):
                yield from ast.walk(child)


def bound_names(tree: ast.AST) -> list[str]:
    """The names that a program, or a function, binds, by the order of first binding in the text."""
    bound = [(node.lineno, node.col_offset, name) for node in _own_nodes(tree) for name in _binds(node)]  # type: ignore[attr-defined]
    return [*dict.fromkeys(name for *_, name in sorted(bound))]


def _local_names(function: ast.AST, depth: int) -> dict[str, str]:
    """For each local name of a function that can hold data: a name by the order of first binding."""
    nodes = [*_own_nodes(function)]
    others = {name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for name in _binds(node)}
    others |= {name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    names = [name for name in bound_names(function) if name not in others]
    return {name: f"v{depth}.{k}" for k, name in enumerate(names)}


def _own_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes whose bindings are the tree's own, not those of functions, classes and comprehensions in it."""
    pending = [*ast.iter_child_nodes(tree)]
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, _SCOPES):
            pending += ast.iter_child_nodes(node)


def _binds(node: ast.AST) -> list[str]:
    """The names that a node binds by itself."""
    match node:
        case ast.Import() | ast.ImportFrom():
            return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.MatchMapping(rest=str(name)):
            return [name]
    node_name: object = getattr(node, "name", None)  # Of a function, a class, an exception or a pattern.
    return [node_name] if isinstance(node_name, str) and hasattr(node, "lineno") else []


class _Places:
    """The characters of positions in a syntax tree, whose columns count UTF-8 bytes."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.starts = [0, *(match.end() for match in _NEW_LINE.finditer(text))]

    def line(self, character: int) -> int:
        """The line of a character, from 1."""
        return bisect_right(self.starts, character)

    def of_statement(self, node: ast.AST) -> tuple[int, int]:
        """The range of the characters of a statement, of a compound one up to the colon before its body."""
        parts = [part for part in _header(node) if hasattr(part, "end_lineno")]
        start = min(self._character(p.lineno, p.col_offset) for p in [*parts, node] if hasattr(p, "lineno"))
        if decorators := getattr(node, "decorator_list", None):
            start = self._text.rindex("@", 0, self._character(decorators[0].lineno, decorators[0].col_offset))
        elif isinstance(node, ast.match_case):
            start = self._text.rindex("case", 0, start)
        if not any(hasattr(node, name) for name in _BODIES):
            return start, self._character(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
        last = max((self._character(p.end_lineno, p.end_col_offset) for p in parts), default=start)
        colon = _TO_COLON.match(self._text, last)
        return start, colon.end() if colon else last

    def _character(self, line: int, column: int) -> int:
        start = self.starts[line - 1]  # A character has at least one byte.
        return start + len(self._text[start : start + column].encode()[:column].decode())


def align_programs(program: Program, reference: Program) -> dict[int, int] | None:
    """Which statement of a reference corresponds to one of a program; None if the two cannot be compared.

    Programs of one shape correspond statement by statement, others in their longest common beginning. If this is less
    than half of the longer one, they cannot be compared. Imports of the module are left out.
    """
    program_numbers, reference_numbers = _counted(program), _counted(reference)
    same = [
        program.statements[a].shape == reference.statements[b].shape
        for a, b in zip(program_numbers, reference_numbers, strict=False)
    ]
    common = len([*takewhile(bool, same)])
    if common == 0 or 2 * common < max(len(program_numbers), len(reference_numbers)):
        return None
    return dict(zip(program_numbers[:common], reference_numbers[:common], strict=True))


def _counted(program: Program) -> list[int]:
    shapes = [statement.shape for statement in program.statements]
    return [k for k, (depth, _, kind) in enumerate(shapes) if depth or kind not in ("Import", "ImportFrom")]


def first_divergence(
    program: Program, trace: Sequence[Visit], reference: Program, expected: Sequence[Visit], pairs: Mapping[int, int]
) -> int | None:
    """The number of the statement after which a run departs from that of the reference on the same test.

    Traces are those of the programs' `plain` texts; a visit of a line shows the variables before the line is executed.
    If variables differ, the statement that the same call executed last is to blame, or the calling one; if what is
    returned or raised differs, the statement that does so. If the statements that are executed differ, it is the last
    common one, which went another way; or the one without a counterpart, if the reference has none there either, or if
    the last common one went the same way in both, as before a `return` too early.

    None if the traces do not differ as far as they go. What is executed outside of functions is not compared.
    """
    visits, theirs = _in_functions(program, trace), _in_functions(reference, expected)
    paired, last, before, depth = {*pairs.values()}, None, 0, 0
    active: list[tuple[int, int]] = []  # For each active call its depth, and the statement that it executed last.
    for (here, visit), (there, expected_visit) in zip(visits, theirs, strict=False):
        if pairs.get(here) != there:
            if last is None:
                return here
            # A call of what has no counterpart is the caller's choice.
            same_way = visit.depth <= depth and _way(program, last, here) == _way(reference, before, there)
            return here if here not in pairs and (there not in paired or same_way) else last
        if (visit.event, visit.value) != (expected_visit.event, expected_visit.value):
            return here
        while active and active[-1][0] > visit.depth:
            active.pop()
        if _variables(program, here, visit) != _variables(reference, there, expected_visit):
            return active[-1][1] if visit.event == "line" and active else here
        if active and active[-1][0] == visit.depth:
            active.pop()
        if visit.event != "return":
            active.append((visit.depth, here))
        last, before, depth = here, there, visit.depth
    return None


def _way(program: Program, number: int, then: int) -> str:
    """The part of a compound statement that is entered with the one that is executed next; empty if none is."""
    deep = program.statements[number].shape[0]
    inside = then > number and all(s.shape[0] > deep for s in program.statements[number + 1 : then + 1])
    return program.statements[then].shape[1] if inside else ""


def _in_functions(program: Program, trace: Sequence[Visit]) -> list[tuple[int, Visit]]:
    """The visits of statements in functions, with their numbers."""
    numbered = ((program.at_line.get(visit.line, -1), visit) for visit in trace)
    return [(k, visit) for k, visit in numbered if k >= 0 and program.statements[k].function >= 0]


def _variables(program: Program, number: int, visit: Visit) -> dict[str, str]:
    """What the local names hold, but for what is imported, by names that do not depend on the author's."""
    names = program.names.get(program.statements[number].function, {})
    return {names[name]: value for name, value in visit.variables if name in names}


class ProgramLine(NamedTuple):
    """A line that is not blank: its number, from 1, its indentation, its text, and where this begins in the program."""

    number: int
    indent: str
    text: str
    start: int


class Edit(NamedTuple):
    """The lines ``start`` to ``stop`` of a program, and those that the reference has there; either may be none."""

    start: int
    stop: int
    reference_start: int
    reference_stop: int


def program_lines(program: str) -> list[ProgramLine]:
    """The lines that are not blank."""
    places, lines = _Places(program), []
    for line in _LINE.finditer(program):
        number = places.line(line.start())
        lines.append(ProgramLine(number, program[places.starts[number - 1] : line.start()], line[0], line.start()))
    return lines


def edits(lines: Sequence[ProgramLine], reference: Sequence[ProgramLine]) -> list[Edit] | None:
    """The places at which a program differs from a reference other than in blanks; None if there are too many."""
    if max(len(lines), len(reference)) > _MOST_LINES:
        return None
    keys, reference_keys = (
        [(len(x.indent.expandtabs(4)), "".join(x.text.split())) for x in both] for both in (lines, reference)
    )
    places = []
    for tag, a, b, c, d in SequenceMatcher(None, keys, reference_keys, autojunk=False).get_opcodes():
        if tag == "replace" and b - a == d - c:  # Line by line.
            places += [Edit(a + k, a + k + 1, c + k, c + k + 1) for k in range(b - a)]
        elif tag != "equal":
            places.append(Edit(a, b, c, d))
    lines_of = [max(edit.stop - edit.start, edit.reference_stop - edit.reference_start) for edit in places]
    return places if sum(lines_of) <= MOST_EDITS else None


def repaired(lines: Sequence[ProgramLine], reference: Sequence[ProgramLine], chosen: Sequence[Edit]) -> str:
    """The program after some edits, which must be in the order of its lines."""
    result, at = list[ProgramLine](), 0
    for edit in chosen:
        result += [*lines[at : edit.start], *reference[edit.reference_start : edit.reference_stop]]
        at = edit.stop
    return "\n".join(line.indent + line.text for line in [*result, *lines[at:]])
