"""The findings of a verdict about detection: which errors a method finds, and what else finds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from grail_lightning.app.benchmark.claims import (
    CHANCE,
    Claim,
    Finding,
    brackets,
    by_sign,
    claims,
    each,
    in_words,
    listed,
    number,
    overlap,
    plural,
    widened,
    worlds,
)
from grail_lightning.app.benchmark.result import Result, errors_of, figure, reason, value_of, worlds_of

PLAIN = ("position", "entropy", "surprisal", "rarity")
"""`method` of the reference rows that are scores without an idea of credit."""
_LIMITS = (0.0, 1.0)
_Found = Mapping[str, Sequence[Claim]]  # By the kind of error.


def detection(result: Result, references: Sequence[Result]) -> Iterator[Finding]:
    """What is found at forks, the confounds of that, and whether the blame follows."""
    found = at_forks(result)
    if found:
        evidence = "; ".join(_figures(error, some) for error, some in found.items())
        where = "At forks, where position and context are the same and chance is 0.5, the AUROC is: "
        yield Finding(claim=headline(found), evidence=where + evidence, main=True)
    else:
        why = next((reason(result, world, "auroc_forks") or "" for world in worlds_of(result)), "")
        yield Finding(claim="Whether it finds errors at forks is not measured", evidence=why)
    yield from _position(result, found, references)
    yield from _plain_scores(result, found, references)
    yield from _controls(result, found)
    yield from _blame(result, found)


def at_forks(result: Result) -> dict[str, list[Claim]]:
    """The AUROC at forks in each world, by the kind of error; the intervals of all hold together."""
    names = dict.fromkeys(error for world in worlds_of(result) for error in errors_of(result, world))
    paths = [("auroc_forks", error) for error in names]
    number_of = sum(figure(result, world, *path) is not None for world in worlds_of(result) for path in paths)
    found = {path[1]: claims(result, path, CHANCE, number_of, _LIMITS) for path in paths}
    return {error: some for error, some in found.items() if some}


def headline(found: _Found) -> str:
    """``Finds slips, but not misconceptions``."""
    finds, misses, against = [], [], []
    for error, some in found.items():
        groups = by_sign(some)
        if groups[1]:
            alone = f" in {worlds(groups[1])} alone" if len(groups[1]) < len(some) else ""
            finds.append(plural(error) + alone)
        elif groups[0]:
            misses.append(plural(error))
        if groups[-1]:
            against.append(f"{plural(error)} in {worlds(groups[-1])}")
    text = f"finds {listed(finds)}" if finds else ""
    if misses and finds:
        text += f", but not {listed(misses, 'or')}"
    elif misses:
        text = f"finds neither {listed(misses, 'nor')}" if len(misses) > 1 else f"does not find {misses[0]}"
    if against:
        text += f"{', and ' if text else ''}ranks {listed(against)} below sound steps"
    return text


def _figures(error: str, found: Sequence[Claim]) -> str:
    """The figures of an error at forks; of a null, what it excludes."""
    groups = by_sign(found)
    parts = [each(groups[1])] if groups[1] else []
    if groups[-1]:
        parts.append(f"{each(groups[-1])}, below chance")
    if groups[0]:
        limit = number(max(claim.estimate.high for claim in groups[0]))
        excluded = "" if limit == number(CHANCE) else f": more than {limit} is excluded"
        parts.append(f"{each(groups[0])}, not to be told from chance{excluded}")
    return f"{plural(error)} {', and '.join(parts)}"


def _position(result: Result, found: _Found, references: Sequence[Result]) -> Iterator[Finding]:
    """Errors that are ranked above sound steps within a rollout, but are not found at forks."""
    position = next((row for row in references if row["method"] == "position"), None)
    ranked: dict[str, list[Claim]] = {}
    alone = []
    for world in worlds_of(result):
        for error in errors_of(result, world):
            ours = figure(result, world, "auroc_rollout", error)
            at_fork = next((claim for claim in found.get(error, ()) if claim.world == world), None)
            if ours is None or ours.low <= CHANCE or (at_fork is not None and at_fork.sign > 0):
                continue
            ranked.setdefault(error, []).append(Claim(world=world, estimate=ours, neutral=CHANCE))
            theirs = figure(position, world, "auroc_rollout", error) if position else None
            alone += [theirs.value] if theirs and theirs.low > CHANCE else []
    if ranked:
        said = "; ".join(f"{plural(error)} {each(some)}" for error, some in ranked.items())
        beside = f", and position alone reaches {number(max(alone))}" if alone else ""
        yield Finding(
            claim="What it finds within a rollout may be position alone",
            evidence=f"It ranks errors above sound steps there ({said}), but sound steps stand before the "
            f"first error{beside}: so forks decide",
        )


def _plain_scores(result: Result, found: _Found, references: Sequence[Result]) -> Iterator[Finding]:
    """Plain scores that are at least as good at forks where the method finds an error."""
    for row in references:
        if row["method"] not in PLAIN or row["method"] == result["method"]:
            continue
        said: dict[str, str] = {}
        for error, some in found.items():
            alike = []
            for claim in some:
                theirs = figure(row, claim.world, "auroc_forks", error)
                if claim.sign <= 0 or theirs is None or theirs.low <= CHANCE:
                    continue
                if theirs.value >= claim.estimate.value or overlap(theirs, claim.estimate):
                    alike.append(Claim(world=claim.world, estimate=theirs, neutral=CHANCE))
            if alike:
                said[plural(error)] = f"{plural(error)} {each(alike)}"
        if said:
            yield Finding(
                claim=f"The plain score {row['label']} finds {listed([*said])} as well",
                evidence=f"Its AUROC at forks: {'; '.join(said.values())}",
            )


def _controls(result: Result, found: _Found) -> Iterator[Finding]:
    """Controls that find, at forks, what the method finds."""
    names = dict.fromkeys(name for world in worlds_of(result) for name in value_of(result, world, "controls") or ())
    number_of = sum(map(len, found.values()))
    for name in names:
        alike: list[str] = []
        partly: list[str] = []
        for error, some in found.items():
            for claim in some:
                raw = figure(result, claim.world, "controls", name, "auroc_forks", error)
                if raw is None or claim.sign <= 0:
                    continue
                theirs = widened(raw, number_of, _LIMITS)
                if theirs.low > CHANCE:
                    said = f"{plural(error)} {brackets(theirs)} in {in_words(claim.world)}"
                    (alike if overlap(theirs, claim.estimate) else partly).append(said)
        if alike:
            yield Finding(
                claim=f"Its control {name} does as well, so what it measures is not what finds them",
                evidence=f"At forks the control has {'; '.join(alike)}",
            )
        if partly:
            yield Finding(
                claim=f"A part has another cause, which its control {name} shows",
                evidence=f"At forks the control is above chance, too: {'; '.join(partly)}",
            )


def _blame(result: Result, found: _Found) -> Iterator[Finding]:
    """Whether finding errors puts more of the blame on them."""
    finds = {claim.world for some in found.values() for claim in some if claim.sign > 0}
    more: list[str] = []
    same: list[str] = []
    for world in worlds_of(result):
        ours, uniform = (figure(result, world, "blame", name) for name in ("flawed", "flawed_uniform"))
        if world in finds and ours is not None and uniform is not None:
            said = f"{number(ours.value)} in {in_words(world)} (uniform credit {number(uniform.value)})"
            (more if ours.low > uniform.high else same).append(said)
    for some, claim in (
        (more, "Flawed steps get more of the blame than with uniform credit"),
        (same, "Flawed steps are not seen to get more of the blame"),
    ):
        if some:
            yield Finding(claim=claim, evidence=f"The share of the blame of wrong rollouts is {listed(some)}")
