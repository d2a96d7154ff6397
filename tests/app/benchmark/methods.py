"""Credit methods of a user, some of which are wrong in some way, or try to read the labels."""

import gc
import os
import sys
from pathlib import Path

import numpy as np
import torch

from grail_lightning.credit import TokenCredit, TokenWeights, TreeAdvantage
from grail_lightning.worlds.sums.task import ArithmeticTask, Chain


def ones(batch):
    """Uniform credit."""
    return TokenWeights(values=batch.response_mask.float())


class Constant(TokenCredit):
    """The same weight everywhere."""

    def __call__(self, policy, batch, context):
        return ones(batch)


class RandomWeights(TokenCredit):
    """A random weight for each token, between 0 and 2."""

    def __call__(self, policy, batch, context):
        width = batch.response_mask.shape[1]
        drawn = [torch.rand(width, generator=context.row_generator(row)) for row in batch.row.tolist()]
        return TokenWeights(values=2 * torch.stack(drawn) * batch.response_mask)


class Opposite(TokenCredit):
    """The negative of `TreeAdvantage`: what it adds is taken away."""

    def __call__(self, policy, batch, context):
        weights = TreeAdvantage()(policy, batch, context)
        return TokenWeights(values=weights.values, additive=-weights.additive)


class WrongShape(TokenCredit):
    """Returns a weight a row."""

    def __call__(self, policy, batch, context):
        return TokenWeights(values=torch.ones(len(batch)))


class NotANumber(TokenCredit):
    """Returns NaN."""

    def __call__(self, policy, batch, context):
        return TokenWeights(values=batch.response_mask * torch.nan)


class Nothing(TokenCredit):
    """Returns no weights."""

    def __call__(self, policy, batch, context):
        return None


class Fails(TokenCredit):
    """Has a bug."""

    def __call__(self, policy, batch, context):
        return batch.no_such_thing


class CannotBeMade(TokenCredit):
    """Has a bug in its constructor."""

    def __init__(self):
        raise KeyError("top")

    def __call__(self, policy, batch, context):
        return ones(batch)


class Counts(TokenCredit):
    """Has a state: weights grow with each call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, policy, batch, context):
        self.calls += 1
        return TokenWeights(values=batch.response_mask.float() * self.calls)


# --- tricks -----------------------------------------------------------------------------------------------------------


class AsksTask(TokenCredit):
    """Asks the prompts' own task."""

    def __call__(self, policy, batch, context):
        for text, prompt in zip(batch.texts, batch.prompts, strict=True):
            prompt.task.label_steps(text, prompt)
        return ones(batch)


class AsksNewTask(TokenCredit):
    """Asks a task of its own."""

    def __call__(self, policy, batch, context):
        ArithmeticTask().label_steps(batch.texts[0], batch.prompts[0])
        return ones(batch)


class AsksChain(TokenCredit):
    """Calls what the task's method calls."""

    def __call__(self, policy, batch, context):
        from grail_lightning.worlds.sums.task import Problem

        Chain(Problem.parse(batch.prompts[0].columns["problem"])).label(batch.texts[0], [])
        return ones(batch)


def stolen(read):
    """What a function returns; None if it is refused, as one expects of who tries."""
    try:
        return read()
    except Exception:
        return None


class OpensFile(TokenCredit):
    """Opens the file of the labels, by one of its names."""

    def __init__(self, file: str, how: str = "numpy") -> None:
        self.file, self.how, self.found = file, how, None

    def __call__(self, policy, batch, context):
        readers = {
            "numpy": lambda: np.load(self.file)["steps"],
            "open": lambda: Path(self.file).read_bytes(),
            "descriptor": lambda: os.read(os.open(self.file, os.O_RDONLY), 100),
            "fork": self._in_a_fork,
        }
        type(self).stolen = stolen(readers[self.how])
        return ones(batch)

    def _in_a_fork(self):
        reads, writes = os.pipe()
        if not (child := os.fork()):
            found = stolen(lambda: Path(self.file).read_bytes()[:10]) or b""
            os.write(writes, found)
            os._exit(0)
        os.waitpid(child, 0)
        os.close(writes)
        return os.read(reads, 10) or None


class ChecksPrompts(TokenCredit):
    """Asks the task for labels before it is called, and keeps them."""

    def check_prompts(self, sets):
        prompt = sets[0][0]
        self.kept = prompt.task.label_steps(str(prompt.columns.get("solution", "1+1=2")), prompt)
        return super().check_prompts(sets)

    def __call__(self, policy, batch, context):
        return ones(batch)


class CallsReader(TokenCredit):
    """Imports the benchmark's reader of labels."""

    def __call__(self, policy, batch, context):
        from grail_lightning.app.benchmark.stored import read_arrays
        from grail_lightning.app.benchmark.worlds import WORLDS

        type(self).stolen = stolen(lambda: read_arrays(WORLDS["sums"].file, ["steps"]))
        return ones(batch)


class Searches(TokenCredit):
    """Looks for labels in all objects and in the frames of its callers."""

    def __call__(self, policy, batch, context):
        frame, found = sys._getframe(), []
        while frame is not None:
            found += [value for value in frame.f_locals.values() if type(value).__name__ in ("Labels", "Step")]
            frame = frame.f_back
        found += [thing for thing in gc.get_objects() if type(thing).__name__ in ("Labels", "Forks")]
        type(self).stolen = found
        return ones(batch)


class ReadsScores(TokenCredit):
    """Reads the environments' scores of turns, without the function that reads them for the package's methods."""

    def __call__(self, policy, batch, context):
        type(self).stolen = [turn.score for episode in batch.episodes for turn in episode.turns]
        return ones(batch)


class ReadsReference(TokenCredit):
    """Reads the reference answer, or a column that has it."""

    def __init__(self, how: str = "reference") -> None:
        self.how = how

    def __call__(self, policy, batch, context):
        prompt = batch.prompts[0]
        if self.how == "reference":
            str(prompt.reference)
        elif self.how == "verdict":
            str(batch.verdicts[0].gold)
        elif self.how == "column":
            prompt.columns.get("answer")
        else:
            dict(prompt.columns)
        return ones(batch)
