"""Credit from running programs: `EGCA`, and `ExecutedMask`.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from grail_lightning.answers.spans import Alignment
from grail_lightning.core.credit.base import (
    CreditContext,
    Mean,
    TokenCredit,
    TokenWeights,
    rows_by_group,
    uniform_weights,
)
from grail_lightning.core.credit.oracle import Places, Right, concentrate, counted_places
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.records.task import Prompt
from grail_lightning.core.rollout.batch import RolloutBatch
from grail_lightning.core.rollout.grading import align_rows
from grail_lightning.core.runtime.checks import check_options
from grail_lightning.worlds.code.task import CodeTask
from grail_lightning.worlds.programs.divergence import align_programs, first_divergence, program_lines, read_program
from grail_lightning.worlds.programs.outcome import Job, ProgramOutcome, Visit

_Mode = Literal["syntax", "constraint", "correct", "logic"]
_Blamed = Literal["divergent", "random", "last", "permuted"]
# Traces have a visit of `try`, of `match`, or none.
_UNTRACED = ("ExceptHandler", "match_case", "Global", "Nonlocal", "AnnAssign")


# --- programs ---------------------------------------------------------------------------------------------------------


class _Row:
    """A response with its program, and what is to blame in it."""

    def __init__(self, prompt: Prompt, tokens: Alignment, text: str, offset: int) -> None:
        task: Any = prompt.task
        problem = task.problem(prompt)
        self.executor, self.tests = task.executor, problem.tests
        self.text, self.program = text, read_program(text)
        self.reference = read_program(problem.reference)
        # By its own statements, that of the reference.
        self.pairs = (self.program and self.reference and align_programs(self.program, self.reference)) or {}
        # The parts are the statements, or the lines of a program that does not compile.
        self.parts = [(s.start, s.stop) for s in self.program.statements] if self.program else []
        self.mode: _Mode = "constraint"
        self.blamed: int | None = None  # The number of the part.
        self._tokens, self._offset = tokens, offset

    def tokens(self, part: int) -> list[int]:
        start, stop = self.parts[part]
        return self._tokens.overlapping(self._offset + start, self._offset + stop)


@dataclass(eq=False)
class EGCA(TokenCredit):
    r"""All blame of a wrong program on the statement where its run departs from that of a reference.

    .. math:: w_t = \min\bigl([t \in \text{statement}]\, L / |\text{statement}|,\ w_{max}\bigr)

    ``L`` is the number of the response's tokens, so that without ``w_max`` the sum of the weights stays the same. Only
    responses with a negative advantage are treated. There are four modes, whose shares of these responses are figures:

    - *syntax*: the program does not compile, or a test raises; blamed is the line or statement that Python names;
    - *logic*: a test fails; program and reference are traced on the first such test (`first_divergence`);
    - *correct*: all tests pass; uniform;
    - *constraint*: no program, or none that the trace tells from a comparable reference; uniform, and a fallback.

    Args:
        right: The weights of right responses with a positive advantage: uniform; or balanced, which moves their credit
            to the statements that correspond to those where wrong responses of the group depart, as `Oracle` does.
        w_max: The largest weight of a treated response. None keeps the sum of the weights, as published. With 1 the
            statement keeps the response's advantage, and the other tokens lose it.
        blamed: The statement: divergent; or that of a control: a random one of the same program, the last one, or
            permuted, the number of the one that is blamed in another response of the group.

    Source: EGCA, arXiv 2603.16158, which has no published code. That only negative advantages are treated, the
    alignment without a language model, `w_max` and `balanced` are ours.
    """

    runs_policy = False

    gate: ClassVar[str] = "negative"  # Without a wrong rollout there is nothing to move.
    right: Right = "uniform"
    w_max: float | None = None
    blamed: _Blamed = "divergent"

    def __post_init__(self) -> None:
        check_options(self, right=Right, blamed=_Blamed)
        if self.w_max is not None:
            check_options(self, w_max="(0, inf)")

    @property
    def reads_correct(self) -> bool:
        """See `TokenCredit`: right responses are moved with `right: balanced` alone."""
        return self.right == "balanced"

    def check_prompts(self, sets: Sequence[Sequence[Prompt]]) -> str:
        """See `TokenCredit`: a program whose test fails needs a reference to be compared with."""
        rows = [(prompt.task, prompt.reference) for prompt in chain.from_iterable(sets)]
        _check_tasks(self, [task for task, _ in rows])
        flags = [bool(reference) for task, reference in rows if isinstance(task, CodeTask)]
        lacking = flags.count(False)
        text = f"`EGCA` compares programs with that of `reference`, which {lacking} of {len(flags)} rows do not have."
        if lacking == len(flags) > 0:
            raise ValueError(f"{text} Add the column, or set `model.credit` to another method.")
        return f"{text} Their rollouts are uniform where a test fails." if lacking else ""

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights from runs of the programs."""
        wrong = _programs(policy, batch, batch.advantages < 0)
        cut = _find_faults([row for row in wrong.values() if row])
        self._control({k: row for k, row in wrong.items() if row and row.blamed is not None}, batch, context)
        places: list[Places | None] = [None] * len(batch)
        modes: dict[str, float] = dict.fromkeys(get_args(_Mode), 0.0)
        departed: dict[int, list[int | None]] = defaultdict(list)  # By group, the statements of the reference.
        for k, row in wrong.items():
            modes[row.mode if row else "constraint"] += 1
            if row and row.blamed is not None:
                places[k] = counted_places([row.blamed], {row.blamed: row.tokens(row.blamed)})
                departed[int(batch.group[k])].append(row.pairs.get(row.blamed))
            elif not row or row.mode != "correct":
                places[k] = []
        if self.right == "balanced":
            right = _programs(policy, batch, (batch.advantages > 0) & batch.correct)
            for k, row in right.items():
                row_tokens = {theirs: row.tokens(mine) for mine, theirs in row.pairs.items()} if row else {}
                places[k] = counted_places(departed[int(batch.group[k])], row_tokens)
        figures = {mode: Mean(number, len(wrong)) for mode, number in modes.items()} | {"trace_cut": cut}
        return replace(concentrate(batch, places, self.w_max), metrics=figures)

    def _control(self, rows: Mapping[int, _Row], batch: RolloutBatch, context: CreditContext) -> None:
        for group in rows_by_group(batch):
            some = [k for k in group.tolist() if k in rows]
            if not some:
                continue
            generator = context.row_generator(int(batch.row[some[0]]))
            # Of another response: no one keeps its own. Where there is no other, the control is a random one.
            shift = int(torch.randint(1, len(some), (1,), generator=generator)) if len(some) > 1 else 0
            faults = [rows[k].blamed or 0 for k in some[shift:] + some[:shift]]
            for k, other in zip(some, faults, strict=True):
                last = len(rows[k].parts) - 1
                drawn = int(torch.randint(last + 1, (1,), generator=generator))
                permuted = min(other, last) if shift else drawn
                controls = {"random": drawn, "last": last, "permuted": permuted}
                rows[k].blamed = controls.get(self.blamed, rows[k].blamed)


class ExecutedMask(TokenCredit):
    """Takes the statements out of the loss that no test executes: weight 0 on their tokens, 1 on all others.

    Every test of a program is traced. What stands outside of functions counts as executed; what a function does while
    the program loads, as one that decorates another, is not seen. Responses without an advantage are not run. One
    whose program cannot be traced to its end is uniform and counts as a fallback.

    Source: the mask of StepCoder, arXiv 2402.01391.
    """

    runs_policy = False

    def check_prompts(self, sets: Sequence[Sequence[Prompt]]) -> str:
        """See `TokenCredit`: there must be programs."""
        _check_tasks(self, [prompt.task for prompt in chain.from_iterable(sets)])
        return ""

    def __call__(self, policy: Policy, batch: RolloutBatch, context: CreditContext) -> TokenWeights:
        """Weights of 0 and 1."""
        values, treated = uniform_weights(batch).values.cpu(), batch.advantages != 0
        rows, masked = _programs(policy, batch, treated), 0
        runnable = [(row, row.program.plain) for row in rows.values() if row and row.program]
        jobs = [(row, text, k) for row, text in runnable for k in range(len(row.tests))]
        traces: dict[int, list[Sequence[Visit]]] = defaultdict(list)
        for (its, *_), outcome in zip(jobs, _run(jobs), strict=True):
            # Of a trace that was cut nothing is used: what follows may be executed.
            traces[id(its)].append(() if outcome.cut else outcome.trace or ())
        fallback = torch.zeros(len(batch), dtype=torch.bool)
        for k, row in rows.items():
            if not row or not row.program or not all(traces[id(row)] or [()]):
                fallback[k] = True
                continue
            visited = {row.program.at_line.get(visit.line) for trace in traces[id(row)] for visit in trace}
            counted = [s.function >= 0 and s.shape[2] not in _UNTRACED for s in row.program.statements]
            dead = [inside and n not in visited for n, inside in enumerate(counted)]
            tokens: tuple[set[int], set[int]] = set(), set()  # Of statements that are executed, and of others.
            for n, its_dead in enumerate(dead):
                tokens[its_dead].update(row.tokens(n))
            values[k, sorted(tokens[1] - tokens[0])] = 0
            masked += len(tokens[1] - tokens[0])
        figure = Mean(float(masked), float(batch.response_mask[treated].sum()))
        device = batch.response_mask.device
        return TokenWeights(values=values.to(device), fallback=fallback.to(device), metrics={"not_executed": figure})


def _programs(policy: Policy, batch: RolloutBatch, wanted: Tensor) -> dict[int, _Row | None]:
    """The wanted rows whose tasks have programs, by their numbers; None for a response without one."""
    numbers = [k for k in wanted.nonzero().flatten().tolist() if isinstance(batch.prompts[k].task, CodeTask)]
    rows: dict[int, _Row | None] = {}
    for k, aligned in zip(numbers, align_rows(batch, policy.tokenizer, numbers), strict=True):
        task: Any = batch.prompts[k].task
        text, offset = task.program(aligned.text) or ("", 0)
        there = text.strip() and aligned.text.startswith(text, offset)
        rows[k] = _Row(batch.prompts[k], aligned, text, offset) if there else None
    return rows


def _check_tasks(method: TokenCredit, tasks: Sequence[object]) -> None:
    if tasks and not any(isinstance(task, CodeTask) for task in tasks):
        raise ValueError(
            f"`{type(method).__name__}` needs a task whose responses are programs, such as `CodeTask`, but got "
            f"`{type(tasks[0]).__name__}`. Set `model.credit` to another method."
        )


def _run(jobs: Sequence[tuple[_Row, str, int | None]]) -> list[ProgramOutcome]:
    """The outcomes of texts on the tests of rows; with the number of a test on this one alone, with its trace."""
    outcomes: list[ProgramOutcome] = []
    for executor, some in groupby(jobs, key=lambda job: job[0].executor):
        outcomes += executor.run_many([Job(text, row.tests, test) for row, text, test in some])
    return outcomes


def _find_faults(rows: Sequence[_Row]) -> Mean:
    """Find the mode of each row and what is to blame. Returns the share of the traced rows with a trace that was cut.

    Status and line are those of runs without a trace, which ends a run after some statements.
    """
    raising, failing = [], []
    for row, outcome in zip(rows, _run([(row, row.text, None) for row in rows]), strict=True):
        if outcome.status == "passed":
            row.mode = "correct"
        elif outcome.status == "syntax" and outcome.line is not None:
            lines = program_lines(row.text)
            row.mode, row.pairs, row.parts = "syntax", {}, [(line.start, line.start + len(line.text)) for line in lines]
            row.blamed = max((k for k, x in enumerate(lines) if x.number <= outcome.line), default=0)
        elif row.program and outcome.status == "raised":
            raising.append((row, row.program))
        elif row.program and outcome.failing is not None and outcome.status not in ("crashed", "refused"):
            failing.append((row, row.program, row.reference or row.program, outcome.failing))
    # In the plain text each statement has lines of its own.
    for (row, program), outcome in zip(raising, _run([(row, p.plain, None) for row, p in raising]), strict=True):
        row.blamed = program.at_line.get(outcome.line or 0) if outcome.status == "raised" else None
        row.mode = "constraint" if row.blamed is None else "syntax"
    traced = _run([(row, program.plain, test) for row, program, _, test in failing])
    expected = _run([(row, reference.plain, test) for row, _, reference, test in failing])
    for (row, program, reference, _), traced_run, expected_run in zip(failing, traced, expected, strict=True):
        if row.pairs and traced_run.trace and expected_run.trace:
            row.blamed = first_divergence(program, traced_run.trace, reference, expected_run.trace, row.pairs)
        row.mode = "constraint" if row.blamed is None else "logic"
    cut = sum(traced_run.cut or expected_run.cut for traced_run, expected_run in zip(traced, expected, strict=True))
    return Mean(float(cut), float(len(failing)))
