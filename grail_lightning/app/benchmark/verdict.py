"""The verdict on a method: claims in plain sentences, each of which follows from an interval.

An interval is *above*, *below* or *at* its neutral value: 0.5 for an AUROC, 1 for a gain, 0 for a difference and for a
correlation. For the claims of one question the intervals are widened, so that all of them hold together with a
probability of 95 % (`claims.widened`); differences in training have their own correction (Holm) beside a 95 % interval.
An interval at the neutral value is a null, and the evidence says what it excludes.

| what the figures are | the claim |
|---|---|
| the method reads the labels | it is an oracle |
| it reads environment scores or reference answers | so compare it with methods that do |
| every AUROC is 0.5, and every gain is 1 without any spread | it is uniform credit, and nothing else is said |
| AUROC at forks: above, at, below | finds; does not find; ranks errors below sound steps |
| within a rollout above, at forks not | it may be position alone, which reaches 1.0 there |
| a plain score is as high where the method is above | the plain score does as well |
| a control is above, too, and the intervals overlap, or do not | does as well; a part has another cause |
| above at forks, and the share of blame is larger than uniform credit's, or not | more of the blame, or not |
| correlation with resampled values of steps: above, at, below | agrees; is not seen to agree; runs against them |
| gain of a step with Adam: above, at, below | more than uniform credit; no difference seen; less |
| gain above or below, and a control's interval overlaps on the same side of 1 | the control gains about as much |
| gain with SGD on the other side of 1 | the other sign with SGD |
| gain above or at, less that of the best constant baseline: above, at, below | more than; that of; less than it |
| gain with equal praise and blame: above, at (if the gain is above), below | remains; not seen to remain; loses |
| training over uniform credit, and over the lower baseline: p (Holm) < 0.05, else | better, worse; no difference seen |
| gains but no training | it was not trained |
| cost | the time of a step, extra forward passes and tokens |
| null in a world | it does not apply there, and why |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from grail_lightning.app.benchmark.claims import (
    CHANCE,
    Claim,
    Finding,
    by_sign,
    claims,
    each,
    in_words,
    listed,
    number,
    overlap,
    worlds,
)
from grail_lightning.app.benchmark.detection_claims import detection
from grail_lightning.app.benchmark.result import Result, figure, reason, value_of, worlds_of
from grail_lightning.app.results.statistics import Estimate

ADAM = "adam"  # The optimiser of the package's runs, whose gain the verdict is about.
_SAME = 1e-9  # Uniform credit's figures are exact but for the roundings of one division.


def verdict(result: Result, references: Sequence[Result] = ()) -> list[str]:
    """The sentences that stand at the top of a report: a claim and its figures in each text, the main ones first.

    Args:
        result: The result of a method, as `read_result` gives it.
        references: Results of other methods and of plain scores (position, entropy, surprisal), to compare with.
    """
    return [str(finding) for finding in findings(result, references)]


def findings(result: Result, references: Sequence[Result] = ()) -> list[Finding]:
    """The claims of the verdict with what they follow from."""
    first, last = list(_what_it_reads(result)), list(_where_it_does_not_apply(result))
    if not worlds_of(result):
        return [*first, *last]
    if is_uniform(result):
        same = Finding(claim="It is uniform credit: no figure differs from it in any world", main=True)
        return [*first, same, *last]
    parts = (_values, _gain, _baselines, _training, _cost)
    found = [*detection(result, references), *(finding for part in parts for finding in part(result))]
    return [*first, *sorted(found, key=lambda finding: not finding.main), *last]


def is_uniform(result: Result) -> bool:
    """Whether every figure of detection and of the gain is exactly that of uniform credit."""
    intervals = [
        (estimate, neutral)
        for world in worlds_of(result)
        for group, neutral in (("auroc_forks", CHANCE), ("auroc_rollout", CHANCE), ("gain", 1.0))
        for name in value_of(result, world, group) or ()
        if (estimate := figure(result, world, group, name)) is not None
    ]
    has_gain = any(neutral == 1.0 for _, neutral in intervals)
    return has_gain and all(
        abs(value - neutral) < _SAME
        for estimate, neutral in intervals
        for value in ((estimate.value,) if neutral == CHANCE else (estimate.value, estimate.low, estimate.high))
    )


def _what_it_reads(result: Result) -> Iterator[Finding]:
    if result["oracle"]:
        yield Finding(
            claim="It is an oracle",
            main=True,
            evidence="It reads the labels of steps, which nobody has in training: its figures are a bound, no result",
        )
    elif result["reads"]:
        yield Finding(claim=f"It reads {listed(result['reads'])}, so compare it with methods that do so, too")


def _where_it_does_not_apply(result: Result) -> Iterator[Finding]:
    absent = [world for world, figures in result["worlds"].items() if figures is None]
    if absent:
        reasons = [(reason(result, world) or "no reason is given").rstrip(".") for world in absent]
        said = [f"{in_words(world)}: {why}" for world, why in zip(absent, reasons, strict=True)]
        yield Finding(
            claim=f"It does not apply in {listed(list(map(in_words, absent)))}",
            evidence="; ".join(said if len(set(reasons)) > 1 else reasons[:1]),
        )


def _values(result: Result) -> Iterator[Finding]:
    """Agreement with the effects of steps that were measured by resampling, in wrong rollouts."""
    total = len(worlds_of(result))
    groups = by_sign(claims(result, ("values", "wrong"), 0.0, total, (-1.0, 1.0)))
    effects = "the measured effects of steps"
    if groups[1]:
        claim = f"It agrees with {effects} in {worlds(groups[1], total)}"
        yield Finding(claim=claim, evidence=f"rank correlation {each(groups[1])}")
    if groups[0]:
        limit = number(max(claim.estimate.high for claim in groups[0]))
        yield Finding(
            claim=f"It is not seen to agree with {effects} in {worlds(groups[0], total)}",
            evidence=f"rank correlation {each(groups[0])}; more than {limit} is excluded",
        )
    if groups[-1]:
        claim = f"Its weights run against {effects} in {worlds(groups[-1], total)}"
        yield Finding(claim=claim, evidence=f"rank correlation {each(groups[-1])}")


# --- the gain of a step -------------------------------------------------------------------------------------------


def gains(result: Result) -> list[Claim]:
    """The gain of a step with Adam in each world; the intervals of all hold together."""
    return claims(result, ("gain", ADAM), 1.0, len(worlds_of(result)))


def _gain(result: Result) -> Iterator[Finding]:
    found = gains(result)
    if not found:
        why = next(filter(None, (reason(result, world, "gain", ADAM) for world in worlds_of(result))), "")
        yield Finding(claim="What a step gains is not measured", evidence=why)
        return
    groups, total = by_sign(found), len(worlds_of(result))
    if groups[1]:
        above = {claim.world for claim in groups[1]}
        limit = [claim for claim in claims(result, ("share_of_limit", ADAM), 0.0) if claim.world in above]
        share = f"; of what any credit could gain this is a share of {each(limit)}" if limit else ""
        claim = f"A step gains more than with uniform credit in {worlds(groups[1], total)}"
        yield Finding(claim=claim, evidence=f"{_relative(groups[1])}{share}", main=True)
    if groups[0]:
        limit_of_null = number(max(claim.estimate.high for claim in groups[0]))
        yield Finding(
            claim=f"The gain of a step is not seen to differ from that of uniform credit in {worlds(groups[0], total)}",
            evidence=f"{_relative(groups[0])}; more than {limit_of_null} is excluded",
            main=True,
        )
    if groups[-1]:
        claim = f"A step gains less than with uniform credit in {worlds(groups[-1], total)}"
        yield Finding(claim=claim, evidence=_relative(groups[-1]), main=True)
    signs = {claim.world: claim.sign for claim in found}
    other = claims(result, ("gain", "sgd"), 1.0, len(signs))
    if turned := [claim for claim in other if claim.sign * signs.get(claim.world, 0) < 0]:
        yield Finding(claim="With SGD the difference has the other sign", evidence=each(turned))
    yield from _gain_of_controls(result, [*groups[1], *groups[-1]])


def _relative(found: Sequence[Claim]) -> str:
    return f"With Adam, relative to uniform credit: {each(found)}"


def _overlap_95(result: Result, world: str, control: str) -> bool:
    """Whether the 95 % intervals of the gains of a method and of its control overlap; wider ones would hide more."""
    ours, theirs = figure(result, world, "gain", ADAM), figure(result, world, "controls", control, "gain", ADAM)
    return ours is not None and theirs is not None and overlap(ours, theirs)


def _gain_of_controls(result: Result, found: Sequence[Claim]) -> Iterator[Finding]:
    """Controls whose gain is on the same side of 1 and cannot be told from the method's."""
    ours = {claim.world: claim for claim in found}
    names = dict.fromkeys(name for world in ours for name in value_of(result, world, "controls") or ())
    for name in names:
        theirs = claims(result, ("controls", name, "gain", ADAM), 1.0, len(ours))
        alike = [
            claim
            for claim in theirs
            if claim.world in ours and claim.sign == ours[claim.world].sign and _overlap_95(result, claim.world, name)
        ]
        if alike:
            beside = each([ours[claim.world] for claim in alike])
            where = f"In {worlds(alike)} its control {name} gains about as much"
            yield Finding(
                claim=f"{where}: there this is no effect of what it finds",
                evidence=f"The control has {each(alike)}; the method has {beside}",
            )


def beside_best(result: Result) -> list[Claim]:
    """The gain less that of the best constant baseline in each world; the intervals of all hold together."""
    return claims(result, ("gain_beside_baseline", "best_constant", ADAM), 0.0, len(gains(result)))


def _baselines(result: Result) -> Iterator[Finding]:
    """What remains of the gain beside a lower baseline, and with equal praise and blame."""
    signs = {claim.world: claim.sign for claim in gains(result)}
    groups = by_sign(claim for claim in beside_best(result) if signs.get(claim.world, -1) >= 0)
    said = {
        1: "Its gain is more than that of any lower baseline",
        0: "Its gain in a step is that of a lower baseline",
        -1: "A lower baseline alone gains more",
    }
    for sign, some in groups.items():
        if some:
            claim = said[sign] + (f" in {worlds(some)}" if len(some) < len(signs) else "")
            yield Finding(claim=claim, evidence=f"Beside the best one, the difference is {each(some)}", main=True)
    groups = by_sign(claims(result, ("gain_beside_baseline", "balanced", ADAM), 0.0, len(signs)))
    groups[0] = [claim for claim in groups[0] if signs.get(claim.world) == 1]
    said = {1: "a step still gains more", 0: "nothing of its gain is seen to remain", -1: "a step loses"}
    for sign, some in groups.items():
        if some:
            claim = f"With praise and blame of equal size {said[sign]} in {worlds(some, len(signs))}"
            difference = f"the difference from uniform credit is {each(some)}"
            yield Finding(claim=claim, evidence=f"Under the control Balanced, {difference}")


# --- training and cost --------------------------------------------------------------------------------------------


def _training(result: Result) -> Iterator[Finding]:
    trained = [world for world in worlds_of(result) if value_of(result, world, "training")]
    if not trained and gains(result):
        why = next(filter(None, (reason(result, world, "training") for world in worlds_of(result))), "")
        yield Finding(
            claim="It was not trained", evidence=f"The gain of one step does not tell what training does. {why}"
        )
    for path, other in ((("training",), "uniform credit"), (("training", "beside_baseline"), "the lower baseline")):
        groups: dict[int | None, list[str]] = {1: [], -1: [], 0: [], None: []}
        for world in trained:
            if value_of(result, world, *path):
                groups[difference_in_training(result, world, path)].append(world)
        said = {
            1: f"is better than with {other}",
            0: f"is not seen to differ from that with {other}",
            -1: f"is worse than with {other}",
            None: f"has no interval beside {other}",
        }
        for sign, some in groups.items():
            if some:
                evidence = "; ".join(_trained(result, world, path) for world in some)
                where = listed(list(map(in_words, some)))
                yield Finding(claim=f"Training in {where} {said[sign]}", evidence=evidence, main=sign is not None)


def difference_in_training(result: Result, world: str, path: tuple[str, ...]) -> int | None:
    """The sign of a difference in training, 0 if it could be chance, None without an interval."""
    facts, mean = value_of(result, world, *path) or {}, figure(result, world, *path, "over_training")
    if mean is None:
        return None
    p = facts.get("p_holm")
    return Claim(world=world, estimate=mean, neutral=0.0).sign if p is not None and p < 0.05 else 0


def _trained(result: Result, world: str, path: tuple[str, ...]) -> str:
    """The figures of a comparison of training runs, which are paired by seed."""
    facts = value_of(result, world, *path)
    mean, end = (figure(result, world, *path, name) for name in ("over_training", "end"))
    baseline = f" ({facts['baseline']})" if facts.get("baseline") else ""
    if mean is None:
        why = reason(result, world, *path, "over_training") or "there are too few seeds"
        return f"{in_words(world)}{baseline}: {why.rstrip('.')}"
    p, power = facts.get("p_holm"), facts.get("detectable")
    tested = "" if p is None else ", p < 0.001 (Holm)" if p < 0.001 else f", p = {p:.3f} (Holm)"
    text = f"{in_words(world)}{baseline}, as a mean over training: {_points(mean)}{tested}"
    if difference_in_training(result, world, path):
        return f"{text}, at the end: {_points(end)}" if end is not None else text
    better, worse = (number(max(limit, 0.0), 1) for limit in (mean.high, -mean.low))
    found = f", and {power:.1f} points would be found four times in five" if power is not None else ""
    return f"{text}, so that more than {better} points better or {worse} worse is excluded{found}"


def _points(estimate: Estimate) -> str:
    """``+0.4 points (-1.0 to 1.8)``."""
    sign = "+" if estimate.value >= 0.05 else ""
    limits = f"{number(estimate.low, 1)} to {number(estimate.high, 1)}"
    return f"{sign}{number(estimate.value, 1)} points ({limits})"


def _cost(result: Result) -> Iterator[Finding]:
    steps = claims(result, ("cost", "step"), 1.0)
    if not steps:
        return
    extra = []
    for key, one, several in (
        ("forward_passes", "forward pass", "forward passes"),
        ("extra_tokens", "sampled token for each token", "sampled tokens for each token"),
    ):
        values = [value for world in worlds_of(result) if (value := value_of(result, world, "cost", key)) is not None]
        if values and max(values) > 0:
            extra.append(f"{max(values):.3g} {one if max(values) == 1 else several}")
    claim = f"A training step takes {_times(steps)} the time of one with uniform credit"
    yield Finding(claim=claim, evidence=f"It adds at most {listed(extra)}" if extra else "")


def _times(steps: Sequence[Claim]) -> str:
    """``1.2 to 1.9 times`` over the worlds."""
    low, high = (number(limit(claim.estimate.value for claim in steps)) for limit in (min, max))
    return f"{low} times" if low == high else f"{low} to {high} times"
