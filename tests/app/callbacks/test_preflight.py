"""Runs that cannot learn say so once, with figures and a remedy; others say nothing."""

import warnings

import pytest
import torch
from transformers import MiniMaxConfig

from grail_lightning import (
    BNPO,
    ArithmeticData,
    ArithmeticTask,
    DrGRPO,
    Execution,
    GrailModule,
    HFEngine,
    Loading,
    LoRA,
    MathData,
    Preflight,
    RewardSpec,
    Sampling,
)
from grail_lightning.app.callbacks.preflight import stuck_share
from grail_lightning.app.callbacks.prompt_checks import unequal_mini_batches
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.policy.source import load_tokenizer
from grail_lightning.core.step.execution import resolve_cap
from tests import runs
from tests.app.callbacks.scripted import LIMIT, Scripted, box, loader, prompts, run
from tests.architectures import SIZES
from tests.steps import configured
from tests.tolerance import roundings


def _warnings(fit):
    """The warnings of a fit, but for Lightning's own about missing validation data and trees."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit()
    texts = [str(warning.message) for warning in caught]
    return [text for text in texts if "val_dataloader" not in text and "LeafSpec" not in text]


def _said(say, num_prompts=2, sampling=None, make=Scripted, advantage=None, **objective):
    """The warnings of a run of four batches with two optimiser steps each, about what is so in two of them in a row."""
    module = make(say)
    module.sampling = sampling or module.sampling
    module.objective, module.execution = configured(objective)
    module.sampler_cap = resolve_cap(module.execution.sampler_cap, copies_weights=False)
    module.advantage = advantage or module.advantage
    return _warnings(lambda: run(8, Preflight(2)).fit(module, loader(*[prompts(num_prompts)] * 4)))


def _mixed(prompt, k, step):
    return box(prompt.reference if k else "0")


def _wrong(prompt, k, step):
    return box("0")


def _become_easy(prompt, k, step):
    return box(prompt.reference) if step >= 4 else _mixed(prompt, k, step)


def _dead_now_and_then(prompt, k, step):
    return _mixed(prompt, k, step) if step % 4 == 2 else box("0")


def _slow(prompt, k, step):
    """One answer of the first batch times out, and two of the second."""
    late = k == 0 and int(prompt.reference) <= 1 + step / 2 and step < 4
    return box("slow") if late else _mixed(prompt, k, step)


class Penalised(Scripted):
    """A wrong answer costs a quarter."""

    def rollouts(self, *arguments):
        batch = super().rollouts(*arguments)
        return batch.replace(rewards=batch.rewards - 0.25 * batch.correct.logical_not())


UNEQUAL = "2 of 4 optimiser steps have 2, the others 1, and all count alike. Set it to one of 1, 2, 3, 6, or"
TOP_P = {"sampling": Sampling(max_response_length=LIMIT, top_p=0.95, top_k=50)}


@pytest.mark.parametrize(
    ("say", "options", "parts"),
    [
        (_mixed, {"mini_batches": 2}, []),
        (_wrong, {}, [["In each of the last 2 batches", "reward now 0;", "100% wrong", "every advantage is 0"]]),
        (_become_easy, {}, [["verdicts of these batches: 100% right"]]),
        (_dead_now_and_then, {}, []),
        (lambda *_: None, {}, [["100% missing"], [f"limit of {LIMIT} tokens", "`sampling.stop`", "end token '<"]]),
        (_slow, {"num_prompts": 50}, [["2 of the 100 answers of this batch (2.0%)", ": 2 timed out, 0 crashed"]]),
        (_mixed, {"num_prompts": 6, "mini_batches": 3}, []),
        (
            _mixed,
            {"num_prompts": 6, "mini_batches": 4},
            [["`execution.mini_batches` 4 deals the 6 groups of a rank's batch unequally", UNEQUAL]],
        ),
        (
            _mixed,
            {"mini_batches": 3, "split_groups": True, "group_size": 2},
            [
                [
                    "deals the 4 rollouts of a batch unequally",
                    "1 of 3 optimiser steps have 2, the others 1",
                    "one of 2, 4, or",
                ]
            ],
        ),
        (_mixed, {"mini_batches": 8}, [["mini_batches` 8 are more than the 2 groups", "6 of 8 optimiser steps"]]),
        (_mixed, {"advantage": BNPO(), "make": Penalised}, [["A reward of -0.25 lies outside [0, 1]", "BNPO"]]),
        (_mixed, TOP_P, [["`sampling.top_p` 0.95 and `sampling.top_k` 50"]]),
    ],
)
def test_a_run_that_cannot_learn_is_told_once_and_others_nothing(say, options, parts):
    said = _said(say, **options)
    assert len(said) == len(parts), said
    for text, expected in zip(said, parts, strict=True):
        assert all(part in text for part in expected), text


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


STUCK, RATE, DROPOUT = "cannot take a step of the learning rate", "The learning rate was 0", "Dropout is on"
GAP = "Sampler and trainer differ"
COMPARED = {"num_iterations": 2, "kl_coefficient": 0.1, "sampler_cap": 2.0}
COMPARES = "the policy before the 2 optimiser steps of a batch and the reference of the KL term and what `execution.sam"
BRIEF = {"sampling": Sampling(max_response_length=3)}
ALWAYS = {"entropy_coefficient": 0.1, "mask_truncated": False}  # Every row has a gradient.


@pytest.mark.parametrize(
    ("steps", "objective", "changes", "parts"),
    [
        (1, {}, _rate(1e-7, master_weights=False) | BRIEF, {STUCK: "rate 1e-07: "}),
        (1, {"num_iterations": 2}, _rate(1e-7, master_weights=True, lora=LoRA(rank=2, dropout=0.0)) | BRIEF, {}),
        (1, COMPARED, {"loading": Loading(lora=LoRA(rank=2, dropout=0.3))} | BRIEF, {DROPOUT: COMPARES}),
        (
            1,
            {"sampler_cap": 2.0},
            _rate(1e-12) | {"engine": Elsewhere()},
            {STUCK: "even for float32. Raise the", GAP: "Sample in the precision of training."},
        ),
        (3, ALWAYS, _scheduled(lambda step: 0.0) | BRIEF, {RATE: "of the last 2 batches with a gradient (norm now"}),
        (3, ALWAYS, _scheduled(lambda step: min(step / 3, 1)) | BRIEF, {}),
    ],
)
def test_the_real_module_is_told_what_keeps_it_from_learning(steps, objective, changes, parts):
    module = runs.module(objective, **changes)
    said = _warnings(lambda: runs.trainer(steps, Preflight(2)).fit(module, runs.batches(steps)))
    for about in (STUCK, RATE, DROPOUT, GAP):
        told = [text for text in said if about in text]
        assert len(told) == (about in parts)
        assert all(parts[about] in text for text in told)


def _fits(data, folder=None, steps=0, **changes):
    """What `Preflight` says at the start of a fit, before its first batch."""
    module = runs.module(**changes) if folder is None else GrailModule(str(folder), **changes)
    return _warnings(lambda: runs.trainer(steps, Preflight()).fit(module, data))


def test_mini_batches_that_are_unequal_parts_are_told_before_the_model_is_loaded(monkeypatch):
    def loaded():
        raise LookupError("a model is loaded")

    module = runs.module({"mini_batches": 3, "group_size": 2})
    monkeypatch.setattr(module, "configure_model", loaded)
    data = ArithmeticData(num_train=8, num_val=2, prompts_per_batch=4)
    trainer = runs.trainer(1, Preflight(), limit_val_batches=0)
    with pytest.warns(UserWarning, match=r"deals the 4 groups .*: 1 of 3 optimiser steps have 2"):  # noqa: SIM117
        with pytest.raises(LookupError, match="a model is loaded"):
            trainer.fit(module, data)


ROWS = [{"problem": f"Compute {k}+1.", "answer": str(k + 1)} for k in range(6)]


@pytest.mark.parametrize(
    ("val", "said"),
    [
        (ROWS[4:], "2 of the 2 validation problems are training problems, too"),
        ([ROWS[5], {"problem": "Compute 9+1.", "answer": "10"}, ROWS[5]], "2 of the 3 validation problems are"),
        ([{"problem": "Compute 5+1.", "answer": "6.0"}, {"problem": "Compute 4+2.", "answer": "6"}], None),
    ],
)
def test_validation_problems_that_are_training_problems_are_counted(val, said):
    """The same problem with the same answer, whatever its dataset is called and which further columns it has."""
    val = [row | {"level": 3} for row in val]
    told = [text for text in _fits(MathData(train=ROWS, val=val, prompts_per_batch=2)) if "training problems" in text]
    assert len(told) == (said is not None)
    assert said is None or told[0].startswith(said)


def test_large_sets_are_not_compared_and_that_is_said(monkeypatch, caplog):
    monkeypatch.setattr("grail_lightning.app.callbacks.prompt_checks._MOST_COMPARED", 7)
    assert not [t for t in _fits(MathData(train=ROWS, val=ROWS[:2], prompts_per_batch=2)) if "training problems" in t]
    assert "The 2 validation problems were not compared with 6 training problems" in caplog.text


@pytest.mark.parametrize(
    ("end", "stop", "told"), [(None, (), "name none"), (None, ("\n",), None), (900, (), "name 900"), (1, (), None)]
)
def test_a_policy_without_an_end_token_is_told_at_the_start(end, stop, told, tmp_path):
    policy = load_policy("arithmetic")
    policy.tokenizer.eos_token = None
    policy.saved_generation_config.eos_token_id = end
    policy.save(tmp_path)
    data = ArithmeticData(num_train=2, num_val=2, prompts_per_batch=1)
    said = _fits(data, tmp_path, sampling=Sampling(max_response_length=4, stop=stop))
    found = [text for text in said if "No end token is known" in text]
    assert len(found) == (told is not None)
    assert told is None or told in found[0]


@pytest.mark.parametrize("masked", [True, False])
def test_a_penalty_of_length_that_cannot_reach_responses_that_are_cut_is_told(masked):
    penalty = RewardSpec(function="overlong", arguments={"limit": 8, "buffer": 4}, name="length")
    data = ArithmeticData(num_train=2, num_val=2, prompts_per_batch=1, task=ArithmeticTask(rewards=[penalty]))
    module = runs.module({"mask_truncated": masked}, sampling=Sampling(max_response_length=8))
    said = _warnings(lambda: runs.trainer(0, Preflight(), limit_val_batches=0).fit(module, data))
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
    module = GrailModule(str(tmp_path), loading=loading, sampling=sampling, objective=DrGRPO(clip_high=0.28))
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


def test_a_number_of_rollouts_that_nothing_divides_is_told_without_an_empty_list():
    """67 is prime, so that no number of mini-batches up to 64 deals it evenly."""
    execution = Execution(mini_batches=4, split_groups=True, group_size=67)
    remark = unequal_mini_batches(1, execution, 1)
    assert "deals the 67 rollouts of a batch unequally" in remark
    assert remark.endswith("all count alike. Change the number of prompts a batch.")
