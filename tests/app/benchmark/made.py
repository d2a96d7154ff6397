"""Results of methods as the benchmark writes them, with figures like those of docs/research/what_finds_errors.md."""

import random
from copy import deepcopy

ERRORS = {"sums": ("slip", "misconception"), "words": ("slip", "misconception"), "code": ("slip", "misconception")}
ERRORS["search"] = ("bad turn",)
WORLDS = ("sums", "words", "code")


def within(value, half, low=-1e9, high=1e9):
    """An interval around a value."""
    return [value, round(max(value - half, low), 6), round(min(value + half, high), 6)]


def auroc(value, half=0.04):
    return within(value, half, 0.0, 1.0)


def both(value, half=0.02):
    return {"sgd": within(round(value * 1.01, 4), 2 * half), "adam": within(value, half)}


def world(name, forks, rollout, gain=1.0, beside=0.0, balanced=0.0, **others):
    """The figures of a world: one number or interval for each kind of error, and the gain of a step."""
    errors = ERRORS[name]

    def each(values):
        values = values if isinstance(values, tuple) else (values,) * len(errors)
        return {e: v if v is None or isinstance(v, list) else auroc(v) for e, v in zip(errors, values, strict=True)}

    figures = {
        "rollouts": 4096,
        "prompts": 512,
        "wrong": 980,
        "right": 810,
        "auroc_rollout": each(rollout),
        "auroc_forks": each(forks),
        "blame": {"flawed": within(0.14, 0.01), "flawed_uniform": within(0.12, 0.005)},
        "values": {"wrong": within(0.1, 0.12), "right": within(0.05, 0.14)},
        "weights": {
            "flawed": within(1.08, 0.02),
            "sound": within(0.86, 0.01),
            "inherited": within(1.2, 0.02),
            "filler": within(1.15, 0.02),
            "answer": within(5.0, 0.0),
        },
        "gain": both(gain),
        "share_of_limit": both(round((gain - 1) / 0.3, 2), 0.08),
        "gain_beside_baseline": {"balanced": both(balanced, 0.02), "best_constant": both(beside, 0.02)},
        "direction": within(0.998, 0.002),
        "noise": within(1.02, 0.02),
        "cost": {"step": within(1.24, 0.05), "forward_passes": 1.0, "extra_tokens": 0.0, "memory_mib": 12.0},
        "training": None,
        "controls": {
            "Shuffled": {
                "auroc_rollout": each(0.5),
                "auroc_forks": each(0.49),
                "gain": both(1.0),
            }
        },
        "seconds": 104.3,
        "reasons": {"training": "Give --train to train with the method."},
    }
    return figures | others


def curve(start, end, half=0.02, number=7):
    """A learning curve from one accuracy to another, with a band."""
    mean = [round(start + (end - start) * (1 - 0.6**k) / (1 - 0.6 ** (number - 1)), 4) for k in range(number)]
    low, high = ([round(m + s * half * (k > 0), 4) for k, m in enumerate(mean)] for s in (-1, 1))
    return {"steps": [10 * k for k in range(number)], "mean": mean, "low": low, "high": high}


def training(over=0.4, p=0.4, beside=-1.6, p_beside=0.2):
    """What ``--train`` measures, in percentage points."""
    return {
        "over_training": within(over, 1.4),
        "end": within(over / 2, 2.4),
        "p": p / 2,
        "p_holm": p,
        "detectable": 1.8,
        "rate": 0.0002,
        "seeds": [0, 1, 2, 3, 4, 5],
        "steps": 60,
        "beside_baseline": {
            "over_training": within(beside, 1.9),
            "end": within(beside / 2, 2.8),
            "p": p_beside / 2,
            "p_holm": p_beside,
            "detectable": 2.6,
            "baseline": "r - mean/2",
        },
        "curves": {
            "method": curve(0.42, 0.86),
            "uniform": curve(0.42, 0.855),
            "baseline": curve(0.42, 0.875),
        },
    }


def result(method, worlds, **others):
    """The JSON of a method."""
    made = {
        "format": 1,
        "method": method,
        "label": method,
        "options": {},
        "control": None,
        "advantage": {"class_path": "GroupMean", "init_args": {}},
        "package": "0.1.0",
        "code": "3f2a9c51",
        "versions": {"python": "3.12.3", "torch": "2.13.0", "numpy": "2.3.4"},
        "machine": "AMD EPYC 7763, 2 cores",
        "date": "2026-11-29",
        "command": f"python -m grail_lightning.benchmark {method}",
        "seed": 0,
        "batches": 32,
        "reads": [],
        "oracle": False,
        "worlds": worlds,
        "reasons": {},
        "examples": [],
        "verdict": [],
    }
    return deepcopy(made | others)


def score(method, forks, rollout):
    """A reference row that ranks tokens and has no weights."""
    none = dict.fromkeys(("blame", "weights", "gain", "share_of_limit", "gain_beside_baseline", "controls"))
    why = {"gain": "A score has no weights.", "training": "A score has no weights."}
    bare = none | {"direction": None, "noise": None, "cost": None, "reasons": why}
    return result(method, {name: world(name, forks, rollout) | bare for name in WORLDS})


def example(name="sums", outcome="wrong", seed=0):
    """A rollout of a chain of sums with a wrong step, and weights."""
    draw = random.Random(seed)
    lines = [
        ("7+5=12", "sound"),
        ("12-3=8", "slip"),
        ("8+6=14", "inherited"),
        ("so we get", "filler"),
        ("14+2=16", "inherited"),
    ]
    if outcome == "right":
        lines = [("7+5=12", "sound"), ("12-3=9", "sound"), ("9+6=15", "sound")]
    tokens, weights, steps = [], [], []
    for text, kind in lines:
        pieces = text.split(" ") if " " in text else list(text)
        pieces = [piece + " " for piece in pieces] if " " in text else pieces
        steps.append({"start": len(tokens), "stop": len(tokens) + len(pieces), "kind": kind})
        tokens += [*pieces, "\n"]
        scale = {"slip": 2.6, "sound": 0.6, "inherited": 1.2, "filler": 0.9}[kind]
        weights += [round(scale * draw.uniform(0.6, 1.4), 3) for _ in range(len(pieces) + 1)]
    tokens += ["\\boxed", "{", "1", "6", "}", "<end>"]
    weights += [1.0, 1.0, 5.0, 5.0, 1.0, 0.5]
    return {
        "world": name,
        "prompt": "Compute 7+5-3+6+2.",
        "outcome": outcome,
        "tokens": tokens,
        "weights": weights,
        "advantages": [round(-0.625 * w, 3) for w in weights],
        "steps": steps,
    }


def turn_example():
    """A rollout of a search whose second turn is bad; the environment's answer was not sampled."""
    tokens = [
        "search(",
        "Norma",
        ")",
        "\n",
        "found: ",
        "Vek",
        "\n",
        "search(",
        "Oslo",
        ")",
        "\n",
        "\\boxed{",
        "Oslo",
        "}",
    ]
    weights = [0.9, 0.9, 1.0, 1.0, None, None, None, 1.9, 2.4, 1.8, 1.0, 1.0, 1.1, 1.0]
    return {
        "world": "search",
        "prompt": "In which town does the neighbour of Norma live?",
        "outcome": "wrong",
        "tokens": tokens,
        "weights": weights,
        "advantages": [],
        "steps": [{"start": 0, "stop": 4, "kind": "sound"}, {"start": 7, "stop": 11, "kind": "bad turn"}],
    }


def grail(trained=True):
    """GRAIL: ranks errors within a rollout alone, gains less in a step, was trained."""
    reads = {"reads": ["reference answers"]}
    sums = world("sums", (0.46, 0.58), (0.84, 0.87), 0.90, -0.32, -0.1)
    sums["controls"]["Shuffled"]["gain"] = both(0.9)
    words = world("words", (0.47, 0.55), (0.80, 0.82), 0.91, -0.35, -0.08)
    code = world("code", (0.5, [0.61, 0.4, 0.8]), (0.6, None), 0.95, -0.26, -0.05)
    code["reasons"]["auroc_rollout.misconception"] = "No wrong rollout has a misconception beside a sound step."
    search = world("search", 0.52, 0.55, 0.82, -0.39, -0.2)
    if trained:
        sums["training"], words["training"] = training(-1.8, 0.009), training(-0.2, 0.815)
        del sums["reasons"]["training"], words["reasons"]["training"]
        code["reasons"]["training"] = "--train was given for sums and words alone."
    examples = [example(), example(outcome="right", seed=1), example("words", seed=2), turn_example()]
    worlds = {"sums": sums, "words": words, "code": code, "search": search, "charts": None}
    why = {"charts": "GRAIL explains an answer in a box, and the answer of a chart is a number without one."}
    return result("GRAIL", worlds, reasons=why, examples=examples, **reads)


def tree(trained=False):
    """TreeAdvantage: finds errors at forks, and its gain is that of a lower baseline in one world."""
    sums = world("sums", (0.99, 0.99), (0.88, 0.84), 1.05, -0.17, 0.03)
    sums["blame"] = {"flawed": within(0.21, 0.01), "flawed_uniform": within(0.12, 0.005)}
    sums["values"]["wrong"] = within(0.74, 0.06)
    for name, figures in (("sums", sums),):
        figures["controls"]["PermutedRewards"] = {
            "auroc_rollout": {e: auroc(0.55) for e in ERRORS[name]},
            "auroc_forks": {e: auroc(v, 0.03) for e, v in zip(ERRORS[name], (0.6, 0.52), strict=True)},
            "gain": both(0.9),
        }
    if trained:
        sums["training"] = training(3.5, 0.003, 1.9, 0.03)
        del sums["reasons"]["training"]
    words = world("words", (0.95, 0.97), (0.88, 0.84), 1.10, 0.0, 0.0)
    code = world("code", (0.97, 0.9), (0.7, 0.7), 1.06, -0.2, 0.0)
    search = world("search", 0.9, 0.8, 1.02, -0.19, 0.0, values=None)
    search["reasons"]["values"] = "No resampled values are shipped for this world."
    worlds = {"sums": sums, "words": words, "code": code, "search": search, "charts": None}
    reasons = {"charts": "Its rollouts share no text."}
    return result("TreeAdvantage", worlds, reasons=reasons, examples=[example(seed=3)])


def oracle():
    worlds = {name: world(name, 1.0, 0.93, 0.95, -0.2, 0.1) for name in WORLDS}
    return result("Oracle", worlds, reads=["labels"], oracle=True)


def uniform():
    exact = {"sgd": [1.0, 1.0, 1.0], "adam": [1.0, 1.0, 1.0]}
    half = [0.5, 0.5, 0.5]
    none = {key: {"sgd": None, "adam": None} for key in ("balanced", "best_constant")}
    worlds = {
        name: world(name, half, half, gain=1.0) | {"gain": exact, "gain_beside_baseline": none} for name in WORLDS
    }
    return result("Uniform", worlds)


def references():
    """The reference rows, in the order in which they are shown."""
    return [
        grail(trained=False),
        tree(),
        oracle(),
        uniform(),
        score("surprisal", (1.0, 0.43), (0.99, 0.8)) | {"label": "surprisal (-log p)"},
        score("entropy", [0.5, 0.5, 0.5], (0.64, 0.78)),
        score("position", [0.5, 0.5, 0.5], [1.0, 1.0, 1.0]),
    ]
