"""Tasks, which define the prompt, the reference answer and the reward of a problem, and may label wrong steps."""

from grail_lightning.tasks.answered import MathTask
from grail_lightning.tasks.arithmetic import (
    ArithmeticTask,
    Problem,
    ProblemSpace,
    Split,
    demonstration,
    misconception,
    split_of,
)
from grail_lightning.tasks.words import WordProblem, WordProblemSpace, WordProblemTask, word_demonstration

__all__ = [
    "ArithmeticTask",
    "MathTask",
    "Problem",
    "ProblemSpace",
    "Split",
    "WordProblem",
    "WordProblemSpace",
    "WordProblemTask",
    "demonstration",
    "misconception",
    "split_of",
    "word_demonstration",
]
