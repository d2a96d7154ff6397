"""What the rows of the task of programs say: rows of one's own, HumanEval's and MBPP's. Nothing of them is run."""

from __future__ import annotations

import ast
import builtins
import keyword
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from grail_lightning.worlds.programs.divergence import bound_names
from grail_lightning.worlds.programs.guest import encode
from grail_lightning.worlds.programs.outcome import TestCall, Tests

# Columns of datasets whose tests are what a program reads from standard input and what it has to print.
_OF_PROGRAMS = {
    **dict.fromkeys(["public_test_cases", "private_test_cases"], "LiveCodeBench"),
    **dict.fromkeys(["public_tests", "private_tests", "generated_tests"], "CodeContests"),
    **{"input_output": "APPS and TACO", "official_tests": "Codeforces"},
}


class CodeProblem(NamedTuple):
    """What a row says."""

    text: str
    tests: Tests
    reference: str  # A right program; empty if the row has none.


def read_problem(row: Mapping[str, Any]) -> CodeProblem:
    """What a row says, in one of the three forms; a ValueError if it has another one. Nothing of it is run here."""
    if row.get("test") is not None and "entry_point" in row:
        return _human_eval(row)
    if row.get("test_list") is not None:
        if row.get("test"):
            raise ValueError(
                "The tests of the column `test`, as in MBPP+, cannot be read beside `test_list`. Leave the column out "
                "to take those of `test_list` alone, which are MBPP's."
            )
        text, code = _text(row, "text") or _text(row, "prompt"), _text(row, "code")
        imports = _listed(row, "test_imports") if row.get("test_imports") else ()
        setup = "\n".join([*map(str, imports), _text(row, "test_setup_code")]).strip()
        return CodeProblem(text, _asserted(_listed(row, "test_list"), code, setup), code)
    if row.get("tests") is None:
        for column in filter(row.get, _OF_PROGRAMS):
            _refuse_pairs(column, row[column], _OF_PROGRAMS[column])
    if row.get("tests") is None or row.get("problem") is None:
        raise ValueError(
            "A row must have `problem` and `tests` (a list of [arguments, result], with `entry`, or of assertions), or "
            "the columns of HumanEval (`prompt`, `entry_point`, `test`) or MBPP (`text`, `test_list`), but got "
            f"{sorted(row)}."
        )
    tests, text, reference = _listed(row, "tests"), str(row["problem"]), _text(row, "reference")
    entry = _text(row, "entry")
    if all(isinstance(test, str) for test in tests):
        return CodeProblem(text, _asserted(tests, reference, _text(row, "setup"), entry), reference)
    if not _is_name(entry):
        raise ValueError(f"`entry` must name the function that `tests` call, but got {row.get('entry')!r}.")
    return CodeProblem(text, Tests(entry, tuple(map(_call, tests))), reference)


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str | None):
        raise ValueError(f"`{column}` must be text, but got {value!r:.80}.")
    return value if value and value.strip() else ""


def _listed(row: Mapping[str, Any], column: str) -> Sequence[Any]:
    """The tests of a column, a list or the text of one."""
    tests = row[column]
    if isinstance(tests, str):
        try:
            tests = ast.literal_eval(tests.strip())
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            if re.match(r"\s*(?:\[\s*)?\{", tests):  # JSON
                _refuse_pairs(column, tests)
            raise ValueError(f"`{column}` must be literals of Python, but got {tests!r:.80}.") from None
    if isinstance(tests, Mapping) or (isinstance(tests, list | tuple) and tests and isinstance(tests[0], Mapping)):
        _refuse_pairs(column, tests)
    if not isinstance(tests, list | tuple) or not tests:
        raise ValueError(f"`{column}` must be a list that is not empty, but got {tests!r:.80}.")
    return tests


def _refuse_pairs(column: str, tests: Any, dataset: str = "") -> None:
    """Refuse tests that are pairs of texts, `input` and `output`, as what they are; other ones pass."""
    text = tests if isinstance(tests, str) else repr(tests)[:10_000]
    calls = re.search(r"""["']testtype["']\s*:\s*["']functional""", text)
    if not dataset and not (
        re.search(r"""["']inputs?["']\s*:""", text) and re.search(r"""["']outputs?["']\s*:""", text)
    ):
        return
    those = f"the form of {dataset or 'LiveCodeBench and others'}"
    if calls:
        raise ValueError(
            f"`{column}` holds calls of a function as texts ({those}, `testtype: functional`). Write each as "
            "[arguments, result], such as [[[3, 1], 2], 4], into `tests`, and the function's name into `entry`."
        )
    raise ValueError(
        f"`{column}` holds tests of whole programs: what one reads from stdin and what it has to print ({those}, "
        "`testtype: stdin`). `CodeTask` calls a function and compares what it returns, and runs no such tests. Leave "
        "these rows out, or give `tests` as [arguments, result] with `entry`."
    )


def _call(test: Any) -> TestCall:
    if not isinstance(test, list | tuple) or len(test) != 2 or not isinstance(test[0], list | tuple):
        raise ValueError(f"A test must be [arguments, result], such as [[[3, 1], 2], 4], but got {test!r:.80}.")
    try:
        encode(test)
    except TypeError as error:
        raise ValueError(f"A test must hold literals of Python, but {error}: {test!r:.80}.") from None
    return TestCall(tuple(test[0]), test[1])


def _human_eval(row: Mapping[str, Any]) -> CodeProblem:
    """A row of HumanEval. If `check(candidate)` holds nothing but assertions, each that calls it becomes a test."""
    entry, text, solution = (_text(row, column) for column in ("entry_point", "prompt", "canonical_solution"))
    tree = _parsed(row["test"], "test")
    check = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"), None)
    if check is None or not check.args.args or not text or not _is_name(entry):
        raise ValueError(
            "A row of HumanEval must have `prompt`, the name of a function as `entry_point`, and `check(candidate)` in "
            f"`test`, but got {entry!r} and {row['test']!r:.80}."
        )
    assertions: tuple[str, ...] = (f"check({entry})",)
    # A call of `check`, in a file that can be run by itself, is the test.
    nodes = [node for node in tree.body if not (isinstance(node, ast.Expr) and _reads(node, "check"))]
    if all(isinstance(node, ast.Assert) for node in check.body):
        for node in ast.walk(check):
            if isinstance(node, ast.Name) and node.id == check.args.args[0].arg:
                node.id = entry
        calling = [node for node in check.body if _reads(node, entry)]
        if calling:
            assertions, nodes = tuple(map(ast.unparse, calling)), [node for node in nodes if node is not check]
    helpers = [node for node in _parsed(text, "prompt").body if getattr(node, "name", "") != entry]
    preamble = "\n".join(map(ast.unparse, [*helpers, *nodes]))  # Some tests call what the prompt defines.
    return CodeProblem(text, Tests(entry, (), assertions, preamble), text + solution if solution else "")


def _asserted(tests: Sequence[Any], reference: str, preamble: str, entry: str = "") -> Tests:
    """Assertions as tests of the function that they call: one of the reference, or the first that is no built-in."""
    trees, setup = [_parsed(test, "an assertion") for test in tests], _parsed(preamble, "setup")
    helpers = {node.name: node for node in setup.body if isinstance(node, ast.FunctionDef)}
    asserting = [name for name, node in helpers.items() if _asserts(node)]
    for test, tree in zip(tests, trees, strict=True):
        # `f(1) == 2` alone would be passed by every program.
        if len(tree.body) != 1 or not (_asserts(tree) or _reads(tree, *asserting)):
            raise ValueError(f"Tests must be assertions, one statement each, but got {test!r:.80}.")
    if not entry:
        defined = {node.name for node in _parsed(reference, "code").body if isinstance(node, ast.FunctionDef)}
        calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
        called = [*(call.func for call in calls), *(handed for call in calls for handed in call.args)]  # check(f, 1)
        names = [name.id for name in called if isinstance(name, ast.Name)]
        taken = {*vars(builtins), *bound_names(setup)}
        free_names = [name for name in names if name not in taken]
        entry = next((name for name in names if name in defined), free_names[0] if free_names else "")
    idle = next((test for test, tree in zip(tests, trees, strict=True) if not _reads(tree, entry, *helpers)), None)
    if idle is not None:
        raise ValueError(f"Each test must call the same function ({entry or 'none was found'}), but got {idle!r:.80}.")
    return Tests(entry, (), tuple(tests), preamble)


def _asserts(tree: ast.AST) -> bool:
    """Whether something can fail; an assertion of a tuple never does."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Assert | ast.Raise)]
    return any(not (isinstance(node, ast.Assert) and isinstance(node.test, ast.Tuple)) for node in nodes)


def _is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)


def _reads(tree: ast.AST, *names: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id in (*names, "candidate") for node in ast.walk(tree))


def _parsed(text: Any, what: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Such as that of an invalid escape.
            tree: ast.Module = ast.parse(text)
            return tree
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"`{what}` must be Python, but got {text!r:.80} ({error}).") from None
