"""What a problem is: its prompt, reference answer and reward, and where the task can tell, which steps are wrong."""

from grail_lightning.tasks.arithmetic import ArithmeticTask
from grail_lightning.tasks.math import MathTask
from grail_lightning.tasks.problems import Problem, ProblemSpace, Split, demonstration, misconception, split_of

__all__ = [
    "ArithmeticTask",
    "MathTask",
    "Problem",
    "ProblemSpace",
    "Split",
    "demonstration",
    "misconception",
    "split_of",
]
