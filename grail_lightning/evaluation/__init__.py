"""What an evaluation keeps, its table, and the statistics of its figures."""

from grail_lightning.evaluation.records import Sample, problem_id, read_evaluation, read_samples, sample_seed

__all__ = ["Sample", "problem_id", "read_evaluation", "read_samples", "sample_seed"]
