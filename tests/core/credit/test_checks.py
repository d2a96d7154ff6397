"""What a credit method or a control returns is checked; and so are options, and what a method needs of a run."""

import dataclasses
import math
import typing
from dataclasses import replace

import pytest
import torch

import grail_lightning.credit as credits
from grail_lightning.core.credit.base import uniform_weights, weigh
from grail_lightning.core.credit.oar import BilevelOptions
from grail_lightning.core.credit.saliency import SaliencyCredit, SaliencyTarget
from grail_lightning.credit import (
    DGPO,
    EGCA,
    GRAIL,
    PRIME,
    RLSD,
    CreditControl,
    ExecutedMask,
    HighEntropy,
    Judge,
    Mean,
    PermutedRewards,
    Resampled,
    SaliencyOptions,
    SpanScores,
    TokenCredit,
    Uniform,
)
from tests.core.credit.rollouts import context, in_groups
from tests.runs import batches, module, trainer


class Given(TokenCredit):
    """A method of a user's that changes uniform weights."""

    def __init__(self, change):
        self.change = change

    def __call__(self, policy, batch, context):
        return self.change(Uniform()(policy, batch, context), batch)


def _with(**changes):
    return lambda weights, batch: replace(
        weights, **{name: make(weights.values.clone(), batch) for name, make in changes.items()}
    )


def _put(value, row=2, column=3):
    return lambda values, batch: values.index_put((torch.tensor(row), torch.tensor(column)), torch.tensor(value))


WRONG = {
    "nothing": (lambda weights, batch: None, r"`Given` must return a `TokenWeights`, but got NoneType\. Return `Tok"),
    "too wide": (
        _with(values=lambda v, b: torch.nn.functional.pad(v, (0, 1))),
        r"`values` as a floating-point tensor of shape \[6, \d+\] on cpu, but got float32 of shape \[6, \d+\] on cpu\.",
    ),
    "a mask": (_with(values=lambda v, b: b.response_mask), "`values` as a floating-point .* but got bool of shape"),
    "a list": (_with(values=lambda v, b: v.tolist()), "`values` .* but got list"),
    "another device": (_with(values=lambda v, b: v.to("meta")), "on cpu, but got float32 of shape .* on meta"),
    "a gradient": (_with(values=lambda v, b: v.requires_grad_()), r"`values` .* detached.*`torch\.no_grad\(\)`"),
    "NaN": (_with(values=_put(torch.nan)), r"must return finite `values`, but got nan in row 2, column 3\. See"),
    "below zero": (_with(values=_put(-0.5)), r"`values` of at least 0, but got -0\.5 in row 2, column 3"),
    "padding": (_with(values=lambda v, b: torch.ones_like(v)), r"`values` that are 0 outside `batch\.response_mask`"),
    "additive": (_with(additive=lambda v, b: v[1:]), r"`additive` as .* but got float32 of shape \[5, \d+\]"),
    "additive padding": (_with(additive=lambda v, b: v + 1), r"`additive` that are 0 outside `batch\.response_mask`"),
    "scores": (_with(scores=_put(-torch.inf)), r"must return finite `scores`, but got -inf in row 2, column 3"),
    "fallback": (_with(fallback=lambda v, b: v), r"`fallback` as a bool tensor of shape \[6\] on cpu, but got float32"),
    "a metric": (
        _with(metrics=lambda v, b: {"top": v.amax()}),
        r"`metrics` that are numbers .* but got Tensor for `top`",
    ),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_a_method_that_returns_something_else_is_named(change, message, golden_policy, golden_batch):
    with pytest.raises(ValueError, match=message) as error:
        weigh(Given(change), golden_policy, in_groups(golden_batch), context())
    assert "\n" not in str(error.value)


def test_what_is_right_passes(golden_policy, golden_batch):
    """Scores may be negative and stand in the padding, additive stages negative within the mask."""
    batch = in_groups(golden_batch)
    change = _with(
        values=lambda v, b: v.half(),
        scores=lambda v, b: -torch.ones_like(v),
        additive=lambda v, b: -v.double(),
        metrics=lambda v, b: {"top": 2.0, "share": Mean(3, 4), "number": 1},
    )
    found = weigh(Given(change), golden_policy, batch, context())
    assert found.values.dtype == torch.float16
    assert torch.equal(found.additive, -batch.response_mask.double())


def test_an_error_in_an_inner_method_names_the_inner_method(golden_policy, golden_batch):
    with pytest.raises(ValueError, match=r"`Given` must return `values` of at least 0, but got -1\.0"):
        weigh(PermutedRewards(Given(_with(values=_put(-1.0)))), golden_policy, in_groups(golden_batch), context())


class Beside(SaliencyCredit):
    """A method whose saliency comes from the update's own forward pass."""

    def target(self, policy, batch):
        rows = batch.answer.whole.any(1) & (batch.advantages != 0)
        return SaliencyTarget(explained=batch.answer.whole, rows=rows)

    def weights_from(self, scores, policy, batch, context):
        weights = uniform_weights(batch)
        return replace(weights, values=weights.values.masked_fill(scores > 0, -1))


class Negated(CreditControl):
    def __call__(self, weights, batch, context):
        return replace(weights, values=-weights.values)


@pytest.mark.parametrize(
    ("credit", "control", "name"),
    [
        (Given(_with(values=_put(-1.0, row=0, column=0))), None, "Given"),
        (Uniform(), Negated(), "Negated"),
        (Beside(), None, "Beside"),
    ],
    ids=["method", "control", "beside the update"],
)
def test_a_run_stops_before_its_first_step(credit, control, name):
    run = trainer(1)
    with pytest.raises(ValueError, match=rf"`{name}` must return `values` of at least 0, but got -"):
        run.fit(module(credit=credit, control=control), batches(1))
    assert run.global_step == 0


ARGUMENTS = {"PermutedRewards": [Uniform()]}
CLASSES = {
    name: kind
    for name, kind in ((name, getattr(credits, name)) for name in credits.__all__)
    if dataclasses.is_dataclass(kind) and issubclass(kind, credits.TokenCredit | credits.CreditControl)
} | {kind.__name__: kind for kind in (credits.AttentionOptions, BilevelOptions, SaliencyOptions)}


def _wrong_options():
    """A value of no use for each option that is a choice or a number."""
    for name, kind in CLASSES.items():
        for option, hint in typing.get_type_hints(kind).items():
            kinds = {hint, *typing.get_args(hint)}
            if typing.get_origin(hint) is typing.Literal:
                yield name, option, "x", f"`{option}` must be one of {', '.join(typing.get_args(hint))}, but got 'x'"
            elif kinds & {int, float}:
                yield name, option, math.nan, rf"`{option}` .*must .*but got .*nan|must lie in \[0, nan\]"


@pytest.mark.parametrize(("name", "option", "value", "message"), [*_wrong_options()])
def test_every_choice_and_every_number_is_checked(name, option, value, message):
    with pytest.raises(ValueError, match=message):
        CLASSES[name](*ARGUMENTS.get(name, []), **{option: value})


REFUSED = [
    (lambda: GRAIL(w_min=2.0, w_max=1.0), r"`w_min` must lie in \[0, 1\.0\], but got 2\.0"),
    (lambda: GRAIL(w_max=math.inf), r"`w_max` must lie in \[0, inf\), but got inf"),
    (lambda: BilevelOptions(floor=9.0), r"`floor` must lie in \[0, 1\], but got 9\.0"),
    (lambda: Judge(url="http://a", model="m", max_tokens=0), r"`max_tokens` must lie in \[1, inf\), but got 0"),
    (lambda: Judge(url="http://a", model="m", prompt="Well?"), r"`judge.prompt` must hold \{turns\}"),
    (lambda: HighEntropy(share=0.0), r"`share` must lie in \(0, 1\], but got 0\.0"),
    (lambda: RLSD(sentence="No answer."), "`sentence` must contain {answer}"),
    (lambda: SpanScores(scorer="a.b", judge=Judge(url="http://a", model="m")), "`judge` takes the place of `scorer`"),
    (lambda: SpanScores(scorer="steps"), "`credit.scorer` must be one of .* or an import path .* but got .steps."),
    (lambda: PRIME(accuracy=(0.9, 0.1)), r"`accuracy` must be two rising numbers in \[0, 1\], but got \[0\.9, 0\.1\]"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_options_that_do_not_go_together_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


NEEDS = [
    (DGPO(), "got `FrozenReference`, and open are: none. A run opens those in `services` of .* objective. List it"),
    (PRIME(), "got `TrainedModel`, and open are: none. .* objective, and one that trains a model in `fit` alone. List"),
    (Resampled(), "got `SampledContinuations`, and open are: none"),
]


@pytest.mark.parametrize(("method", "what"), NEEDS)
def test_a_method_without_a_service_that_it_uses_says_so(method, what, golden_policy, batch):
    with pytest.raises(ValueError, match=f"`CreditContext.service` must be asked for an open service, but {what}"):
        method(golden_policy, batch, context())


@pytest.mark.parametrize("method", [EGCA(), ExecutedMask()])
def test_programs_are_asked_for_before_a_model_is_loaded(method, batch):
    """In a run, a batch of a mixture may have none; tests/core/credit/test_mixtures.py shows what it gets."""
    with pytest.raises(
        ValueError, match=r"` needs a task whose responses are programs, such as `CodeTask`, but got `L"
    ):
        method.check_prompts([batch.prompts])


def test_a_call_beside_saliency_is_refused():
    with pytest.raises(TypeError, match=r"`Mine.__call__` must not be defined.* Define `weights_from`, or derive"):
        type("Mine", (GRAIL,), {"__call__": lambda *_: None})
