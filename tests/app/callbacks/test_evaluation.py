"""Held-out problems are measured before, during and after training, and what is logged are their figures."""

from dataclasses import replace

import pytest
import torch
from lightning.pytorch import Callback

from grail_lightning import (
    ArithmeticTask,
    EnvironmentTask,
    Evaluation,
    LastCheckpoint,
    RewardSpec,
    Sampling,
    default_callbacks,
)
from grail_lightning.core.data.loaders import PromptSet, TrainingLoader
from tests.app.callbacks.scripted import LIMIT, Scripted, board, box, loader, prompts, run, scalars
from tests.runs import module, trainer


def _right_for(problems_and_samples):
    """Right exactly for the given (reference, sample) pairs; else wrong."""
    return lambda prompt, k, step: box(prompt.reference if (prompt.reference, k) in problems_and_samples else "0")


def _later_right(prompt, k, step):
    """Right on problem 1 at first, on one more problem with each two steps."""
    return box(prompt.reference if int(prompt.reference) <= 1 + step // 2 else "0")


def _last_line(capsys):
    return capsys.readouterr().out.strip().splitlines()[-1]


class Order(Callback):
    """Writes down when validation and training happen, and what has been printed when the fit ends."""

    def __init__(self, capsys=None):
        self.events, self.capsys = [], capsys

    def _add(self, what, trainer, pl_module):
        self.events.append(
            (what, trainer.global_step, trainer.training and pl_module.training, torch.is_grad_enabled())
        )

    def on_validation_epoch_end(self, trainer, pl_module):
        self._add("val", trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._add("train", trainer, pl_module)

    def on_fit_end(self, trainer, pl_module):
        self.before = self.capsys.readouterr().out if self.capsys else ""


def test_validation_runs_before_training_and_after_it_in_eval_mode_without_gradients(capsys):
    order = Order(capsys)
    run(5, Evaluation(), order).fit(Scripted(_later_right), loader(*[prompts(2)] * 9), loader(prompts(4), prompts(4)))
    # Two optimiser steps a batch, the third batch is cut short by `max_steps`; nothing validates in between.
    assert order.events == [
        ("val", 0, False, False),
        ("train", 2, True, True),
        ("train", 4, True, True),
        ("train", 5, True, True),
        ("val", 5, False, False),
    ]
    # 1 of 4 right at step 0; 1 + 5 // 2 = 3 of 4 at step 5; the same four problems twice.
    assert _last_line(capsys) == "held-out accuracy: 0.250 -> 0.750 (8 problems, temperature 1.0)"
    assert "held-out" not in order.before, "what other callbacks say at the end comes before it"


def test_figures_are_logged_per_dataset_and_over_all_on_the_axis_of_optimiser_steps(tmp_path):
    right = {("1", 0), ("1", 1), ("2", 1)}

    def say(prompt, k, step):
        unfinished = prompt.dataset == "easy" and prompt.reference == "3"
        return None if unfinished else _right_for(right)(prompt, k, step)

    half = ArithmeticTask(rewards=[RewardSpec(function="correctness", weight=0.5)])
    easy = [replace(prompt, task=half) for prompt in prompts(3, "easy")]
    data = [loader(prompts(2, "a/b@c"), prompts(1, "a/b@c")), loader(easy)]
    evaluation = Evaluation(num_samples=2, pass_at=(1, 2), maj_at=(2,))
    run(2, evaluation, logger=board(tmp_path)).fit(Scripted(say), loader(prompts(2)), data)
    found = scalars(tmp_path)
    # Batch 1 of "a/b@c": problem 1 twice right, problem 2 once; batch 2: problem 1 again. 5 of 6 samples, 3 of 3
    # problems. "easy": problem 1 twice, problem 2 once, and problem 3 is never finished: 3 of 6 samples, 2 of 3
    # problems. All: 8 of 12, and 5 of 6. In a tie of two votes each answer wins half of it.
    tokens = len(Scripted(say).tokenizer(box("1"))["input_ids"]) + 1
    expected = {
        "val/accuracy": 8 / 12,
        "val/pass_at_1": 8 / 12,
        "val/pass_at_2": 5 / 6,
        "val/maj_at_2": 8 / 12,
        "val/a_b_c/accuracy": 5 / 6,
        "val/a_b_c/pass_at_2": 1,
        "val/easy/accuracy": 1 / 2,
        "val/easy/pass_at_2": 2 / 3,
        "val/accuracy_simple_average": (5 / 6 + 1 / 2) / 2,
        "val/reward": (5 + 0.5 * 3) / 12,
        "val/easy/reward": 0.5 * 3 / 6,
        "val/verdict/right": 8 / 12,
        "val/verdict/wrong": 2 / 12,
        "val/verdict/missing": 2 / 12,
        "val/completions/clipped_ratio": 2 / 12,
        "val/completions/max_length": LIMIT,
        "val/completions/min_length": tokens,
        "val/completions/mean_length": (10 * tokens + 2 * LIMIT) / 12,
        "val/completions/mean_length_right": tokens,
        "val/easy/completions/mean_length_wrong": (tokens + 2 * LIMIT) / 3,
    }
    for name, value in expected.items():
        assert found[name] == [(0, pytest.approx(value)), (2, pytest.approx(value))], name
    assert not [name for name in found if "@" in name]


def test_a_resumed_run_does_not_validate_first_and_says_when_its_two_figures_are_not_of_the_same_problems(
    tmp_path, capsys
):
    def fit(max_steps, problems, *callbacks, path=None, temperature=1.0):
        train = TrainingLoader([PromptSet("", prompts(18))], prompts_per_batch=2)
        evaluation = Evaluation(sampling=Sampling(max_response_length=LIMIT, temperature=temperature))
        trainer = run(max_steps, evaluation, *callbacks, enable_checkpointing=path is None)
        trainer.fit(Scripted(_later_right), train, loader(problems), ckpt_path=path, weights_only=path and True)
        return _last_line(capsys).removeprefix("held-out accuracy: ")

    order, file = Order(), tmp_path / "last.ckpt"
    fit(2, prompts(4), LastCheckpoint(folder=str(tmp_path)))
    assert fit(4, prompts(4)[::-1], order, path=file) == "0.250 -> 0.750 (4 problems, temperature 1.0)"
    assert [event[:2] for event in order.events] == [("train", 4), ("val", 4)]
    assert fit(4, prompts(8), path=file, temperature=0.0) == (
        "0.250 (4 problems, temperature 1.0) -> 0.375 (8 problems, greedy); "
        "not comparable, because the run was resumed with other problems and sampling"
    )


def test_training_does_not_depend_on_validation_before_it():
    class Random(Scripted):
        def training_step(self, problems, batch_idx):
            self.drawn = torch.rand(3)
            return super().training_step(problems, batch_idx)

        def validation_step(self, problems, batch_idx, dataloader_idx=0):
            torch.rand(5)
            return super().validation_step(problems, batch_idx, dataloader_idx)

    drawn = []
    for at_start in (True, False):
        torch.manual_seed(3)
        module = Random(_later_right)
        torch.manual_seed(4)
        run(2, Evaluation(at_start=at_start)).fit(module, loader(prompts(2)), loader(prompts(4)))
        drawn.append(module.drawn)
    assert torch.equal(*drawn)


def test_outside_of_a_fit_figures_stand_at_the_step_of_the_policy_and_it_is_said_which_it_is(tmp_path, caplog, capsys):
    fit, later = tmp_path / "fit", tmp_path / "later"
    last = LastCheckpoint(folder=str(fit))
    trainer = run(4, Evaluation(), last, enable_checkpointing=True, logger=board(fit))
    trainer.fit(Scripted(_later_right), loader(*[prompts(2)] * 9), loader(prompts(4, "a")))
    caplog.clear()
    trainer.validate(trainer.lightning_module, loader(prompts(4)), verbose=False)
    assert "`validate` uses the policy in memory, at step 4." in caplog.text
    capsys.readouterr()
    trainer.test(trainer.lightning_module, loader(prompts(3, "a")), verbose=False)
    table = capsys.readouterr().out.strip().split("\n\n")
    assert table[0].splitlines()[-1].split()[:2] == ["a", "3"], "a test after a fit counts its own problems alone"
    judge = run(-1, Evaluation(), logger=board(later))
    for checkpoint in (str(fit / "last.ckpt"), None):
        judge.test(Scripted(_later_right), loader(prompts(4)), ckpt_path=checkpoint, verbose=False, weights_only=True)
    assert f"`test` uses the policy of {fit / 'last.ckpt'}, saved at step 4." in caplog.text
    assert "`test` uses the policy as it was loaded from arithmetic, without a checkpoint." in caplog.text
    assert "--ckpt_path last" not in caplog.text
    assert [step for step, _ in scalars(fit)["val/accuracy"]] == [0, 4, 4]
    assert [step for step, _ in scalars(later)["test/accuracy"]] == [4, 0]


class Judged:
    """An environment whose judge is asked by `get_reward`, and is down for some problems."""

    def reset(self, problem, down, **columns):
        self.down = down

    def look(self) -> str:
        """Look around."""
        return "nothing"

    def get_reward(self):
        return None if self.down else 1.0


@pytest.mark.filterwarnings("ignore:.*of the rollouts", "ignore:All .* groups", "ignore:`Preflight`")
@pytest.mark.parametrize("down", [(False, True), (True, True)])
def test_a_judge_that_is_down_lowers_no_accuracy_and_ends_no_run(down, tmp_path):
    task = EnvironmentTask(Judged)
    asked = [task.prompt({"problem": f"{k}+1", "down": how, "answer": None}) for k, how in enumerate(down)]
    data = torch.utils.data.DataLoader([asked], batch_size=None)
    up = [[task.prompt({"problem": "3+1", "down": False, "answer": None})] * 2] * 2
    made = trainer(
        2, *default_callbacks(), default_root_dir=tmp_path, enable_checkpointing=True, logger=board(tmp_path)
    )
    made.fit(module(), torch.utils.data.DataLoader(up, batch_size=None), data)
    figures = made.callback_metrics
    assert figures["val/verdict/unscored"] == sum(down) / 2
    assert figures["val/accuracy"].nan_to_num(-1) == (-1 if all(down) else 1), "NaN is never the best"
    assert ("val/accuracy" in scalars(tmp_path)) == (not all(down)), "no plot has NaN"
