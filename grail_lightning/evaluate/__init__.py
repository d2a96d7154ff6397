"""What an evaluation keeps, its table, the statistics of its figures, and the comparison of runs."""

from grail_lightning.evaluate.records import Sample, problem_id, read_evaluation, read_samples, sample_seed

__all__ = ["Sample", "problem_id", "read_evaluation", "read_samples", "sample_seed"]
