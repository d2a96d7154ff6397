"""From responses to rewards, and from characters to the tokens in which answers and labelled steps stand."""

from grail_lightning.grading.grade import grade_and_locate
from grail_lightning.grading.locate import align_rows, answer_masks, step_masks

__all__ = ["align_rows", "answer_masks", "grade_and_locate", "step_masks"]
