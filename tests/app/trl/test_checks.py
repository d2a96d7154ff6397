"""What does not go with token credit is one line when the trainer is made; and the names of TRL that are needed."""

import inspect
from types import SimpleNamespace

import pytest
import torch

import grail_lightning.credit as credits
from grail_lightning.app.trl import checks
from grail_lightning.app.trl.checks import check_run
from grail_lightning.credit import GRAIL, Judge, SaliencyOptions, SpanScores, TreeAdvantage, Uniform
from tests.trl_trainers import OF_TRL, GRPOTrainer, TokenCreditGRPOTrainer, right, trainer_of, trl

pytestmark = OF_TRL


def second(completions, **columns):
    return [0.0] * len(completions)


JUDGE = Judge(url="http://127.0.0.1:9", model="none")
REFUSED = {  # Arguments of the trainer, options of `GRPOConfig`, and the beginning of the message.
    "a second model": ({"credit": credits.PRIME()}, {"beta": 0.1}, "got `PRIME`, which trains a second model"),
    "an engine": ({"credit": credits.Resampled()}, {}, "got `Resampled`, which samples with the rollout engine"),
    "scores of turns": ({"credit": credits.TurnRewards()}, {}, "reads no scores of turns, but got `TurnRewards`"),
    "scores of a critic": ({"credit": credits.CriticSearch()}, {}, "reads no scores of turns, but got `CriticSearch`"),
    "scores of a judge": ({"credit": SpanScores(judge=JUDGE)}, {}, "reads no scores of turns, but got `SpanScores`"),
    "a reference": ({"credit": credits.DGPO()}, {}, "needs no reference, since this run has none, but got `DGPO`"),
    "a wrapped method": (
        {"credit": credits.PermutedRewards(credits.TurnRewards())}, {}, "scores of turns, but got `TurnRewards`",
    ),
    "the ratio of a sequence": (
        {"credit": TreeAdvantage()}, {"importance_sampling_level": "sequence"},
        "`importance_sampling_level` must be token with token credit, but got sequence",
    ),
    "the mask of sequences": (
        {"credit": TreeAdvantage()}, {"off_policy_mask_threshold": 0.5},
        "`off_policy_mask_threshold` must be None with token credit, but got 0.5",
    ),
    "weights for each step": (
        {"credit": GRAIL(saliency=SaliencyOptions(refresh="step"))}, {"num_iterations": 2},
        "must have `refresh` batch where a generation has several optimiser steps, but got `GRAIL` with step",
    ),
    "who is right": (
        {"credit": credits.LESS(), "reward_funcs": [right, second]}, {},
        "`correct_func` must be given with `LESS`, which reads which completions are right, and 2 reward functions",
    ),
    "who is right, of a control": (
        {"credit": Uniform(), "credit_control": credits.Balanced(), "reward_funcs": [right, second]}, {},
        "`correct_func` must be given with `Balanced`",
    ),
    "a column": (
        {"credit": credits.RLSD(), "reference_column": "answer"}, {},
        "which `RLSD` reads, but got 'answer', and the dataset has prompt, problem, solution",
    ),
    "programs": ({"credit": credits.EGCA()}, {}, "EGCA"),
    "a class": ({"credit": GRAIL}, {}, "`credit` must be an instance of `TokenCredit`, but got <class"),
    "a class of a control": (
        {"credit": GRAIL(), "credit_control": credits.Shuffled}, {}, "`credit_control` must be an instance",
    ),
    "a class of a task": ({"credit": GRAIL(), "credit_task": dict}, {}, "`credit_task` must be an instance of `Task`"),
    "a batch": ({"credit": GRAIL(), "credit_batch_size": -1}, {}, "`credit_batch_size` must be at least 1, but got -1"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_go_with_token_credit_is_refused_when_the_trainer_is_made(what, tmp_path):
    arguments, args, message = REFUSED[what]
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message follows)
        trainer_of(tmp_path, args=args, **arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_needs_more_machines_or_another_release_is_refused_too(tmp_path, monkeypatch):
    """Attributes stand for what cannot be had here: DeepSpeed, FSDP1 and older releases."""
    made = trainer_of(tmp_path, credit=GRAIL(), reward_funcs=[right, second])
    check_run(made)
    made.num_generations = 5
    with pytest.raises(ValueError, match=r"must be a multiple of `num_generations`.* but got 16 and 5"):
        check_run(made)
    made.num_generations = 4
    made.args.use_liger_loss = True
    with pytest.raises(ValueError, match="`use_liger_loss` must be False"):
        check_run(made)
    made.args.use_liger_loss = False
    made.args.deepspeed_plugin = SimpleNamespace(zero_stage=3)
    with pytest.raises(ValueError, match="under ZeRO-3, whose weights are not whole, but got `GRAIL`"):
        check_run(made)
    made.args.deepspeed_plugin = None
    with monkeypatch.context() as patch:
        patch.setitem(made.accelerator.state.__dict__, "fsdp_plugin", SimpleNamespace(fsdp_version=1))
        with pytest.raises(ValueError, match="under FSDP1, but got `GRAIL`"):
            check_run(made)
        made.credit = TreeAdvantage()  # It runs no model.
        check_run(made)
    monkeypatch.setattr(checks, "version", lambda name: "1.15.0")
    with pytest.raises(ImportError, match=r"needs TRL 1.16 or later, but got 1.15.0. Run: pip install"):
        checks.check_release()


def test_a_remark_of_the_method_is_a_warning(tmp_path):
    class Remarking(TreeAdvantage):
        def check_prompts(self, sets):
            (prompts,) = sets
            return f"There are {len(prompts)} prompts, such as {prompts[0].messages!r} of {prompts[0].reference}."

    with pytest.warns(UserWarning, match=r"There are 16 prompts, such as 'Compute .*' of -?\d+\."):
        trainer_of(tmp_path, credit=Remarking())


# --- the contract with TRL --------------------------------------------------------------------------------------------

CALLED = {  # What is overridden, with the arguments that are relied on.
    "_generate_and_score_completions": ["self", "inputs"],
    "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
}
READ = (  # Of a trainer that was made.
    *("model", "ref_model", "accelerator", "args", "state", "processing_class", "tools", "environments"),
    *("reward_funcs", "reward_weights", "num_generations", "num_iterations", "scale_rewards", "temperature"),
    *("importance_sampling_level", "off_policy_mask_threshold", "mask_truncated_completions", "eos_token_ids"),
    *("chat_template_kwargs", "callback_handler", "is_fsdp_enabled", "train_dataset", "_metrics"),
)
OURS = (
    *("credit", "credit_control", "correct_func", "credit_task", "reference_column", "credit_batch_size"),
    *("credit_prompt", "_credit_policy", "_credit_reference", "_credit_scored", "_credit_tokenizer"),
    *("_credit_correct", "_credit_rollouts", "_credit_episodes"),
)


def test_trl_has_the_names_that_token_credit_relies_on_and_none_of_ours(tmp_path):
    made = trainer_of(tmp_path, GRPOTrainer)
    changed = f"TRL {trl.__version__} has changed: grail_lightning/app/trl/trainer.py must follow, since"
    for name, arguments in CALLED.items():
        found = [*inspect.signature(getattr(GRPOTrainer, name)).parameters]
        assert found == arguments, f"{changed} `{name}` has the arguments {found}, not {arguments}."
    assert "resume_from_checkpoint" in inspect.signature(GRPOTrainer.train).parameters, f"{changed} `train` resumes."
    missing = [name for name in READ if not hasattr(made, name)]
    assert not missing, f"{changed} the trainer has no {missing}."
    taken = [name for name in OURS if hasattr(made, name) or hasattr(GRPOTrainer, name)]
    assert not taken, f"{changed} the trainer has {taken} of its own: give ours other names."
    with_credit = trainer_of(tmp_path, credit=GRAIL())
    added = {*vars(with_credit)} - {*vars(made)}
    assert added <= {*OURS}, f"{added} must be in the list above, so that they are known to be free"
    defined = {name for kind in TokenCreditGRPOTrainer.__mro__[:2] for name in vars(kind) if not name.startswith("__")}
    assert defined - {*CALLED, "train"} <= {*OURS}
    made.model.train()
    output = made._generate_and_score_completions([made.train_dataset[k // 4] for k in range(16)])
    needed = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"}
    assert needed <= output.keys(), f"{changed} a generation returns no {needed - output.keys()}."
    assert output["advantages"].shape == (16,), f"{changed} advantages have the shape {output['advantages'].shape}."
    made.current_gradient_accumulation_steps = 1
    wide = output["advantages"][:, None].expand(output["completion_ids"].shape)
    losses = [made._compute_loss(made.model, output | {"advantages": a}) for a in (output["advantages"], wide)]
    assert torch.equal(*losses), f"{changed} its loss takes no advantages of tokens."
