"""An executor of the tests' own programs, which are trusted: the guest of a sandbox runs them in this process."""

import json
import types

from grail_lightning import CodeTask, MathTask
from grail_lightning.answers import Fenced
from grail_lightning.worlds.programs import guest
from grail_lightning.worlds.programs.grade import grade
from grail_lightning.worlds.programs.outcome import ProgramLimits

REFERENCE = """
    def total(values, limit):
        result = 0
        for value in values:
            if value <= limit:
                result += value
        return result
"""


def changed(old, new, text=REFERENCE):
    """The program with another text in one place."""
    assert text.count(old) == 1
    return text.replace(old, new)


class _Here:
    """What a `Sandbox` does, without one."""

    cap = 1 << 20

    def begin(self, message):
        self.first, self.module = message, types.ModuleType("program")
        return guest._load(message["program"], self.module)

    def ask(self, message, more=0):
        return json.loads(json.dumps(guest._call(self.first, self.module, message)))

    def end(self):
        pass


class InProcess:
    """Runs programs here, on calls."""

    limits = ProgramLimits()

    def run(self, program, tests, *, trace=None):
        return grade(_Here(), _Here(), program, tests, trace)

    def run_many(self, jobs):
        return [grade(_Here(), _Here(), *job) for job in jobs]


class Trusted(CodeTask):
    """A task with programs of the tests' own."""

    def __init__(self):
        MathTask.__init__(self, "", None, None, Fenced(), "exact")
        self.shown_tests, self.executor, self.explained = 1, InProcess(), "return"
