"""A task whose responses are programs."""

import re

from grail_lightning.programs.outcome import Call, Tests
from grail_lightning.tasks.base import Prompt, Task
from tests.programs.traced import InProcess


class Programs(Task):
    executor = InProcess()

    def prompt(self, row):
        return Prompt(messages=row["problem"], reference="", task=self, columns=row)

    def program(self, text):
        blocks = [*re.finditer(r"```python\n(.*?)\n?```", text, re.S)]
        return (blocks[-1][1], blocks[-1].start(1)) if blocks else None

    def tests(self, prompt):
        return Tests(prompt.columns["entry"], tuple(Call(tuple(a), r) for a, r in prompt.columns["tests"]))

    def reference_program(self, prompt):
        import textwrap

        return textwrap.dedent(prompt.columns["reference"])

    def answer(self, text):
        return None

    def reward(self, texts, prompts, verdicts):
        return [0.0] * len(texts)

    def passes(self, text, prompt):
        found = self.program(text)
        return bool(found) and self.executor.run(found[0], self.tests(prompt)).status == "passed"


PROGRAMS = Programs()
