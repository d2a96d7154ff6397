"""The records of running a program: its limits, its tests, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Status = Literal["passed", "failed", "syntax", "raised", "timeout", "memory", "output", "crashed", "refused"]


@dataclass(frozen=True)
class ProgramLimits:
    """The limits of one program with all of its tests.

    Attributes:
        seconds: Processor time in seconds.
        memory_mb: Memory in MB.
        output_kb: What it may print, in KB.
    """

    seconds: float = 2.0
    memory_mb: int = 256
    output_kb: int = 64


@dataclass(frozen=True)
class TestCall:
    """One test: ``entry(*arguments) == result``, literals."""

    __test__ = False  # pytest does not collect it.

    arguments: tuple[object, ...]
    result: object


@dataclass(frozen=True)
class Tests:
    """The tests of a program: calls of its entry, or assertions."""

    __test__ = False  # pytest does not collect it.

    entry: str = ""
    calls: tuple[TestCall, ...] = ()
    assertions: tuple[str, ...] = ()  # Each a statement, as in HumanEval and MBPP.
    preamble: str = ""  # Imports and helpers that run with the assertions.

    def __len__(self) -> int:
        return len(self.calls) + len(self.assertions)


class Job(NamedTuple):
    """A program to run on its tests, or on one of them with its trace."""

    program: str
    tests: Tests
    trace: int | None = None  # The number of the test, from 0.


@dataclass(frozen=True)
class Visit:
    """An entry of a trace."""

    line: int  # The first line of the statement that is executed, from 1.
    event: Literal["line", "return", "raise"]
    variables: tuple[tuple[str, str], ...]  # The local names with their values in canonical form, capped and sorted.
    value: str | None  # What was returned or raised.
    depth: int  # Of calls: 1 for the statements of the function that the test calls.


@dataclass(frozen=True)
class ProgramOutcome:
    """What became of a program."""

    status: Status
    passed: tuple[bool, ...]  # One for each test.
    failing: int | None  # The first test that did not pass.
    line: int | None  # The line of the program that a syntax error or traceback names.
    message: str  # Capped, one line.
    trace: tuple[Visit, ...] | None
    cut: bool = False  # Whether the trace ends before the run does.
    certain: bool = True  # False if the machine may be to blame: another run may end otherwise.

    @property
    def share(self) -> float:
        """The share of tests that passed."""
        return sum(self.passed) / len(self.passed) if self.passed else 0.0
