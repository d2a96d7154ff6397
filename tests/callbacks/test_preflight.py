"""Runs that cannot learn say so once, with figures and a remedy; others say nothing."""

import warnings

import pytest
import torch
from transformers import MiniMaxConfig

from grail_lightning.batch import Sampling
from grail_lightning.callbacks import Preflight
from grail_lightning.callbacks.preflight import stuck_share
from grail_lightning.data import ArithmeticData
from grail_lightning.engines import HFEngine
from grail_lightning.module import GrailModule
from grail_lightning.policy import Loading, LoRA, load_tokenizer
from grail_lightning.step.options import Objective
from grail_lightning.tasks import ArithmeticTask
from grail_lightning.tasks.rewards import RewardSpec
from tests import runs
from tests.architectures import SIZES
from tests.callbacks.scripted import LIMIT, Scripted, box, loader, prompts, run
from tests.processes import run_script
from tests.steps import configured
from tests.tolerance import roundings


def _warnings(fit):
    """The warnings of a fit, but for Lightning's own about missing validation data and trees."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit()
    texts = [str(warning.message) for warning in caught]
    return [text for text in texts if "val_dataloader" not in text and "LeafSpec" not in text]


def _said(say, max_steps=20, num_prompts=2, sampling=None, objective=None, make=Scripted, patience=5):
    """The warnings of a run with two optimiser steps a batch."""
    module = make(say)
    module.sampling = sampling or module.sampling
    module.objective, module.execution = configured(objective or {})
    data = loader(*[prompts(num_prompts)] * (max_steps // 2))
    return _warnings(lambda: run(max_steps, Preflight(patience)).fit(module, data))


def _mixed(prompt, k, step):
    return box(prompt.reference if k else "0")


def _become_easy(prompt, k, step):
    return box(prompt.reference) if step >= 8 else _mixed(prompt, k, step)


def _dead_in_four_of_five(prompt, k, step):
    return _mixed(prompt, k, step) if step % 10 == 8 else box("0")


def _slow_once(prompt, k, step):
    """One answer of the third batch (two optimiser steps each) times out."""
    return box("slow") if (prompt.reference, k, step) == ("1", 0, 4) else _mixed(prompt, k, step)


class Penalised(Scripted):
    """A wrong answer costs a quarter."""

    def rollouts(self, *arguments):
        batch = super().rollouts(*arguments)
        return batch.replace(rewards=batch.rewards - 0.25 * batch.correct.logical_not())


@pytest.mark.parametrize(
    ("say", "options", "parts"),
    [
        pytest.param(_mixed, {}, [], id="a healthy run"),
        pytest.param(
            lambda *_: box("0"),
            {},
            [["In each of the last 5 batches", "reward now 0;", "100% wrong", "every advantage is 0", "group_size`"]],
            id="dead groups",
        ),
        pytest.param(_become_easy, {}, [["verdicts of these batches: 100% right"]], id="those of the dead batches"),
        pytest.param(_dead_in_four_of_five, {"max_steps": 40, "patience": 4}, [["last 4 batches"]], id="four in a row"),
        pytest.param(
            lambda *_: None,
            {},
            [
                ["same reward", "100% missing"],
                [f"at the limit of {LIMIT} tokens", "`sampling.stop`", "end token '<"],
            ],
            id="endless",
        ),
        # 10 prompts with 2 samples: one of 20 verdicts is 5 %, whatever the batches before were like.
        pytest.param(
            _slow_once,
            {"num_prompts": 10},
            [["1 of the 20 answers of this batch (5.0%) could not be graded: 1 timed out, 0 crashed"]],
            id="a time-out",
        ),
        pytest.param(
            _mixed,
            {"objective": {"mini_batches": 8}},
            [["`execution.mini_batches` 8 are more than the 2 groups", "6 of 8 optimiser steps have no rows"]],
            id="mini-batches",
        ),
        pytest.param(_mixed, {"objective": {"mini_batches": 2}}, [], id="just enough of them"),
        pytest.param(
            _mixed,
            {"objective": {"scale_rewards": "bnpo"}, "make": Penalised},
            [["A reward of -0.25 lies outside [0, 1], and `objective.scale_rewards: bnpo` stops the run"]],
            id="rewards that BNPO cannot take",
        ),
        pytest.param(
            _mixed,
            {"sampling": Sampling(max_response_length=LIMIT, top_p=0.95, top_k=50)},
            [["`sampling.top_p` 0.95 and `sampling.top_k` 50"]],
            id="a sampler that is not the policy",
        ),
        pytest.param(
            _mixed,
            {"sampling": Sampling(max_response_length=LIMIT, temperature=0)},
            [["Training samples greedily"]],
            id="a greedy sampler",
        ),
    ],
)
def test_a_run_that_cannot_learn_is_told_once_and_others_nothing(say, options, parts):
    said = _said(say, **options)
    assert len(said) == len(parts), said
    for text, expected in zip(said, parts, strict=True):
        assert all(part in text for part in expected), text


TWO_RANKS = """
import os, sys, types, warnings
import torch, torch.distributed as dist
from grail_lightning.batch import Sampling
from grail_lightning.callbacks import Preflight
from grail_lightning.step.options import Execution, Objective
from grail_lightning.step.outputs import StepOutput

rank, store = int(os.environ["RANK"]), sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
# Rank 0 alone warns. Its 60 answers are all graded; of the 40 of rank 1 one timed out: 1 of 100. Then two of them did.
statuses = [["right"] * 60] * 2 if rank == 0 else [["right"] * 39 + ["timeout"], ["right"] * 38 + ["timeout"] * 2]
figures = {"frac_reward_zero_std": 0.0, "completions/clipped_ratio": 0.0, "reward": 1.0}
watch, trainer = Preflight(), types.SimpleNamespace(optimizers=[torch.optim.SGD([torch.zeros(1)], lr=1.0)])
module = types.SimpleNamespace(objective=Objective(), execution=Execution(), sampling=Sampling(max_response_length=9))
module.tokenizer = types.SimpleNamespace(eos_token="")
for batch in statuses:
    verdicts = [types.SimpleNamespace(status=status) for status in batch]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs = {"output": StepOutput(types.SimpleNamespace(verdicts=verdicts), None, figures)}
        watch.on_train_batch_end(trainer, module, outputs, [], 0)
    print([str(w.message)[:75] for w in caught], flush=True)
dist.destroy_process_group()
"""


def test_timeouts_are_shares_over_all_ranks(tmp_path):
    (tmp_path / "two_ranks.py").write_text(TWO_RANKS)
    said = [rank.stdout.splitlines() for rank in run_script(tmp_path / "two_ranks.py", tmp_path / "store", ranks=2)]
    assert said[0] == ["[]", "['2 of the 100 answers of this batch (2.0%) could not be graded: 2 timed out,']"]
    assert said[1] == ["[]", "[]"]


def test_stuck_weights_are_counted_as_bfloat16_rounds():
    # bfloat16 has 8 significant bits: beside 1 (and above) 0.001 is less than half a step, beside 0.01 it is not.
    half = torch.nn.Parameter(torch.tensor([1.0, 2.0, -4.0, 0.01], dtype=torch.bfloat16))
    assert stuck_share([half], 1e-3) == 0.75
    assert stuck_share([half.float()], 1e-3) == 0
    # Half a step of float32 beside 1 is 6e-8, beside 0.01 it is 5e-10.
    assert stuck_share([half.float()], 1e-8) == 0.75
    frozen = torch.nn.Parameter(half.detach().clone(), requires_grad=False)
    assert stuck_share([frozen, half], 1e-3) == 0.75
    assert stuck_share([], 1e-3) == 0


class Elsewhere(HFEngine):
    """Says of its own tokens that they were less likely than the policy finds them."""

    def generate(self, *arguments):
        batch = super().generate(*arguments)
        return batch.replace(sampling_logprobs=batch.sampling_logprobs * 3)


def _rate(rate, kind=torch.optim.SGD, **loading):
    """A module's options: the learning rate, and bfloat16 with or without masters."""
    options = {"optimizer": lambda p: kind(p, lr=rate)}
    return options | ({"loading": Loading(dtype="bfloat16", **loading)} if loading else {})


def _scheduled(factor):
    return _rate(1e-4) | {"scheduler": lambda o: torch.optim.lr_scheduler.LambdaLR(o, factor)}


def _dropout(rate):
    return {"loading": Loading(lora=LoRA(rank=2, dropout=rate))}


STUCK, RATE, DROPOUT = "cannot take a step of the learning rate", "The learning rate was 0", "Dropout is on"
GAP = "Sampler and trainer differ"


@pytest.mark.parametrize(
    ("about", "objective", "changes", "part"),
    [
        (STUCK, {}, _rate(1e-7, master_weights=False), "rate 1e-07: "),
        (STUCK, {}, _rate(1e-7, master_weights=True), None),
        (STUCK, {}, _rate(1e-12), "too small even for float32. Raise the learning rate"),
        (RATE, {}, _scheduled(lambda step: 0.0), "in each of the last 2 batches with a gradient (norm now"),
        (RATE, {}, _scheduled(lambda step: min(step / 3, 1)), None),
        (
            DROPOUT,
            {"updates_per_batch": 2, "kl_coefficient": 0.1},
            _dropout(0.3),
            "the policy before the 2 optimiser steps of a batch and the reference of the KL term and the sampler have",
        ),
        (DROPOUT, {"updates_per_batch": 2}, _dropout(0.0), None),
        (GAP, {"sampler_cap": 2.0}, {"engine": Elsewhere()}, "Sample in the precision of training."),
    ],
)
def test_the_real_module_is_told_what_keeps_it_from_learning(about, objective, changes, part):
    steps = 3 if about == RATE else 1
    module = runs.module(objective, **changes)
    said = _warnings(lambda: runs.trainer(steps, Preflight(2)).fit(module, runs.batches(steps)))
    said = [text for text in said if about in text]
    assert len(said) == (part is not None)
    assert all(part in text for text in said)


@pytest.mark.parametrize("masked", [True, False])
def test_a_penalty_of_length_that_cannot_reach_responses_that_are_cut_is_told(masked):
    penalty = RewardSpec(function="overlong", arguments={"limit": 8, "buffer": 4}, name="length")
    data = ArithmeticData(num_train=2, num_val=2, prompts_per_batch=1, task=ArithmeticTask(rewards=[penalty]))
    module = runs.module({"mask_truncated": masked}, sampling=Sampling(max_response_length=8))
    said = _warnings(lambda: runs.trainer(1, Preflight(), limit_val_batches=0).fit(module, data))
    told = [text for text in said if "The reward `length` is lowest for responses that are cut" in text]
    assert len(told) == masked


class Lengths(ArithmeticTask):
    """The reward is whether a response has an even number of characters, which random weights reach."""

    def reward(self, texts, prompts, verdicts):
        return [float(len(text) % 2 == 0) for text in texts]


@pytest.mark.filterwarnings("ignore:.*by Transformers' `generate`")
def test_a_model_that_samples_otherwise_than_it_trains_stops_the_run(tmp_path):
    """MiniMax's state for linear attention goes wrong behind prompts that are padded on the left."""
    options = {
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    }
    MiniMaxConfig(**SIZES | {"pad_token_id": 0, "attention_dropout": 0.0} | options).save_pretrained(tmp_path)
    load_tokenizer("arithmetic").save_pretrained(tmp_path)
    loading, sampling = Loading(from_scratch=True), Sampling(max_response_length=16)
    module = GrailModule(str(tmp_path), loading=loading, sampling=sampling, objective=Objective(mask_truncated=False))
    task = Lengths()
    data = [[task.prompt({"problem": expression}) for expression in ("1+1", "11+12-13", "1+2+3+4")]]
    with pytest.raises(ValueError, match=r"the same weights\. MiniMaxForCausalLM computes otherwise from its cache"):
        runs.trainer(1, Preflight()).fit(module, torch.utils.data.DataLoader(data, batch_size=None))


def test_the_difference_between_sampler_and_trainer_is_measured():
    watch = runs.Watch()
    trainer = runs.trainer(2, Preflight(), watch)
    said = _warnings(lambda: trainer.fit(runs.module(engine=Elsewhere()), runs.batches(2)))
    assert len([text for text in said if "`execution.sampler_cap: 2`" in text]) == 1
    batch = watch.outputs[0].batch
    mask = batch.response_mask & ((batch.advantages != 0) & batch.finished)[:, None]
    # 3·lp differs from lp by 2·|lp|, and what is reported is 3·lp.
    gap = watch.outputs[0].metrics["sampling/sampling_logp_difference/mean"]
    assert gap == pytest.approx((2 / 3 * batch.sampling_logprobs.abs())[mask].mean().item(), rel=1e-3)
    same = runs.Watch()
    said = _warnings(lambda: runs.trainer(1, Preflight(), same).fit(runs.module(), runs.batches(1)))
    assert not [text for text in said if GAP in text]
    assert 0 <= same.outputs[0].metrics["sampling/sampling_logp_difference/mean"] < roundings(100, torch.float32)
