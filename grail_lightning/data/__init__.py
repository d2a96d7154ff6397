"""The data modules, which turn datasets into `Prompt`s, and their loaders."""

from grail_lightning.data.generated import ArithmeticData, ChartsData, CodeData, SearchData, WordProblemData
from grail_lightning.data.loaders import Curriculum, EvaluationLoader, PromptSet, TrainingLoader, draws_per_epoch
from grail_lightning.data.modules import PromptData
from grail_lightning.data.rows import FewShot
from grail_lightning.data.sources import DatasetSpec
from grail_lightning.data.tables import Kept, MathData, TableData

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
