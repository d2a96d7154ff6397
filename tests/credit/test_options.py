"""Options that no method can use are refused by name, and so are methods without what they need."""

import pytest

from grail_lightning.credit import (
    DGPO,
    EGCA,
    GRAIL,
    IGPO,
    LESS,
    PRIME,
    RLSD,
    UCAS,
    AdvantageReweighting,
    AttentionOptions,
    AttentionRhythm,
    CriticSearch,
    GiGPO,
    HighEntropy,
    Judge,
    OARGradient,
    OARPerturbation,
    OptimalBaseline,
    Oracle,
    Product,
    Random,
    Resampled,
    SaliencyOptions,
    SpanScores,
    TreeAdvantage,
    TurnRewards,
    Uniform,
    WarmUp,
)
from grail_lightning.step.options import Distillation
from tests.credit.rollouts import context

REFUSED = [
    (lambda: GRAIL(gate="wrong"), "`gate` must be one of negative, positive, all, but got 'wrong'"),
    (lambda: GRAIL(w_min=2.0, w_max=1.0), r"0 ≤ w_min ≤ w_max, but got 2\.0 and 1\.0"),
    (lambda: GRAIL(std=-1.0), r"`std` must lie in \[0, inf\), but got -1\.0"),
    (lambda: GRAIL(answer_overwrite="x"), "`answer_overwrite` must be one of always, gated, never"),
    (lambda: GRAIL(normalise="x"), "`normalise` must be one of none, mean_one"),
    (lambda: Random(std=-1.0), r"`std` must lie in \[0, inf\), but got -1\.0"),
    (lambda: OARGradient(noise=0.0), r"`noise` must lie in \(0, inf\), but got 0\.0"),
    (lambda: OARGradient(scope="all"), "`scope` must be one of reasoning, response"),
    (lambda: OARPerturbation(distribution="x"), "`distribution` must be one of answer_mean, last, answer_joint"),
    (lambda: HighEntropy(share=0.0), r"`share` must lie in \(0, 1\], but got 0\.0"),
    (lambda: HighEntropy(share=float("nan")), r"`share` must lie in \(0, 1\], but got nan"),
    (lambda: AdvantageReweighting(alpha=1.5), r"`alpha` must lie in \[0, 1\], but got 1\.5"),
    (lambda: LESS(min_length=0), r"`min_length` must lie in \[1, inf\), but got 0"),
    (lambda: UCAS(penalty_scale=-1), r"`penalty_scale` must lie in \[0, inf\), but got -1"),
    (lambda: DGPO(temperature=0.0), r"`temperature` must lie in \(0, inf\), but got 0\.0"),
    (lambda: DGPO(entropy_power=float("inf")), r"`entropy_power` must lie in \[0, inf\), but got inf"),
    (lambda: RLSD(refresh_steps=0), r"`refresh_steps` must lie in \[1, inf\), but got 0"),
    (lambda: RLSD(sentence="No answer."), "`sentence` must contain {answer}"),
    (lambda: AttentionRhythm(rhythm="x"), "`rhythm` must be one of pre_plan, anchor, coupled"),
    (lambda: AttentionRhythm(reach=0), r"`reach` must lie in \[1, inf\), but got 0"),
    (lambda: AttentionOptions(head_share=0.6), r"`head_share` must lie in \(0, 0\.5\], but got 0\.6"),
    (lambda: AttentionOptions(nearest=60), r"`nearest` must lie in \[1, 50\], but got 60"),
    (lambda: Resampled(budget=0), r"`budget` must lie in \[1, inf\), but got 0"),
    (lambda: Resampled(search="x"), "`search` must be one of bisection, everywhere"),
    (lambda: TreeAdvantage(shrinkage=-1.0), r"`shrinkage` must lie in \[0, inf\), but got -1\.0"),
    (lambda: TreeAdvantage(state="sets"), "`state` must be one of prefix, numbers, turns, but got 'sets'"),
    (lambda: OptimalBaseline(unit="step"), "`unit` must be one of token, turn, but got 'step'"),
    (lambda: GiGPO(omega=-1.0), r"`omega` must lie in \[0, inf\), but got -1\.0"),
    (lambda: GiGPO(discount=1.1), r"`discount` must lie in \[0, 1\], but got 1\.1"),
    (lambda: TurnRewards(discount=2.0), r"`discount` must lie in \[0, 1\], but got 2\.0"),
    (lambda: IGPO(normalise="x"), "`normalise` must be one of joint, separate, but got 'x'"),
    (lambda: CriticSearch(alpha=2.0), r"`alpha` must lie in \[0, 1\], but got 2\.0"),
    (lambda: CriticSearch(labels="x"), "`labels` must be one of given, permuted, random, but got 'x'"),
    (lambda: SpanScores(beta=0.5), r"`beta` must lie in \[1, inf\), but got 0\.5"),
    (lambda: SpanScores(scorer="a.b", judge=Judge(url="http://a", model="m")), "`judge` takes the place of `scorer`"),
    (lambda: SpanScores(scorer="steps"), "`credit.scorer` must be one of .* or an import path .* but got .steps."),
    (lambda: Judge(url="http://a", model="m", concurrency=0), r"`concurrency` must lie in \[1, inf\), but got 0"),
    (lambda: EGCA(w_max=0.0), r"`w_max` must lie in \(0, inf\), but got 0\.0"),
    (lambda: EGCA(blamed="x"), "`blamed` must be one of divergent, random, last, permuted, but got 'x'"),
    (lambda: Oracle(w_max=0.0), r"`w_max` must lie in \(0, inf\), but got 0\.0"),
    (lambda: PRIME(beta=0.0), r"`beta` must lie in \(0, inf\), but got 0\.0"),
    (lambda: PRIME(accuracy=(0.9, 0.1)), r"`accuracy` must be two rising numbers in \[0, 1\], but got \[0\.9, 0\.1\]"),
    (
        lambda: Distillation(coefficient=0.0),
        "`objective.distillation.coefficient` must be finite and positive, but got 0",
    ),
    (lambda: Distillation(sentence="Look."), r"`objective.distillation.sentence` must contain \{answer\}, .* 'Look.'"),
    (lambda: Product(PRIME(), PRIME()), "Only one of `first` and `second` may train a model"),
    (
        lambda: Product(GRAIL(saliency=SaliencyOptions(refresh="update")), HighEntropy()),
        "`first` and `second` must have the same `refresh`, but got update and rollout",
    ),
    (lambda: WarmUp(Uniform(), steps=0), r"`steps` must lie in \[1, inf\), but got 0"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_an_option_out_of_range_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (DGPO(), r"`DGPO` needs `CreditContext\.reference`, but got None"),
        (PRIME(), r"`PRIME` needs `CreditContext\.second`, but got None.* `fit` alone"),
        (Resampled(), r"`Resampled` needs `CreditContext\.continuations`, but got None"),
    ],
    ids=["DGPO", "PRIME", "Resampled"],
)
def test_a_method_without_what_it_needs_says_so(method, message, golden_policy, batch):
    with pytest.raises(ValueError, match=message):
        method(golden_policy, batch, context())


def test_a_call_beside_saliency_is_refused():
    with pytest.raises(TypeError, match=r"`Mine.__call__` must not be defined.* Define `weights_from`, or derive"):
        type("Mine", (GRAIL,), {"__call__": lambda *_: None})
