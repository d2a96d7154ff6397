"""The data modules, which turn datasets into `Prompt`s, and their loaders."""

from grail_lightning.data.charts import ChartsData
from grail_lightning.data.code import CodeData
from grail_lightning.data.loaders import Curriculum, EvaluationLoader, PromptSet, TrainingLoader, draws_per_epoch
from grail_lightning.data.modules import PromptData
from grail_lightning.data.rows import FewShot
from grail_lightning.data.search import SearchData
from grail_lightning.data.sources import DatasetSpec
from grail_lightning.data.sums import ArithmeticData
from grail_lightning.data.tables import Kept, MathData, TableData
from grail_lightning.data.words import WordProblemData

__all__ = [
    "ArithmeticData",
    "ChartsData",
    "CodeData",
    "Curriculum",
    "DatasetSpec",
    "EvaluationLoader",
    "FewShot",
    "Kept",
    "MathData",
    "PromptData",
    "PromptSet",
    "SearchData",
    "TableData",
    "TrainingLoader",
    "WordProblemData",
    "draws_per_epoch",
]
