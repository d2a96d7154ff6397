"""One program and its tests: who is asked what, and what the answers amount to."""

from __future__ import annotations

from typing import Any, Protocol

from grail_lightning.programs.guest import decode, encode
from grail_lightning.programs.outcome import Outcome, Status, Tests, Visit
from grail_lightning.programs.sandbox import EndedError

_MESSAGE_CHARACTERS = 300
_STATUS: dict[object, Status] = {name: name for name in ("syntax", "raised", "memory", "output")}
_STATUS["trace"] = "timeout"


class Process(Protocol):
    """A process that holds a program, or assertions: `Sandbox`."""

    def begin(self, message: dict[str, Any]) -> dict[str, Any]:
        """Its first reply to its role."""

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Its reply; EndedError if there is none."""

    def end(self) -> None:
        """Let it go."""

    def close(self) -> None:
        """End all that is left of it."""


def line_of(text: object) -> str:
    """Untrusted text as one line of printable characters, capped."""
    words = "".join(c if c.isprintable() else " " for c in str(text)[: 2 * _MESSAGE_CHARACTERS])
    return " ".join(words.split())[:_MESSAGE_CHARACTERS]


class _Verdicts:
    """Collects what became of each test."""

    def __init__(self, num_tests: int) -> None:
        self.num_tests = num_tests
        self.passed: list[bool] = []
        self.first: tuple[Status, int | None, str] | None = None
        self.trace: tuple[Visit, ...] | None = None

    def add(self, passed: bool, status: Status = "failed", line: int | None = None, message: str = "") -> None:
        """The verdict on the next test."""
        self.passed.append(passed)
        if not passed and self.first is None:
            self.first = (status, line, message)

    def add_reply(self, reply: dict[str, Any]) -> None:
        """The next test did not pass, for the error that a reply tells."""
        status = _STATUS.get(reply.get("error"), "failed" if reply.get("error") == "value" else "refused")
        line = reply.get("line")
        kind = f"{reply['type']}: " if status == "raised" and "type" in reply else ""
        message = line_of(f"{kind}{reply.get('message', '')}")
        self.add(False, status, line if type(line) is int and 0 < line < 1 << 20 else None, message)

    def outcome(self) -> Outcome:
        """With the tests that were not reached as failed."""
        passed = (*self.passed, *[False] * (self.num_tests - len(self.passed)))
        status, line, message = self.first or ("passed", None, "")
        return Outcome(status, passed, None if all(passed) else passed.index(False), line, message, self.trace)


def _visits(data: object) -> tuple[Visit, ...]:
    """A trace out of untrusted data; what is malformed ends it."""
    visits: list[Visit] = []
    for item in data if isinstance(data, list) else []:
        try:
            line, event, names, value = item
            variables = tuple((str(name), str(held)) for name, held in names)
        except (TypeError, ValueError):
            break
        if type(line) is not int or event not in ("line", "return", "raise"):
            break
        visits.append(Visit(line, event, variables, None if value is None else str(value)))
    return tuple(visits)


def _equal(result: object, expected: object) -> bool:
    try:
        return bool(result == expected)
    except RecursionError:
        return False


def _calls(solver: Process, tests: Tests, chosen: range, trace: bool, verdicts: _Verdicts) -> None:
    for index in chosen:
        call = tests.calls[index]
        reply = solver.ask({"arguments": encode(call.arguments), "trace": trace})
        if trace:
            verdicts.trace = _visits(reply.get("trace"))
        if "ok" not in reply:
            verdicts.add_reply(reply)
            continue
        try:
            result = decode(reply["ok"])
        except (ValueError, RecursionError):
            verdicts.add(False, "refused", None, "a result that is no literal")
            continue
        equal = _equal(result, call.result)
        verdicts.add(equal, message="" if equal else line_of(f"got {result!r:.200}, expected {call.result!r:.100}"))


def _assertions(
    solver: Process, checker: Process, tests: Tests, chosen: range, trace: bool, verdicts: _Verdicts
) -> None:
    reply = checker.begin({"role": "check", "entry": tests.entry, "preamble": tests.preamble})
    if "ok" not in reply:
        raise ValueError(f"`preamble` of the tests does not run: {line_of(reply.get('message', ''))}")
    for index in chosen:
        answer: dict[str, Any] | None = None
        reply = checker.ask({"assertion": tests.assertions[index]})
        while "call" in reply:
            answer = solver.ask(
                {"arguments": reply["call"], "keywords": reply.get("keywords", {"d": []}), "trace": trace}
            )
            if trace:
                verdicts.trace = (verdicts.trace or ()) + _visits(answer.pop("trace", None))
            reply = checker.ask(answer)
        if "ok" in reply:
            verdicts.add(True)
        elif answer is not None and "error" in answer:
            verdicts.add_reply(answer)
        else:
            verdicts.add(False, message=line_of(f"{reply.get('type', '')}: {reply.get('message', '')}".strip(": ")))


def grade(solver: Process, checker: Process, program: str, tests: Tests, trace: int | None) -> Outcome:
    """Run a program on its tests, or on the one that is to be traced.

    What is expected is compared here, or by the assertions in the process of ``checker``; the program's own process
    gets the arguments alone.

    Raises:
        ValueError: The tests themselves do not run.
    """
    num_tests = len(tests.calls) + len(tests.assertions)
    chosen = range(num_tests) if trace is None else range(trace, trace + 1)
    verdicts = _Verdicts(len(chosen))
    calls = range(min(chosen.start, len(tests.calls)), min(chosen.stop, len(tests.calls)))
    assertions = range(max(0, chosen.start - len(tests.calls)), max(0, chosen.stop - len(tests.calls)))
    try:
        reply = solver.begin({"role": "solve", "program": program, "entry": tests.entry})
        if "ok" not in reply:
            verdicts.add_reply(reply)
        else:
            _calls(solver, tests, calls, trace is not None, verdicts)
            if assertions:
                _assertions(solver, checker, tests, assertions, trace is not None, verdicts)
                checker.end()
        solver.end()
    except EndedError as ended:
        verdicts.add(False, ended.status, None, line_of(ended))
        checker.close()  # in the middle of an assertion, maybe
    return verdicts.outcome()
