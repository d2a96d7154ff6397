import warnings

import pytest
import torch

from grail_lightning.batch import Sampling
from grail_lightning.callbacks import Preflight
from grail_lightning.callbacks.preflight import sampler_problem, stuck_share, what_moves
from grail_lightning.credit.base import TokenWeights
from grail_lightning.engines import HFEngine
from grail_lightning.policy import Loading, LoRA
from grail_lightning.step.options import Distillation, Objective
from tests import runs
from tests.callbacks.scripted import LIMIT, Scripted, box, loader, prompts, run
from tests.processes import run_script
from tests.steps import configured
from tests.tolerance import roundings


def _said(say, max_steps=20, num_prompts=2, sampling=None, objective=None, **options):
    """The warnings of a run with two optimiser steps a batch."""
    module = Scripted(say)
    module.sampling = sampling or module.sampling
    module.objective, module.execution = configured(objective or {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(max_steps, Preflight(**options)).fit(module, loader(*[prompts(num_prompts)] * (max_steps // 2)))
    # Lightning itself remarks on the missing validation data.
    return [str(w.message) for w in caught if not ("val_dataloader" in str(w.message) or "LeafSpec" in str(w.message))]


def _mixed(prompt, k, step):
    return box(prompt.reference if k else "0")


def test_a_healthy_run_gets_no_warning():
    assert _said(_mixed) == []


def test_dead_groups_are_named_once_with_figures_and_a_remedy():
    (said,) = _said(lambda prompt, k, step: box("0"))
    assert "In each of the last 5 batches" in said
    assert "mean reward now 0;" in said
    assert "100% wrong" in said
    assert "`execution.group_size`" in said
    assert "every advantage is 0 and nothing is learned" in said


def test_dead_groups_of_mixed_verdicts_point_to_temperature_and_reward():
    """As where the temperature is next to nothing: one prompt is always right, the other always wrong."""
    (said,) = _said(lambda prompt, k, step: box("1"))
    assert "50% right" in said
    assert "raise `sampling.temperature`, or look at the reward function" in said
    assert "easier" not in said


def test_verdicts_of_dead_groups_are_those_of_the_dead_batches():
    """Half wrong for a while, then all right: the problems have become too easy, whatever came before."""
    (said,) = _said(lambda prompt, k, step: box(prompt.reference) if step >= 8 else _mixed(prompt, k, step))
    assert "verdicts of these batches: 100% right" in said
    assert "harder problems" in said


def test_dead_groups_are_not_said_to_learn_nothing_where_something_else_moves_the_policy():
    (said,) = _said(lambda prompt, k, step: box("0"), objective={"kl_coefficient": 0.1, "entropy_coefficient": 0.1})
    assert "every advantage is 0 and nothing but the KL term and the entropy bonus moves the policy" in said
    additive = TokenWeights(
        values=torch.ones(1, 1), fallback=torch.zeros(1, dtype=torch.bool), additive=torch.ones(1, 1)
    )
    assert what_moves(Objective(), additive) == "nothing but what the credit adds moves the policy"
    teacher = Objective(distillation=Distillation())
    assert what_moves(teacher, None) == "nothing but the distillation moves the policy"
    assert what_moves(Objective(distillation=Distillation(only_positive=True)), None) == "nothing is learned"


def test_rewards_that_bnpo_cannot_take_are_told_before_a_group_of_them_stops_the_run():
    class Penalised(Scripted):
        def rollouts(self, *arguments):
            batch = super().rollouts(*arguments)
            return batch.replace(rewards=batch.rewards - 0.25 * batch.correct.logical_not())

    def said(**options):
        module = Penalised(_mixed)
        module.objective = Objective(**options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(4, Preflight()).fit(module, loader(*[prompts(2)] * 2))
        return [str(w.message) for w in caught if "bnpo" in str(w.message)]

    (text,) = said(scale_rewards="bnpo")
    assert text.startswith("A reward of -0.25 lies outside [0, 1], and `objective.scale_rewards: bnpo` stops the run")
    assert said(scale_rewards="group") == []


def test_more_mini_batches_than_groups_are_told_once_with_figures():
    (said,) = _said(_mixed, objective={"mini_batches": 8})
    assert "`execution.mini_batches` 8 are more than the 2 groups" in said
    assert "6 of 8 optimiser steps have no rows" in said
    assert _said(_mixed, objective={"mini_batches": 2}) == []


def test_a_token_budget_below_one_row_is_told_once_with_the_row():
    length = len(Scripted(_mixed).policy.encode(prompts(1)[0].messages))
    (said,) = _said(_mixed, objective={"token_budget": length + LIMIT - 1})
    assert f"`execution.token_budget` {length + LIMIT - 1} is less than one row: a prompt of {length} tokens" in said
    assert f"Set it to {length + LIMIT} or more" in said
    assert _said(_mixed, objective={"token_budget": length + LIMIT}) == []


def test_dead_groups_must_come_in_a_row():
    # Dead in four batches, alive in the fifth (global step 8 before it), and so on.
    say = lambda prompt, k, step: _mixed(prompt, k, step) if step % 10 == 8 else box("0")  # noqa: E731
    assert _said(say, max_steps=40) == []
    assert len(_said(say, max_steps=40, patience=4)) == 1


def test_responses_that_never_end_point_to_the_end_token():
    said = _said(lambda prompt, k, step: None)
    assert len(said) == 2
    (endless,) = [text for text in said if "limit" not in text and "ended by itself" in text]
    assert f"all were cut at {LIMIT} tokens" in endless
    assert "`sampling.stop`" in endless
    (dead,) = [text for text in said if "same reward" in text]
    assert "100% missing" in dead


def test_responses_that_ended_once_point_to_the_limit():
    said = _said(lambda prompt, k, step: None if step >= 2 else _mixed(prompt, k, step))
    (truncated,) = [text for text in said if "hit the limit" in text]
    assert f"the limit of {LIMIT} tokens" in truncated
    assert not any("ended by itself" in text for text in said)


def _slow_once(prompt, k, step):
    """One answer of the third batch (two optimiser steps each) times out."""
    return box("slow") if (prompt.reference, k, step) == ("1", 0, 4) else _mixed(prompt, k, step)


def test_timeouts_beyond_one_percent_of_a_batch_are_named_once():
    # 10 prompts with 2 samples: one of 20 verdicts is 5 %, whatever the batches before were like.
    (said,) = _said(_slow_once, num_prompts=10)
    assert "1 of the 20 answers of this batch (5.0%) could not be graded: 1 timed out, 0 crashed" in said
    in_each = lambda prompt, k, step: box("slow") if (prompt.reference, k) == ("1", 0) else _mixed(prompt, k, step)  # noqa: E731
    assert len(_said(in_each, num_prompts=10)) == 1
    assert _said(in_each, num_prompts=10, most_timeouts=0.05) == []


def test_one_percent_of_a_batch_may_time_out():
    # 50 prompts with 2 samples: one of 100 verdicts is not more than 1 %.
    assert _said(_slow_once, max_steps=6, num_prompts=50) == []
    assert len(_said(_slow_once, max_steps=6, num_prompts=49)) == 1  # one of 98


TWO_RANKS = """
import os, sys, types, warnings
import torch, torch.distributed as dist
from grail_lightning.callbacks import Preflight
from grail_lightning.step.options import Objective
from grail_lightning.step.outputs import StepOutput

rank, store = int(os.environ["RANK"]), sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
# Rank 0 alone warns. Its 60 answers are all graded; of the 40 of rank 1 one timed out: 1 of 100. Then two of them did.
statuses = [["right"] * 60] * 2 if rank == 0 else [["right"] * 39 + ["timeout"], ["right"] * 38 + ["timeout"] * 2]
figures = {"frac_reward_zero_std": 0.0, "completions/clipped_ratio": 0.0, "reward": 1.0}
watch, trainer = Preflight(), types.SimpleNamespace(optimizers=[torch.optim.SGD([torch.zeros(1)], lr=1.0)])
for batch in statuses:
    verdicts = [types.SimpleNamespace(status=status) for status in batch]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs = {"output": StepOutput(types.SimpleNamespace(verdicts=verdicts), None, figures)}
        watch.on_train_batch_end(trainer, types.SimpleNamespace(objective=Objective()), outputs, [], 0)
    print([str(w.message)[:75] for w in caught], flush=True)
dist.destroy_process_group()
"""


def test_timeouts_are_shares_over_all_ranks(tmp_path):
    (tmp_path / "two_ranks.py").write_text(TWO_RANKS)
    said = [rank.stdout.splitlines() for rank in run_script(tmp_path / "two_ranks.py", tmp_path / "store", ranks=2)]
    assert said[0] == ["[]", "['2 of the 100 answers of this batch (2.0%) could not be graded: 2 timed out,']"]
    assert said[1] == ["[]", "[]"]


def test_a_sampler_that_is_not_the_policy_is_named():
    own = Sampling(max_response_length=LIMIT, top_p=0.95, top_k=50)
    (said,) = _said(_mixed, sampling=own)
    assert "`sampling.top_p` 0.95 and `sampling.top_k` 50" in said
    assert sampler_problem(Sampling(max_response_length=8, top_k=3)).startswith(
        "Training samples with `sampling.top_k`"
    )
    assert "greedily" in sampler_problem(Sampling(max_response_length=8, temperature=0))
    assert sampler_problem(Sampling(max_response_length=8, temperature=0.7)) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [({"patience": 0}, "`patience` must be at least 1"), ({"most_timeouts": 2}, r"must lie in \[0, 1\], but got 2")],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Preflight(**options)


def test_stuck_weights_are_counted_as_bfloat16_rounds():
    # bfloat16 has 8 significant bits: beside 1 (and above) 0.001 is less than half a step, beside 0.01 it is not.
    half = torch.nn.Parameter(torch.tensor([1.0, 2.0, -4.0, 0.01], dtype=torch.bfloat16))
    assert stuck_share([half], 1e-3) == 0.75
    assert stuck_share([half.float()], 1e-3) == 0
    assert (
        stuck_share([half.float()], 1e-8) == 0.75
    )  # Half a step of float32 beside 1 is 6e-8, beside 0.01 it is 5e-10.
    frozen = torch.nn.Parameter(half.detach().clone(), requires_grad=False)
    assert stuck_share([frozen, half], 1e-3) == 0.75
    assert stuck_share([], 1e-3) == 0


@pytest.mark.parametrize(("masters", "rate", "warns"), [(False, 1e-7, True), (False, 0.1, False), (True, 1e-7, False)])
def test_weights_too_coarse_for_the_learning_rate_are_told_before_the_first_step(masters, rate, warns):
    loading = Loading(dtype="bfloat16", master_weights=masters)
    module = runs.module(loading=loading, optimizer=lambda p: torch.optim.SGD(p, lr=rate))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs.trainer(1, Preflight()).fit(module, runs.batches(1))
    said = [str(w.message) for w in caught if "cannot take a step of the learning rate" in str(w.message)]
    assert len(said) == warns
    if warns:
        assert "the learning rate 1e-07" in said[0]
        assert "`--trainer.precision=bf16-mixed`" in said[0]


def _told(about, objective, changes, steps=1, **options):
    """The warnings of a short run of the real module that have `about` in them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs.trainer(steps, Preflight(**options)).fit(runs.module(objective, **changes), runs.batches(steps))
    return [str(w.message) for w in caught if about in str(w.message)]


def test_weights_that_round_at_random_are_not_stuck():
    class Random(torch.optim.SGD):
        """Like torchao's, as far as one can see from outside."""

        bf16_stochastic_round = True

    loading = Loading(dtype="bfloat16", master_weights=False)
    plain, random = ({"loading": loading, "optimizer": lambda p, k=k: k(p, lr=1e-7)} for k in (torch.optim.SGD, Random))
    (said,) = _told("cannot take a step", {}, plain)
    assert "`bf16_stochastic_round: true`" in said
    assert _told("cannot take a step", {}, random) == []


def test_float32_weights_are_told_to_take_a_larger_rate():
    options = {"optimizer": lambda p: torch.optim.SGD(p, lr=1e-12)}
    (said,) = _told("cannot take a step", {}, options)
    assert "too small even for float32. Raise the learning rate" in said
    assert "half precision" not in said


@pytest.mark.parametrize(
    ("rate", "factor", "warns"),
    [(0.0, None, 1), (1e-4, lambda step: 0.0, 1), (1e-4, lambda step: min(step / 3, 1), 0)],
    ids=["no rate", "factor 0", "warm-up from 0"],
)
def test_a_learning_rate_that_stays_at_0_is_told(rate, factor, warns):
    options = {"optimizer": lambda p: torch.optim.SGD(p, lr=rate)}
    if factor is not None:
        options["scheduler"] = lambda o: torch.optim.lr_scheduler.LambdaLR(o, factor)
    said = _told("The learning rate was 0", {}, options, steps=4, patience=2)
    assert len(said) == warns
    assert all("in each of the last 2 batches with a gradient (norm now" in text for text in said)


@pytest.mark.parametrize(
    ("objective", "dropout", "compared"),
    [
        ({"updates_per_batch": 2}, 0.3, "the policy before the 2 optimiser steps of a batch and the sampler have none"),
        ({"kl_coefficient": 0.1}, 0.3, "the reference of the KL term and the sampler have none"),
        ({}, 0.3, None),
        ({"updates_per_batch": 2}, 0.0, None),
    ],
)
def test_dropout_is_told_where_the_update_compares_policies(objective, dropout, compared):
    said = _told("Dropout is on", objective, {"loading": Loading(lora=LoRA(rank=2, dropout=dropout))})
    assert len(said) == (compared is not None)
    assert all(f"Dropout is on in the update, but {compared}" in text for text in said)


def test_a_sampler_gap_is_not_advised_to_be_corrected_when_it_already_is():
    (said,) = _told("Sampler and trainer differ", {"sampler_cap": 2.0}, {"engine": Elsewhere()}, most_sampler_gap=0.001)
    assert "precision of training." in said
    assert "sampler_cap" not in said


class Elsewhere(HFEngine):
    """Says of its own tokens that they were more likely than the policy finds them."""

    def generate(self, *arguments):
        batch = super().generate(*arguments)
        return batch.replace(sampling_logprobs=batch.sampling_logprobs * 0.2)


@pytest.mark.parametrize("engine", [HFEngine(), Elsewhere()])
def test_a_sampler_that_is_not_the_trainer_is_told_with_the_difference(engine):
    watch = runs.Watch()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs.trainer(2, Preflight(most_sampler_gap=0.001), watch).fit(runs.module(engine=engine), runs.batches(2))
    said = [str(w.message) for w in caught if "Sampler and trainer differ" in str(w.message)]
    gap = watch.outputs[0].metrics["sampling/sampling_logp_difference/mean"]
    if type(engine) is HFEngine:
        assert 0 <= gap < roundings(100, torch.float32)
        assert said == []
    else:
        batch = watch.outputs[0].batch
        live = (batch.advantages != 0) & batch.finished
        mask = batch.response_mask & live[:, None]
        # 0.2·lp differs from lp by 0.8·|lp|, and what is reported is 0.2·lp.
        assert gap == pytest.approx((4 * batch.sampling_logprobs.abs())[mask].mean().item(), rel=1e-3)
        assert len(said) == 1
        assert "`execution.sampler_cap: 2`" in said[0]
