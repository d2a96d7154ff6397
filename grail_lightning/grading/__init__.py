"""Functions that grade responses, and that locate the tokens of answers and labelled steps."""

from grail_lightning.grading.grade import grade_and_locate
from grail_lightning.grading.locate import align_rows, answer_masks, located_steps, step_masks

__all__ = ["align_rows", "answer_masks", "grade_and_locate", "located_steps", "step_masks"]
