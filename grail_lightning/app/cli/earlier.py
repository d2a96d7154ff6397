"""What replaces the options, the values and the import paths of earlier versions, for messages about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grail_lightning.app.cli.classes import choices

_WORLDS = "grail_lightning.worlds"
_MOVED = {
    "model.objective": {"Objective": "DrGRPO"},
    "data.task.environment": {
        "Search": f"{_WORLDS}.search.environment.Search",
        "Charts": f"{_WORLDS}.charts.environment.Charts",
        "Calculator": f"{_WORLDS}.sums.calculator.Calculator",
        "Python": f"{_WORLDS}.code.python.Python",
    },
}
"""By option: the present name of a class that is not in `choices`, by the last part of its earlier import path."""


def present_option(option: str, value: Any) -> str:
    """A sentence, after a space, with what replaces an option of an earlier version; empty if none does.

    Args:
        option: The whole name of the option, such as ``model.objective.baseline``.
        value: Its value, as it stands in a file or on the command line.
    """
    *groups, name = option.split(".")
    group = groups[-1] if groups else ""
    if group == "distillation":
        return _written("model.objective", "SDPG", {name: value})
    if name == "distillation" and group in ("objective", ""):
        is_used = isinstance(value, Mapping)
        return (
            _written("model.objective", "SDPG", value) if is_used else " Leave it out: it is SDPG of `model.objective`."
        )
    if name == "scale_rewards":  # TRL's name, too; its values may be true and false.
        scale = {"true": "group", "false": "none"}.get(written_value(value).lower(), written_value(value))
        return _of_advantage("scale", scale, other={"bnpo": "BNPO"})
    if group == "objective" and name == "baseline":
        return _of_advantage("share", value, other={"energy": "EnergyBaseline"})
    if group == "objective" and name == "train_equal":
        return _of_advantage(name, value, other={})
    if name == "alignment" and {"credit", "compare"} & {*groups}:
        return f" Here it is `{'.'.join([*groups, 'read_at'])}`."
    if name == "backend" and group in ("task", "environment"):
        isolation = ".".join([*groups, "isolation"])
        return f" Here it is `{isolation}`.{present_isolation(isolation, value)}"
    return ""


def present_class(option: str, path: object) -> str:
    """A sentence, after a space, with the present name of a class of ours at an earlier path; else empty."""
    if not isinstance(path, str) or not path.startswith("grail_lightning."):
        return ""
    name = path.rpartition(".")[2]
    present = name if name in choices(option) else _MOVED.get(option, {}).get(name)
    return f" Write {present}." if present else ""


def present_isolation(option: str, value: object) -> str:
    """A sentence, after a space, with what replaces a text that earlier versions took as `isolation`; else empty."""
    if option.rpartition(".")[2] != "isolation" or not isinstance(value, str):
        return ""
    if value == "auto":
        return " Write null, which takes the first sandbox that isolates programs here."
    return _written(option, "Server", {"url": value}) if "://" in value else ""


def _of_advantage(name: str, value: object, other: Mapping[str, str]) -> str:
    """The sentence about an option of `GroupMean`, or about another estimator where the value stands for one."""
    estimator = other.get(written_value(value))
    return _written("model.advantage", estimator or "GroupMean", {} if estimator else {name: value})


def _written(option: str, name: str, init_args: Mapping[str, Any]) -> str:
    """The sentence with the arguments that name a class and set its options."""
    options = "".join(f" --{option}.{key}={written_value(value)}" for key, value in init_args.items())
    return f" Write --{option}={name}{options}."


def written_value(value: object) -> str:
    """A value as an argument shows it; an ellipsis for one that is no plain value."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) if isinstance(value, (str, int, float)) else "…"
