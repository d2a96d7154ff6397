"""One program and its tests, or what it prints: who is asked what, and what the answers amount to."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from grail_lightning.worlds.programs.guest import MAX_DEPTH, decode, encode
from grail_lightning.worlds.programs.outcome import ProgramOutcome, Status, Tests, Visit
from grail_lightning.worlds.programs.sandbox import EndedError, Sandbox

_MESSAGE_CHARACTERS = 300
_MAX_VISITS, _MAX_CHARACTERS = 1000, 1 << 20  # of a trace
_TRACE_BYTES = 1 << 20
_SHOWN_CHARACTERS = 200  # Of a wrong result.
_CALL_BYTES = 1 << 24  # Of the arguments in an assertion, which nobody but the row's author wrote.
_PRINTED_CHARACTERS = 4000  # As JSON at most 48,000 bytes.
_SAID: tuple[Status, ...] = ("failed", "syntax", "raised", "memory", "output", "timeout")  # By the guest itself.
_NANS = itertools.count()


class _Verdict(NamedTuple):
    status: Status
    message: str = ""
    line: int | None = None


def line_of(text: object) -> str:
    """Untrusted text as one line of printable characters, capped."""
    words = "".join(c if c.isprintable() else " " for c in str(text)[: 2 * _MESSAGE_CHARACTERS])
    return " ".join(words.split())[:_MESSAGE_CHARACTERS]


def _verdict(reply: dict[str, Any]) -> _Verdict:
    """The error that a reply tells."""
    status: Status = next((name for name in _SAID if name == reply.get("error")), "refused")
    kind = f"{reply.get('type')}: " if status == "raised" else ""
    line = reply.get("line")
    line = line if type(line) is int and 0 < line < 1 << 20 else None
    return _Verdict(status, line_of(f"{kind}{reply.get('message', '')}"), line)


def _visits(data: Any) -> list[Visit]:
    """A trace out of untrusted data; what is malformed ends it."""
    visits: list[Visit] = []
    with suppress(TypeError, ValueError):
        for line, event, names, value, depth in data:
            if type(line) is not int or type(depth) is not int or event not in ("line", "return", "raise"):
                break
            variables = tuple((str(name), str(text)) for name, text in names)
            visits.append(Visit(line, event, variables, None if value is None else str(value), depth))
    return visits


def canonical(data: Any, depth: int = 0, *, hashed: bool = False) -> str:
    """The literal that JSON data stand for, as a text that equal ones share; ValueError if they stand for none.

    Equal is what Python's ``==`` calls so: ``True``, ``1`` and ``1.0``, or a set and a frozenset. The time grows with
    the length of the data alone, whereas a set of ``n`` numbers with one hash takes ``n²`` steps to make. With `hashed`
    it must be a literal that has a hash.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"data nested deeper than {MAX_DEPTH}")
    if isinstance(data, (int, float)):
        return _number(data)
    if data is None or isinstance(data, str):
        return repr(data)
    ((key, items),) = data.items() if isinstance(data, dict) else [("", data)]
    if key == "c":
        value: complex = decode(data)
        return _number(value.real) if value.imag == 0 else f"{_number(value.real)} + {_number(value.imag)}j"
    if key in ("i", "u"):
        return canonical(decode(data), depth)
    if key not in ("", "t", "s", "f", "d") or not isinstance(items, list) or (hashed and key not in ("t", "f")):
        raise ValueError("data that stand for no literal, or for none that has a hash")
    if key == "d":
        pairs = ((canonical(k, depth + 1, hashed=True), canonical(v, depth + 1)) for k, v in map(tuple, items))
        return "{:" + ", ".join(map(": ".join, sorted(dict(pairs).items()))) + "}"
    texts = [canonical(item, depth + 1, hashed=hashed or key in ("s", "f")) for item in items]
    begin, end = {"": ("[", "]"), "t": ("(", ")")}.get(key, ("{", "}"))
    return f"{begin}{', '.join(sorted(set(texts)) if begin == '{' else texts)}{end}"


def _number(value: float) -> str:
    """A number as a text that equal ones share, of whatever type; one that is not a number equals none."""
    if value != value:
        return f"nan {next(_NANS)}"
    return hex(int(value)) if isinstance(value, int) or value.is_integer() else value.hex()


def _beginning(data: Any, counter: Iterator[int]) -> Any:
    """Data of a literal with as many members as `counter` counts, so few that making it costs nothing."""
    if not isinstance(data, dict):
        return [_beginning(item, counter) for item, _ in zip(data, counter)] if isinstance(data, list) else data  # noqa: B905
    ((key, items),) = data.items()
    if key == "d":
        return {key: [[_beginning(k, counter), _beginning(v, counter)] for (k, v), _ in zip(items, counter)]}  # noqa: B905
    return data if key in ("c", "i", "u") else {key: _beginning(items, counter)}


def _of_call(reply: dict[str, Any], expected: object) -> _Verdict:
    if "ok" not in reply:
        return _verdict(reply)
    try:
        if canonical(reply["ok"]) == canonical(encode(expected)):
            return _Verdict("passed")
    except (ValueError, TypeError):
        return _Verdict("refused", "a result that is no literal")
    try:
        # No member of a literal is shown by less than a character.
        result = decode(_beginning(reply["ok"], iter(range(_SHOWN_CHARACTERS))))
        return _Verdict("failed", line_of(f"got {result!r:.{_SHOWN_CHARACTERS}}, expected {expected!r:.100}"))
    except ValueError:  # Python shows no integers of so many digits
        return _Verdict("failed", "got another value, too long to show")


class _Run:
    """A program in the process of ``solver``, and the assertions of its tests in that of ``checker``."""

    def __init__(self, solver: Sandbox, checker: Sandbox, tests: Tests, trace: bool) -> None:
        self.solver, self.checker, self.tests = solver, checker, tests
        self.trace = trace
        self.visits: list[Visit] = []
        self.cut = False
        self._left = _MAX_CHARACTERS

    def verdicts(self, program: str, chosen: range) -> Iterator[_Verdict]:
        """Of each test, until the program cannot go on."""
        entry, calls = self.tests.entry, self.tests.calls
        reply = self.solver.begin({"role": "solve", "program": program, "entry": entry})
        if "ok" not in reply:
            yield _verdict(reply)
            return
        if chosen.stop > len(calls):
            reply = self.checker.begin({"role": "check", "entry": entry, "preamble": self.tests.preamble})
            if "ok" not in reply:
                yield _Verdict("refused", f"the preamble of the tests does not run: {_verdict(reply).message}")
                return
        for index in chosen:
            if index < len(calls):
                yield _of_call(self._ask(encode(calls[index].arguments)), calls[index].result)
            else:
                yield self._of_assertion(self.tests.assertions[index - len(calls)])

    def _ask(self, arguments: Any, keywords: Any = None) -> dict[str, Any]:
        message = {"arguments": arguments, "keywords": keywords or {"d": []}, "trace": self.trace}
        message["in_place"] = in_place = keywords is not None  # Assertions see what a program does to its arguments.
        more = in_place * len(json.dumps(arguments))
        reply = self.solver.ask(message, more + self.trace * _TRACE_BYTES)
        visits, full = _visits(reply.pop("trace", None)), reply.pop("full", False) is True
        if len(json.dumps(reply)) > self.solver.cap + more:  # A trace may be longer, and what is decoded may not.
            raise EndedError("output", f"a reply of more than {self.solver.cap + more} bytes")
        # Of each text also what Python needs to hold it.
        self._left -= sum(len(t) + 8 for v in visits for pair in (*v.variables, (v.value or "",)) for t in pair)
        self.visits += visits if self._left > 0 else []
        self.cut |= full or reply.get("error") == "timeout" or self._left <= 0 or len(self.visits) > _MAX_VISITS
        del self.visits[_MAX_VISITS:]  # of all calls together
        return reply

    def _of_assertion(self, assertion: str) -> _Verdict:
        answer: dict[str, Any] = {}
        reply = self.checker.ask({"assertion": assertion}, _CALL_BYTES)
        while "call" in reply:
            answer = self._ask(reply["call"], reply["keywords"])
            reply = self.checker.ask(answer, _CALL_BYTES)
        if "ok" in reply:
            return _Verdict("passed")
        # An error of the program's that the assertion has caught is not to blame.
        return _verdict(answer) if reply.get("of_entry") else _Verdict("failed", _verdict(reply).message)


def grade(solver: Sandbox, checker: Sandbox, program: str, tests: Tests, trace: int | None = None) -> ProgramOutcome:
    """Run a program on its tests, or on the one that is to be traced; LostError if a sandbox was lost.

    What is expected is compared here, or by the assertions in the process of ``checker``; the program's own process
    gets the arguments alone.
    """
    chosen = range(len(tests)) if trace is None else range(trace, trace + 1)
    run = _Run(solver, checker, tests, trace is not None)
    verdicts: list[_Verdict] = []
    certain = True
    try:
        for verdict in run.verdicts(program, chosen):
            verdicts.append(verdict)  # noqa: PERF402 (those before an error stay)
    except EndedError as ended:
        verdicts.append(_Verdict(ended.status, line_of(ended)))
        run.cut, certain = True, ended.certain
    finally:
        solver.end()
        checker.end()
    passed = tuple(verdict.status == "passed" for verdict in verdicts) + (False,) * (len(chosen) - len(verdicts))
    first = next((verdict for verdict in verdicts if verdict.status != "passed"), _Verdict("passed"))
    failing = None if all(passed) else passed.index(False)
    visits = None if trace is None else (*run.visits,)
    return ProgramOutcome(first.status, passed, failing, first.line, first.message, visits, run.cut, certain)


def printed(sandbox: Sandbox, program: str) -> str:
    """What a program prints, and the end of its traceback; untrusted text of at most 8,000 characters.

    Of a program that exceeds a limit or ends its process nothing is told but that. LostError if the sandbox was lost.
    """
    try:
        reply = sandbox.begin({"role": "script", "program": program, "output": _PRINTED_CHARACTERS})
    except EndedError as ended:
        return f"Error: {ended.status}: {line_of(ended)}"
    finally:
        sandbox.end()
    text = reply.get("ok")
    return text[: 2 * _PRINTED_CHARACTERS] if isinstance(text, str) else f"Error: {line_of(reply.get('message'))}"
