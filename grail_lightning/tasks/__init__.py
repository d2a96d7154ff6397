"""Tasks, which define the prompt, the reference answer and the reward of a problem, and may label wrong steps."""

from grail_lightning.tasks.arithmetic import ArithmeticTask
from grail_lightning.tasks.math import MathTask
from grail_lightning.tasks.problems import Problem, ProblemSpace, Split, demonstration, misconception, split_of
from grail_lightning.tasks.word_problems import WordProblem, WordProblemSpace, word_demonstration
from grail_lightning.tasks.word_steps import WordProblemTask

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
