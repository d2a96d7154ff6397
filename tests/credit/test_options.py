"""Options that no method can use are refused by name, and so are methods without what they need."""

import dataclasses
import math
import typing

import pytest

import grail_lightning.credit as credits
from grail_lightning.credit import (
    DGPO,
    GRAIL,
    PRIME,
    RLSD,
    HighEntropy,
    Judge,
    Product,
    Resampled,
    SaliencyOptions,
    SpanScores,
    Uniform,
)
from grail_lightning.credit.oar import BilevelOptions
from tests.credit.rollouts import context

ARGUMENTS = {"Product": [Uniform(), Uniform()], "WarmUp": [Uniform()], "PermutedRewards": [Uniform()]}
CLASSES = {
    name: kind
    for name, kind in vars(credits).items()
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


ANEW = SaliencyOptions(refresh="update")
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
    (lambda: Product(PRIME(), PRIME()), "Only one of `first` and `second` may train a model"),
    (lambda: Product(GRAIL(saliency=ANEW), Uniform()), "must have the same `refresh`, but got update and rollout"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_options_that_do_not_go_together_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(("kind", "name"), [(DGPO, "reference"), (PRIME, "second"), (Resampled, "continuations")])
def test_a_method_without_what_it_needs_says_so(kind, name, golden_policy, batch):
    with pytest.raises(ValueError, match=rf"`{kind.__name__}` needs `CreditContext\.{name}`, but got None"):
        kind()(golden_policy, batch, context())


def test_a_call_beside_saliency_is_refused():
    with pytest.raises(TypeError, match=r"`Mine.__call__` must not be defined.* Define `weights_from`, or derive"):
        type("Mine", (GRAIL,), {"__call__": lambda *_: None})
