"""What an evaluation keeps, its table, the statistics of its figures, and the comparison of runs."""

from grail_lightning.results.records import read_evaluation, read_samples
from grail_lightning.runtime.seeds import sample_seed
from grail_lightning.tasks.base import problem_id

__all__ = ["problem_id", "read_evaluation", "read_samples", "sample_seed"]
