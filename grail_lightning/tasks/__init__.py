"""Tasks, which define the prompt, the reference answer and the reward of a problem, and may label wrong steps."""

from grail_lightning.tasks.arithmetic import ArithmeticTask
from grail_lightning.tasks.math import MathTask
from grail_lightning.tasks.problems import Problem, ProblemSpace, Split, demonstration, misconception, split_of
from grail_lightning.tasks.word_problems import WordProblemSpace

__all__ = [
    "ArithmeticTask",
    "MathTask",
    "Problem",
    "ProblemSpace",
    "Split",
    "WordProblemSpace",
    "demonstration",
    "misconception",
    "split_of",
]
