"""Tasks, which define the prompt, the reference answer and the reward of a problem, and may label wrong steps."""

from grail_lightning.environments.episode import EpisodeLimits
from grail_lightning.tasks.answered import MathTask
from grail_lightning.tasks.arithmetic import (
    ArithmeticTask,
    Problem,
    ProblemSpace,
    demonstration,
    misconception,
)
from grail_lightning.tasks.charts import CHART_ANSWER, ChartProblem, ChartSpace, chart_demonstration
from grail_lightning.tasks.code import CodeTask
from grail_lightning.tasks.environment import Environment, EnvironmentTask
from grail_lightning.tasks.functions import FunctionProblem, FunctionSpace, function_demonstration
from grail_lightning.tasks.search import SEARCH_ANSWER, FactbookSpace, SearchProblem, SearchSpace, search_demonstration
from grail_lightning.tasks.splits import ProblemSplit, split_of
from grail_lightning.tasks.words import WordProblem, WordProblemSpace, WordProblemTask, word_demonstration

__all__ = [
    "CHART_ANSWER",
    "SEARCH_ANSWER",
    "ArithmeticTask",
    "ChartProblem",
    "ChartSpace",
    "CodeTask",
    "Environment",
    "EnvironmentTask",
    "EpisodeLimits",
    "FactbookSpace",
    "FunctionProblem",
    "FunctionSpace",
    "MathTask",
    "Problem",
    "ProblemSpace",
    "ProblemSplit",
    "SearchProblem",
    "SearchSpace",
    "WordProblem",
    "WordProblemSpace",
    "WordProblemTask",
    "chart_demonstration",
    "demonstration",
    "function_demonstration",
    "misconception",
    "search_demonstration",
    "split_of",
    "word_demonstration",
]
