"""Prompts with pictures: TRL's ids and pixels, and ids of our own for each picture token."""

import pytest
import torch

from grail_lightning.core.credit.base import token_advantages
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.step.assign import weigh_batch
from grail_lightning.credit import GRAIL, HighEntropy, TokenCredit, TreeAdvantage
from tests.core.credit.rollouts import context
from tests.picture_models import checkpoint, image
from tests.tolerance import assert_near
from tests.trl_trainers import OF_TRL, Dataset, GRPOConfig, TokenCreditGRPOTrainer

pytestmark = [*OF_TRL, pytest.mark.filterwarnings("ignore")]


def letters(completions, **columns):
    """A reward that differs between completions of random weights."""
    return [float(len(set(completion[0]["content"])) % 3) for completion in completions]


CREDITS = [pytest.param(TreeAdvantage(), marks=pytest.mark.slow), HighEntropy()]
CREDITS += [pytest.param(GRAIL(gate="all"), marks=pytest.mark.slow)]


@pytest.mark.parametrize("credit", CREDITS, ids=lambda c: type(c).__name__)
def test_prompts_with_pictures_have_the_credit_of_our_own_policy(credit, tmp_path):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = checkpoint("idefics3", tmp_path / "model")
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    rows = [
        {"prompt": [{"role": "user", "content": f"what is {k} + 4 ?"}], "images": [image(k)], "solution": "7"}
        for k in range(2)
    ]
    args = GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        num_generations=4, per_device_train_batch_size=8, max_completion_length=12, scale_rewards="none",
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    made = TokenCreditGRPOTrainer(
        model=model, reward_funcs=letters, args=args, train_dataset=Dataset.from_list(rows),
        processing_class=processor, credit=credit,
    )  # fmt: skip
    made.model.train()
    kept = []
    made.credit = Keeping(credit, kept)
    output = made._generate_and_score_completions([rows[k // 4] for k in range(8)])
    (batch,) = kept
    assert ((batch.input_ids >= 2**30).any(1)).all() == credit.runs_policy
    ours = load_policy(folder) if not credit.runs_policy else made._credit_policy
    weights = weigh_batch(credit, None, ours, batch, context(seed=1))
    assert_near(output["advantages"], token_advantages(batch.advantages, weights), 100, torch.float32)
    if credit.runs_policy:  # What the policy sees is what TRL's model sees.
        policy = made._credit_policy
        with torch.no_grad():
            found = policy(policy.layout(batch))
            expected, _, _ = made._get_per_token_logps_and_entropies(
                made.model,
                torch.cat([output["prompt_ids"], output["completion_ids"]], 1),
                torch.cat([output["prompt_mask"], output["completion_mask"]], 1),
                output["completion_ids"].shape[1],
                **{k: output[k] for k in ("pixel_values", "pixel_attention_mask", "num_images") if k in output},
            )
        mask = batch.response_mask
        assert_near(found[mask], expected[mask], 3000, torch.float32)


class Keeping(TokenCredit):
    """Keeps the batch that a method is given."""

    def __init__(self, inner, kept):
        self.inner, self.kept = inner, kept

    @property
    def runs_policy(self):
        return self.inner.runs_policy

    def __call__(self, policy, batch, context):
        self.kept.append(batch)
        return self.inner(policy, batch, context)
