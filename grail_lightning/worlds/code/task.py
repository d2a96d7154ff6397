"""The task of writing programs, which are run on tests: rows of one's own, HumanEval's and MBPP's."""

from __future__ import annotations

import random
import re
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

from grail_lightning.answers.find import AnswerForm, Fenced
from grail_lightning.answers.records import AnswerSpan, Verdict
from grail_lightning.core.records.task import GradedAnswer, Prompt, Step
from grail_lightning.core.tasks.answered import MathTask
from grail_lightning.core.tasks.rewards import Rewards, Values
from grail_lightning.worlds.code.rows import CodeProblem, read_problem
from grail_lightning.worlds.programs.divergence import Edit, ProgramLine, edits, program_lines, read_program, repaired
from grail_lightning.worlds.programs.executor import Executor
from grail_lightning.worlds.programs.isolation import Isolation
from grail_lightning.worlds.programs.outcome import Job, ProgramLimits, ProgramOutcome, Tests

_CHECKED = 200  # Reference programs that are run before training, in some three seconds.
_PASSED = "tests_passed"  # The column with the share of its tests that a program passed; rewards can ask for it.


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramVerdict(Verdict):
    """The verdict on a program, whose `layer` is the status of its outcome."""

    outcome: ProgramOutcome


class CodeTask(MathTask):
    """Programs that are run on tests in a sandbox. A program is right if it passes all of them.

    A row has `problem`, `entry` (the function's name) and `tests`: a list of ``[arguments, result]``, such as
    ``[[[3, 1], 2], 4]`` for ``f([3, 1], 2) == 4``, or of assertions; a text is read as Python's literals, which have
    tuples and sets. `reference` is a right program, if there is one, and `setup` what assertions need. Rows of
    HumanEval and MBPP are read as they are.

    Args:
        instruction: The text behind the problem, including its leading space; default that of the answer's form.
        system_prompt: The text of a system turn before the user turn; none by default.
        rewards: The weighted rewards of a response; default 1 for a program that passes all tests, else 0. The reward
            `tests_passed` is the share of tests that it passes.
        answer: Where a response has its program: `Fenced` (default: the last block between lines of three backticks)
            or `Marker` with `to_end`.
        explained: The part of a program that counts as the answer for credit methods such as GRAIL: its last `return`
            statement (the whole program where it has none), or the whole program.
        shown_tests: The number of assertions in the prompt, where the problem does not name the function as code.
        isolation: How programs are isolated: `Bubblewrap`, `Sandlock`, `Server` with its `url`, or a class of your own.
            Default the first of the first two that isolates on this machine.
        limits: The limits of one program with all of its tests.
        workers: The number of programs that run side by side.
    """

    optional_columns = ("problem", "answer")
    reads_columns = True

    def __init__(
        self,
        instruction: str | None = None,
        system_prompt: str | None = None,
        rewards: Rewards | None = None,
        answer: AnswerForm | None = None,
        explained: Literal["return", "program"] = "return",
        shown_tests: int = 1,
        isolation: Isolation | None = None,
        limits: ProgramLimits = ProgramLimits(),  # noqa: B008  (frozen)
        workers: int = 2,
    ) -> None:
        super().__init__(instruction, system_prompt, rewards, answer or Fenced(), "exact")
        if explained not in ("return", "program"):
            raise ValueError(f"`explained` must be one of return, program, but got {explained!r}.")
        if shown_tests < 0:
            raise ValueError(f"`shown_tests` must be 0 or more, but got {shown_tests}.")
        self.explained, self.shown_tests = explained, shown_tests
        self.executor = Executor(isolation, limits, workers)

    def check_columns(self, columns: Collection[str]) -> None:
        """Check that the data has the columns that the rewards ask for."""
        super().check_columns({*columns, _PASSED})

    def prompt(self, row: Mapping[str, Any]) -> Prompt:
        """The prompt of a row, whose reference is the reference program."""
        text, tests, reference = read_problem(row)
        listing = "\n".join(tests.assertions[: self.shown_tests])
        name = re.escape(tests.entry)  # Many a name, such as `count`, is also an English word.
        if listing and not re.search(rf"\b{name}\(|`{name}`", text):
            text += f"\n\nThe program has to pass these tests:\n{listing}"
        prompt = super().prompt({"problem": text, "answer": ""})
        return replace(prompt, reference=reference, columns=dict(row))

    def check_prompts(self, prompts: Sequence[Prompt]) -> str:
        """See `Task`: every row is read, and references are run, at most those of `_CHECKED` random rows."""
        problems = [self.problem(prompt) for prompt in prompts]
        drawn = random.Random(0).sample(problems, min(_CHECKED, len(problems)))  # noqa: S311
        jobs = [Job(problem.reference, problem.tests) for problem in drawn if problem.reference]
        outcomes = self.executor.run_many(jobs)
        failed = [(job, its) for job, its in zip(jobs, outcomes, strict=True) if its.status != "passed"]
        if not failed:
            return ""
        job, its = failed[0]
        why = f"{its.status}: {its.message}".rstrip(": ")
        message = (
            f"Of {len(jobs)} reference programs that were run, {len(failed)} do not pass the tests of their own rows, "
            f"the first that of `{job.tests.entry}` ({why})."
        )
        if len(failed) == len(jobs):
            raise ValueError(f"{message} Correct the rows, or `limits`.")
        return message

    def program(self, text: str) -> tuple[str, int] | None:
        """The program of a response whose statements can be labelled, and the offset of its first character.

        None if there is no program, or if all of its lines are indented, as in a list: other text is run.
        """
        program, offset = self._found(text)
        return (program, offset) if _is_at_margin(program) else None

    def answer(self, text: str) -> str | None:
        """The program of a response, without what all of its lines are indented by, as in a list."""
        program, _ = self._found(text)
        if _is_at_margin(program):  # As it stands: `dedent` also changes texts of several lines.
            return program
        return textwrap.dedent(program) if program.strip() else None

    def _found(self, text: str) -> tuple[str, int]:
        spans = self.form.find(text)
        return (text[spans[-1].content_start : spans[-1].content_stop], spans[-1].content_start) if spans else ("", 0)

    def answer_spans(self, text: str) -> list[AnswerSpan]:
        """The part of each program that credit methods explain; see `explained`."""
        spans = self.form.find(text)
        if self.explained == "return":
            for number, span in enumerate(spans):
                for start, stop in _returns(text[span.content_start : span.content_stop])[-1:]:
                    first, last = span.content_start + start, span.content_start + stop
                    spans[number] = replace(span, start=first, content_start=first, content_stop=last)
        return spans

    def problem(self, prompt: Prompt) -> CodeProblem:
        """The tests and the reference program of a prompt's row."""
        return read_problem(prompt.columns)

    def verdicts(self, texts: Sequence[str], prompts: Sequence[Prompt]) -> list[Verdict]:
        """The verdicts of the programs, all of which are run at once."""
        submissions = [(self.answer(text), prompt) for text, prompt in zip(texts, prompts, strict=True)]
        jobs = [Job(program, self.problem(prompt).tests) for program, prompt in submissions if program is not None]
        outcomes = iter(self.executor.run_many(jobs))
        return [
            Verdict.missing(p.reference) if program is None else _verdict(next(outcomes), program, p.reference)
            for program, p in submissions
        ]

    def reward_values(
        self,
        texts: Sequence[str],
        prompts: Sequence[Prompt],
        verdicts: Sequence[GradedAnswer],
        lengths: Sequence[int] | None = None,
        ids: Sequence[Sequence[int]] | None = None,
    ) -> dict[str, Values]:
        """See `AnswerTask`; the share of tests that a program passed is one of the columns."""
        shares = [verdict.outcome.share if isinstance(verdict, ProgramVerdict) else 0.0 for verdict in verdicts]
        added = [replace(p, columns={**p.columns, _PASSED: s}) for p, s in zip(prompts, shares, strict=True)]
        return super().reward_values(texts, added, verdicts, lengths, ids)

    def label_steps(self, text: str, prompt: Prompt) -> list[Step] | None:
        """Label the statements, one a line, of a response's program.

        The flawed statement is the first whose replacement by that of the reference makes all tests pass; if no single
        one does, the statements of the smallest set that does so together. It is a misconception if it is that of the
        row's column `tempting`, which has a text for each line of the reference, else a slip. Others are sound. One
        that is missing is blamed on the next line. There are no labels without a reference, without a program, or where
        both differ in too many lines (`programs.divergence.MOST_EDITS`).
        """
        sys.audit("grail_lightning.labels", type(self).__name__)
        _, tests, right = self.problem(prompt)
        if (extract := self.program(text)) is None or not right:
            return None
        program, offset = extract
        lines, reference = program_lines(program), program_lines(right)
        if (flaws := self._flaws(program, lines, reference, tests)) is None:
            return None
        tempting = list(prompt.columns.get("tempting") or [""] * len(reference))
        steps = [
            Step(start=offset + line.start, stop=offset + line.start + len(line.text), kind="sound") for line in lines
        ]
        for edit in flaws:
            for number in range(edit.start, edit.stop) or [min(edit.start, len(lines) - 1)]:
                suggested = tempting[edit.reference_start : edit.reference_stop] == [lines[number].text]
                steps[number] = replace(steps[number], kind="misconception" if suggested else "slip")
        return steps

    def _flaws(
        self, program: str, lines: list[ProgramLine], reference: list[ProgramLine], tests: Tests
    ) -> Sequence[Edit] | None:
        """The smallest set of edits that make all tests pass, the earliest of several; None if there are too many."""
        if self.executor.run(program, tests).status == "passed":
            return ()
        places = edits(lines, reference) or ()
        for size in range(1, len(places)):
            tried = [*combinations(places, size)]
            outcomes = self.executor.run_many([Job(repaired(lines, reference, some), tests) for some in tried])
            for some, outcome in zip(tried, outcomes, strict=True):
                if outcome.status == "passed":
                    return some
        return places or None


def _is_at_margin(program: str) -> bool:
    return any(not line.indent for line in program_lines(program))


def _returns(text: str) -> list[tuple[int, int]]:
    """The ranges of the `return` statements of a program; of one that cannot be parsed, of lines that begin with it."""
    if (program := read_program(text)) is not None:
        return [(its.start, its.stop) for its in program.statements if its.shape[2] == "Return"]
    lines = [line for line in program_lines(text) if re.match(r"return\b", line.text)]
    return [(line.start, line.start + len(line.text)) for line in lines]


def _verdict(outcome: ProgramOutcome, program: str, reference: str) -> ProgramVerdict:
    right, layer = outcome.status == "passed", outcome.status
    # What may be the machine's fault has its own status, of which a run warns.
    status = "right" if right else layer if layer in ("timeout", "crashed") else "wrong"
    return ProgramVerdict(
        correct=right, status=status, layer=layer, gold=reference, prediction=program, outcome=outcome
    )
