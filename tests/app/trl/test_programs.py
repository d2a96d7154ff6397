"""Methods that run programs, with the columns of TRL's dataset as those of the task."""

import pytest
import torch

from grail_lightning import GroupMean, build_batch
from grail_lightning.core.credit.base import token_advantages
from grail_lightning.core.policy.load import load_policy
from grail_lightning.credit import EGCA, ExecutedMask
from tests.batches import graded
from tests.conftest import GOLDEN
from tests.core.credit.rollouts import context
from tests.gallery.test_egca import LATE, NO_SYNTAX, REFERENCE, SLIP, text_of
from tests.trl_trainers import OF_TRL, handing_over, trainer_of
from tests.worlds.programs.traced import Trusted

pytestmark = [*OF_TRL, pytest.mark.slow]
TASK = Trusted()
ROW = {
    "problem": "Sum what is no larger than the limit.",
    "entry": "total",
    "tests": "[[[[1, 2, 3], 2], 3], [[[2], 1], 0]]",
    "reference": REFERENCE,
}


@pytest.mark.parametrize("credit", [EGCA(), ExecutedMask()], ids=lambda credit: type(credit).__name__)
def test_programs_are_blamed_as_in_our_own_step(credit, tmp_path):
    policy = load_policy(str(GOLDEN / "model")).train()
    texts = [text_of(program) for program in (REFERENCE, SLIP, LATE, NO_SYNTAX)]
    ids = [[*policy.tokenizer(text)["input_ids"], policy.end_token_ids[0]] for text in texts]
    sampled = build_batch(policy, [TASK.prompt(ROW)], 4, ids, [True] * 4)
    batch = graded(sampled, torch.tensor([1.0, 0.0, 0.0, 0.0]).double(), tokenizer=policy.tokenizer)
    made = trainer_of(
        tmp_path, policy=policy, **handing_over(batch), rows=[ROW | {"prompt": "Write it."}], credit=credit,
        credit_task=TASK, reference_column="reference", args={"per_device_train_batch_size": 4},
    )  # fmt: skip
    made.model.train()
    found = made._generate_and_score_completions([made.train_dataset[0]] * 4)["advantages"]
    whole = batch.with_advantages(GroupMean()(batch, 4, None))
    expected = token_advantages(whole.advantages, credit(policy, whole, context()))
    assert torch.equal(found, expected.float())
    assert (found[1] != found[1, 0]).any(), "something is blamed"
