"""The task of stored programs. None of them is run unless a credit method asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from grail_lightning.answers.find import Fenced
from grail_lightning.core.records.task import Prompt
from grail_lightning.core.tasks.answered import MathTask
from grail_lightning.worlds.code.task import CodeTask
from grail_lightning.worlds.programs.executor import Executor
from grail_lightning.worlds.programs.probe import choose


class StoredCode(CodeTask):
    """A `CodeTask` without an instruction, as the packaged policy `code` knows it, whose references are right.

    What isolates programs is looked for when the first one is about to run.
    """

    def __init__(self) -> None:
        MathTask.__init__(self, "", None, None, Fenced(), "exact")  # Without the executor of `CodeTask`.
        self.explained, self.shown_tests = "return", 1

    @cached_property
    def executor(self) -> Executor:  # type: ignore[override]
        """What runs programs; a RuntimeError if nothing isolates them on this machine."""
        return Executor()

    def check_prompts(self, prompts: Sequence[Prompt]) -> str:
        """See `CodeTask`; no reference is run."""
        return ""

    def close(self) -> None:
        """End the processes that have run programs."""
        if "executor" in vars(self):
            self.executor.close()


def why_not_run() -> str:
    """Why no program can run on this machine; empty if one can."""
    try:
        choose(None)
    except RuntimeError as error:
        return str(error)
    return ""
