"""Services that methods, estimators and objectives list: when they are open, what is refused, and one of one's own."""

import runpy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

import grail_lightning.credit as credits
from grail_lightning import (
    ArithmeticData,
    Companion,
    DrGRPO,
    Execution,
    GrailModule,
    GroupMean,
    PredictionWriter,
    Sampling,
)
from grail_lightning.core.policy.load import load_policy
from grail_lightning.credit import DGPO, PRIME, FrozenReference, OptimalBaseline, PermutedRewards, Service, TokenCredit
from grail_lightning.credit import TokenWeights as Weights
from tests.runs import SAMPLING, TASK, Watch, batches, module, problems, trainer

ReMax = runpy.run_path(str(Path(__file__).parents[3] / "docs/examples/my_service.py"))["ReMax"]
SHORT = Sampling(max_response_length=24)


class Calls(Service):
    """Counts how often a method was called over the whole run."""

    def __init__(self):
        self.number = 0

    @classmethod
    def open(cls, owner, run):
        owner.opened.append((run.source, run.step(), type(run.policy.model).__name__))
        return cls()

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state.get("number", 0)


class Counting(TokenCredit):
    """Uniform credit that counts its calls with a service."""

    services = (Calls, FrozenReference)

    def __init__(self):
        self.opened, self.seen = [], []

    def __call__(self, policy, batch, context):
        calls = context.service(Calls)
        calls.number += 1
        self.seen.append(calls.number)
        with context.service(FrozenReference).running(policy) as frozen:
            assert frozen is not policy
        return Weights(values=batch.response_mask.float())


def test_a_service_is_opened_once_is_part_of_checkpoints_and_begins_anew_in_a_second_fit(tmp_path):
    file = tmp_path / "some.ckpt"
    save = LambdaCallback(on_train_end=lambda trainer, _: trainer.save_checkpoint(file))
    data, credit = ArithmeticData(num_train=8, prompts_per_batch=2), Counting()
    ours = module(credit=PermutedRewards(credit), sampling=SHORT)
    trainer(2, save, limit_val_batches=0).fit(ours, data)
    trainer(1, limit_val_batches=0).fit(ours, data)
    assert credit.seen == [1, 2, 1]
    assert credit.opened == [("arithmetic", 0, "Qwen3ForCausalLM")]
    assert torch.load(file, weights_only=False)["services"] == {"Calls": {"number": 2}}
    resumed = Counting()
    trainer(3, limit_val_batches=0).fit(module(credit=resumed, sampling=SHORT), data, ckpt_path=file)
    assert resumed.seen == [3]
    shown = Counting()
    prompts = torch.utils.data.DataLoader([problems(2)], batch_size=None)
    trainer(1).predict(module(credit=shown, sampling=SHORT), prompts, ckpt_path=file)
    assert shown.seen == [3], "`predict` shows what the checkpoint's method would do"


def _greedy_rewards(prompts, limit):
    """1 for a prompt whose most likely response, by Transformers' own decoding, is right."""
    policy = load_policy("arithmetic").eval()
    texts = []
    for prompt in prompts:
        ids = torch.tensor([policy.encode(prompt.messages)])
        how = {"do_sample": False, "max_new_tokens": limit, "pad_token_id": policy.tokenizer.pad_token_id}
        made = policy.model.generate(ids, attention_mask=torch.ones_like(ids), **how)[0, ids.shape[1] :]
        texts.append(policy.tokenizer.decode(made, skip_special_tokens=True))
    return [float(TASK.answer(text) == prompt.reference) for text, prompt in zip(texts, prompts, strict=True)]


def test_a_service_of_ones_own_samples_with_the_engine_of_the_run():
    watch, ours = Watch(), module({"group_size": 2}, credit=ReMax())
    trainer(1, watch).fit(ours, batches(1, size=6))
    (output,) = watch.outputs
    greedy = torch.tensor(_greedy_rewards(problems(6), 48), dtype=torch.float64).repeat_interleave(2)
    assert set(greedy.tolist()) == {0.0, 1.0}
    expected = (output.batch.rewards - greedy)[:, None] * output.batch.response_mask
    assert torch.equal(output.weights.additive.double(), expected)
    assert not output.weights.values.any()
    assert output.metrics["credit/greedy_reward"] == pytest.approx(float(greedy.mean()))


class BeforeTraining(Companion):
    """The policy before training, as a distribution to stay close to."""

    figure = "kl_before_training"

    def __init__(self, policy, reference):
        self.policy, self.reference = policy, reference

    def states(self, micro, layout):
        with self.reference.running(self.policy) as frozen, torch.no_grad():
            return frozen(layout, figures=lambda states: states)

    def losses(self, divergence, advantages):
        return 0.1 * divergence


@dataclass(frozen=True, kw_only=True)
class CloseToTheBeginning(DrGRPO):
    """An objective of one's own whose companion uses a service."""

    services = (FrozenReference,)

    def companion(self, policy, batch, context):
        return BeforeTraining(policy, context.service(FrozenReference))


def test_the_companion_of_an_objective_gets_the_services_that_the_objective_lists():
    watch = Watch()
    ours = GrailModule(
        "arithmetic", SAMPLING, objective=CloseToTheBeginning(), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4)
    )
    trainer(2, watch).fit(ours, batches(2, size=4))
    first, second = (output.metrics["kl_before_training"] for output in watch.outputs)
    assert abs(first) < 1e-6 < second


@dataclass(frozen=True, kw_only=True)
class Sampled(DrGRPO):
    """Lists the service of ReMax."""

    @property
    def services(self):
        return ReMax.services


@pytest.mark.parametrize("parts", [{"credit": ReMax()}, {"objective": Sampled()}], ids=["ReMax", "Sampled"])
def test_an_engine_that_samples_ahead_has_no_time_for_a_service(parts):
    name = type(next(iter(parts.values()))).__name__
    refused = rf"`execution\.sample_ahead` must be off with `{name}`, one of whose services"
    with pytest.raises(ValueError, match=refused):
        GrailModule("arithmetic", SHORT, execution=Execution(sample_ahead=True), **parts)


@pytest.mark.parametrize(
    ("name", "part", "example"),
    [
        ("control", credits.Shuffled, "Shuffled()"),
        ("control", credits.GRAIL(), "Shuffled()"),
        ("advantage", GroupMean, ""),
    ],
)
def test_a_part_of_another_kind_is_refused_with_an_example_of_its_own(name, part, example):
    with pytest.raises(ValueError, match=rf"`{name}` must be an object, .* such as `{name}=") as refused:
        module(**{name: part})
    assert example in str(refused.value)


@pytest.mark.parametrize(
    "credit",
    [PRIME(), ReMax(), PermutedRewards(OptimalBaseline()), credits.TreeAdvantage(advantage=False)],
    ids=lambda credit: type(credit).__name__,
)
def test_an_estimator_that_would_have_no_effect_is_refused(credit):
    name = type(credit).__name__
    with pytest.raises(
        ValueError, match=rf"`model.advantage` must be null with `{name}`.* but got GroupMean, .* Set --"
    ):
        module(credit=credit, advantage=GroupMean(scale="group"))
    assert isinstance(module(credit=credit).advantage, GroupMean)
    module(credit=credits.TreeAdvantage(), advantage=GroupMean(scale="group"))


def test_methods_beside_the_first_one_have_their_services_opened_in_predict(tmp_path):
    ours = module(credit=credits.Uniform(), sampling=SHORT)
    writer = PredictionWriter(file=str(tmp_path / "some.parquet"), compare=[DGPO()], page=False)
    run = trainer(1, writer, default_root_dir=tmp_path)
    run.predict(ours, torch.utils.data.DataLoader([problems(2)], batch_size=None))
    assert ours.services.opened("predict").keys() == {FrozenReference}
    assert (tmp_path / "some.parquet").exists()


def test_a_model_is_trained_in_fit_alone():
    ours = module(credit=PRIME(), sampling=SHORT)
    with pytest.raises(ValueError, match=r"but got `TrainedModel`, and open are: FrozenReference\. .* in `fit` alone"):
        trainer(1).predict(ours, torch.utils.data.DataLoader([problems(1)], batch_size=None))


def test_two_services_of_one_name_are_refused_before_a_model_is_loaded():
    class Both(Counting):
        services = (Calls, type("Calls", (Calls,), {}))

    with pytest.raises(ValueError, match=r"`services` must have names of their own.* but got two classes `Calls`"):
        module(credit=Both())


def test_a_checkpoint_of_an_earlier_version_with_a_trained_model_is_refused_in_one_line(tmp_path):
    file = tmp_path / "some.ckpt"
    run = trainer(1)
    run.fit(module(credit=PRIME(), sampling=SHORT), batches(1, size=1))
    run.save_checkpoint(file)
    saved = torch.load(file, weights_only=False)
    torch.save(saved | {"second": saved.pop("services", {}) or {"steps": 1}}, file)
    with pytest.raises(
        ValueError, match="`ckpt_path` must be a checkpoint with the key `services`, but got one with"
    ) as no:
        trainer(2).fit(module(credit=PRIME(), sampling=SHORT), batches(2, size=1), ckpt_path=file)
    assert "\n" not in str(no.value)


class Always(TokenCredit):
    """Says when its weights are computed with a word of an earlier version."""

    refresh = "update"

    def __call__(self, policy, batch, context):
        raise AssertionError


def test_a_method_says_when_its_weights_are_computed_in_one_of_two_words():
    with pytest.raises(ValueError, match=r"`Always.refresh` must be one of batch, step, but got 'update'\."):
        GrailModule("arithmetic", SHORT, credit=Always())
