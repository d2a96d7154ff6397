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
from grail_lightning.tasks.environment import Environment, EnvironmentTask, EpisodeLimits
from grail_lightning.tasks.factbook import FactbookSpace
from grail_lightning.tasks.search import (
    SEARCH_ANSWER,
    SearchMistakes,
    SearchProblem,
    SearchSpace,
    search_demonstration,
)
from grail_lightning.tasks.words import WordProblem, WordProblemSpace, WordProblemTask, word_demonstration

__all__ = [
    "SEARCH_ANSWER",
    "ArithmeticTask",
    "Environment",
    "EnvironmentTask",
    "EpisodeLimits",
    "FactbookSpace",
    "MathTask",
    "Problem",
    "ProblemSpace",
    "SearchMistakes",
    "SearchProblem",
    "SearchSpace",
    "Split",
    "WordProblem",
    "WordProblemSpace",
    "WordProblemTask",
    "demonstration",
    "misconception",
    "search_demonstration",
    "split_of",
    "word_demonstration",
]
