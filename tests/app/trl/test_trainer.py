"""Whole runs of TRL's trainer with token credit: what TRL's options do to the advantages, and what a run keeps."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerCallback

from grail_lightning import ArithmeticTask
from grail_lightning.core.other_trainers.model import GivenReference
from grail_lightning.core.policy.load import load_policy
from grail_lightning.credit import DGPO, GRAIL, LESS, RLSD, OARGradient, TreeAdvantage
from tests.runs import GROUP, graded_rollouts, problems
from tests.tolerance import assert_near
from tests.trl_trainers import (
    OF_TRL,
    CreditPages,
    GRPOTrainer,
    TokenCreditGRPOTrainer,
    TokenCreditMixin,
    handing_over,
    right,
    rows_of,
    scored,
    trainer_of,
)

pytestmark = OF_TRL


class Keeping(TokenCreditGRPOTrainer):
    """Keeps what each generation returned, and what each loss was given."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.made, self.used = [], []

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.made.append((self.model.training, output))
        return output

    def _compute_loss(self, model, inputs):
        self.used.append((self.model.training, inputs))
        return super()._compute_loss(model, inputs)


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def rows_by_ids(parts):
    """The rows of advantages by the ids of prompt and completion, as many as there are."""
    found = {}
    for part in parts:
        keys = torch.cat([part["prompt_ids"], part["completion_ids"]], 1)
        for key, row in zip(keys.tolist(), part["advantages"].tolist(), strict=True):
            found.setdefault(tuple(key), []).append(tuple(row))
    return {key: sorted(rows) for key, rows in found.items()}


def test_steps_iterations_and_accumulation_give_each_row_its_own_advantages(tmp_path):
    """Three optimiser steps of two micro-batches for each of two passes over a generation, which TRL shuffles."""
    made = trainer_of(
        tmp_path, Keeping, credit=GRAIL(gate="all"), credit_task=ArithmeticTask(),
        args={"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 6,
              "num_iterations": 2, "max_steps": 6},
    )  # fmt: skip
    made.train()
    assert len(made.made) == 1
    assert len(made.used) == 12
    ((_, output),) = made.made
    assert output["advantages"].shape == output["completion_ids"].shape == (24, output["completion_ids"].shape[1])
    live = output["advantages"][(output["advantages"] != 0).any(1)]
    assert len(live.unique(dim=0)) > 2, "rows can be told apart"
    for first in (0, 6):  # Each pass uses every row once.
        assert rows_by_ids(part for _, part in made.used[first : first + 6]) == rows_by_ids([output])
    history = [row for row in made.state.log_history if "credit/weight_mean" in row]
    assert history, "figures of credit stand beside TRL's"
    assert {"credit/weight_std", "credit/ess_ratio", "credit/eligible", "credit/seconds", "reward"} <= history[0].keys()


def test_checkpointing_chunks_and_padding_change_no_advantage(tmp_path):
    rollouts = graded_rollouts(4, seed=2)
    found = []
    for args, more in (
        ({}, {}),
        ({"gradient_checkpointing": True}, {"credit_batch_size": 3}),
        ({"pad_to_multiple_of": 16}, {"credit_batch_size": 1}),
    ):
        made = trainer_of(tmp_path, **handing_over(rollouts), credit=OARGradient(), args=args, **more)
        made.model.train()
        before = made.model.generation_config.to_dict(), made.model.config._attn_implementation
        found.append(scored(made, rollouts)["advantages"])
        assert (made.model.generation_config.to_dict(), made.model.config._attn_implementation) == before
        assert made.model.training
        assert all(p.grad is None and p.requires_grad for p in made.model.parameters())
    width = rollouts.response_ids.shape[1]
    assert found[2].shape[1] % 16 == 0
    assert found[2].shape[1] > width
    for other in found[1:]:
        # Scores are scaled by their deviation, which grows a rounding.
        assert_near(other[:, :width], found[0], 30_000, torch.float32)
        assert (other[:, width:] == 0).all()


@pytest.mark.slow
def test_autocast_is_accelerates(tmp_path):
    rollouts, seen = graded_rollouts(4, seed=2), []

    class Seeing(OARGradient):
        def __call__(self, policy, batch, context):
            seen.append(policy.compute_dtype)
            return super().__call__(policy, batch, context)

    made = trainer_of(tmp_path, **handing_over(rollouts), credit=Seeing(), args={"bf16": True})
    made.model.train()
    advantages = scored(made, rollouts)["advantages"]
    assert seen == [torch.bfloat16]
    assert advantages.dtype == torch.float32
    assert advantages.isfinite().all()


def test_adapters_are_run_and_are_left_out_for_the_reference(tmp_path):
    """The copy of `beta` and a policy without its adapters are the same reference."""
    from peft import LoraConfig

    rollouts, credit = graded_rollouts(4, seed=2), DGPO(temperature=0.05)
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = trainer_of(tmp_path, **handing_over(rollouts), credit=credit, peft_config=adapters)
    with torch.no_grad():
        for name, parameter in adapted.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    merged = load_policy("arithmetic").train()
    with torch.no_grad():
        for name, module in adapted.model.get_base_model().named_modules():
            if hasattr(module, "lora_A"):
                merged.model.get_submodule(name).weight += module.get_delta_weight("default")
    whole = trainer_of(tmp_path, **handing_over(rollouts), policy=merged, credit=credit, args={"beta": 0.1})
    trainable = {name for name, p in adapted.model.named_parameters() if p.requires_grad}
    found = []
    for made in (adapted, whole):
        made.model.train()
        found.append(scored(made, rollouts)["advantages"])
    uniform = found[0][:, :1].expand_as(found[0])
    assert (found[0] - uniform)[rollouts.response_mask].abs().max() > 0.05
    assert_near(found[0], found[1], 20_000, torch.float32)
    assert {name for name, p in adapted.model.named_parameters() if p.requires_grad} == trainable


@pytest.mark.slow
def test_the_reference_of_adapters_that_were_trained_before_is_trls_copy_of_them(tmp_path):
    from peft import LoraConfig, get_peft_model

    rollouts, policy = graded_rollouts(4, seed=2), load_policy("arithmetic").train()
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(policy.model, adapters)

    def disturb(seed):
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B.default" in name:
                    parameter.normal_(std=0.3, generator=random)

    disturb(1)
    given = SimpleNamespace(model=model, tokenizer=policy.tokenizer)
    made = trainer_of(tmp_path, **handing_over(rollouts), policy=given, credit=DGPO(), args={"beta": 0.1})
    disturb(2)
    made.model.train()
    expected = scored(made, rollouts)["ref_per_token_logps"]
    ours, mask = made._credit_policy, rollouts.response_mask
    with torch.no_grad(), GivenReference(ours).running(ours) as reference:
        found = reference(reference.layout(rollouts))
    with torch.no_grad():
        present = ours(ours.layout(rollouts))
    assert_near(found[mask], expected[mask], 1000, torch.float32)
    assert (present - expected)[mask].abs().max() > 0.1
    assert model.active_adapter == "default"


def test_evaluation_is_trls_own(tmp_path):
    from datasets import Dataset

    made = trainer_of(
        tmp_path, Keeping, credit=GRAIL(), eval_dataset=Dataset.from_list(rows_of(problems(4))),
        args={"max_steps": 1, "per_device_eval_batch_size": 16, "num_generations_eval": 4},
    )  # fmt: skip
    figures = made.evaluate()
    ((training, output),) = made.made
    assert not training
    assert output["advantages"].dim() == 1
    assert "eval_reward" in figures
    assert not any("credit" in name for name in figures)
    made.train()
    assert made.made[-1][1]["advantages"].dim() == 2


def test_correct_func_says_which_completions_are_right(tmp_path):
    """Where rewards are for other things, too, methods that read verdicts are told by it, and so are the pages."""
    rollouts = graded_rollouts(4, seed=2)

    def format_alone(completions, **columns):
        return [1.0] * len(completions)

    async def correct(completions, solution, completion_ids, **columns):
        assert len(completion_ids) == len(completions)
        return [None if value == 0 else value for value in right(completions, solution)]

    given = handing_over(rollouts)
    two = given | {"reward_funcs": [given["reward_funcs"], format_alone]}
    both = []
    for arguments, more in ((two, {"correct_func": correct}), (given, {})):
        made = trainer_of(tmp_path, **arguments, credit=LESS(min_length=1), credit_task=ArithmeticTask(), **more)
        made.model.train()
        both.append(scored(made, rollouts)["advantages"])
    assert torch.equal(*both)
    uniform = both[0][:, :1] * rollouts.response_mask
    assert not torch.equal(both[0], uniform)

    def short(completions, **columns):
        return [True]

    made = trainer_of(tmp_path, **two, credit=LESS(), correct_func=short)
    made.model.train()
    with pytest.raises(ValueError, match="`correct_func` must return one value for each of 16 completions, but got 1"):
        scored(made, rollouts)


def test_a_page_and_a_table_of_completions_are_written_every_some_steps(tmp_path):
    from grail_lightning.core.records.columns import PREDICTION, read_rows

    made = trainer_of(
        tmp_path, credit=TreeAdvantage(), credit_task=ArithmeticTask(), callbacks=[CreditPages(every=2)],
        args={"max_steps": 3, "per_device_train_batch_size": 8},
    )  # fmt: skip
    made.train()
    files = sorted(file.name for file in (tmp_path / "credit").iterdir())
    assert files == [f"step_{step:08d}.{kind}" for step in (0, 2) for kind in ("html", "parquet")]
    rows = list(read_rows(tmp_path / "credit" / "step_00000002.parquet", PREDICTION))
    assert len(rows) == 8
    assert {row["method"] for row in rows} == {"TreeAdvantage"}
    assert {row["reference"] for row in rows} <= {row["solution"] for row in rows_of(problems(16))}
    assert any(len(set(row["weights"])) > 1 for row in rows)
    assert all(row["step_kinds"] for row in rows), "the task labels steps"
    page = (tmp_path / "credit" / "step_00000002.html").read_text()
    assert "TreeAdvantage, step 2" in page
    with pytest.raises(ValueError, match="`every` must be at least 1 optimiser step, but got 0"):
        CreditPages(every=0)


@pytest.mark.slow
def test_a_resumed_run_with_a_method_that_has_a_state_equals_one_that_did_not_stop(tmp_path):
    """RLSD's teacher is a copy of the weights of step 0, which the checkpoint holds."""
    args = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 8}

    def run(folder, **more):
        return trainer_of(folder, credit=RLSD(refresh_steps=10, decay_steps=50), args=args | more)

    whole = run(tmp_path / "whole")
    whole.train()
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    state = torch.load(checkpoint / "credit_state.pt", weights_only=True)
    assert state["copied_at"] == 0
    again = run(tmp_path / "again")
    again.train(resume_from_checkpoint=str(checkpoint))
    expected = weights(whole)
    assert all(torch.equal(value, expected[name]) for name, value in weights(again).items())
    (checkpoint / "credit_state.pt").unlink()
    other = run(tmp_path / "other")
    other.train(resume_from_checkpoint=str(checkpoint))
    assert any((value != expected[name]).any() for name, value in weights(other).items()), "the teacher matters"
    latest = run(tmp_path / "whole")  # The newest checkpoint, whose run is over.
    latest.train(resume_from_checkpoint=True)
    assert latest.credit.state_dict()["weights"].keys() == whole.credit.state_dict()["weights"].keys()


@pytest.mark.slow
def test_a_subclass_of_ones_own_gets_token_credit_by_the_mixin(tmp_path):
    class Mine(GRPOTrainer):
        def log(self, logs, start_time=None):
            super().log(logs | {"mine": 1.0}, start_time)

    class WithCredit(TokenCreditMixin, Mine):
        pass

    made = trainer_of(
        tmp_path, WithCredit, credit=TreeAdvantage(), args={"max_steps": 1, "per_device_train_batch_size": 8}
    )
    made.train()
    (row,) = [row for row in made.state.log_history if "credit/in_tree" in row]
    assert row["mine"] == 1.0


class Progress(TrainerCallback):
    """The rewards of each step."""

    def __init__(self):
        self.rewards = []

    def on_log(self, args, state, control, logs, **kwargs):
        if "reward" in logs:
            self.rewards.append(logs["reward"])


@pytest.mark.slow
@pytest.mark.parametrize("credit", [GRAIL, TreeAdvantage])
def test_the_packaged_policy_learns_under_trl(credit, tmp_path):
    watch = Progress()
    made = trainer_of(
        tmp_path, credit=credit(), credit_task=ArithmeticTask(), callbacks=[watch],
        rows=rows_of(problems(240)),
        args={"max_steps": 30, "per_device_train_batch_size": 32, "max_completion_length": 48},
    )  # fmt: skip
    made.train()
    rewards = torch.tensor(watch.rewards)
    assert rewards[-10:].mean() > rewards[:5].mean() + 0.1
    assert json.dumps(watch.rewards)
    assert GROUP == 4
