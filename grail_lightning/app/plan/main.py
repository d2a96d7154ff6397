"""``python -m grail_lightning.plan``: whether a run fits, before a machine is rented, and what to set if not."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd
from jsonargparse import Namespace
from jsonargparse.typing import PositiveFloat, PositiveInt

from grail_lightning.app.cli.app import FitOptions, mistakes_in_one_line
from grail_lightning.app.plan.advice import applied, effects, fitting, levers
from grail_lightning.app.plan.memory import ModelSizes, Plan, peaks, plan_memory, services_of
from grail_lightning.core.policy.source import LoRA, first_line, read_config

_GIB = 2**30
SHARE = 0.92
"""The part of a device's memory that a run may take; the rest stays free for libraries."""


class Planner:
    """Plans a run with other options and on numbers of devices.

    Args:
        fit: The options of the run.
        config: The config of its model.
        prompt: Tokens of the longest prompt.
    """

    def __init__(self, fit: Namespace, config: Any, prompt: int) -> None:
        self.services, self.prompt = services_of(fit.model), prompt
        self._sizes = cache(partial(ModelSizes, config))  # To build a model takes a second.

    def sizes(self, options: Namespace) -> ModelSizes:
        """The sizes of the model with the adapters of the options."""
        lora = options.model.loading.lora
        return self._sizes(LoRA(**lora.as_dict()) if lora else None)

    def __call__(self, options: Namespace, ranks: int) -> dict[str, Any]:
        """What `plan_memory` gives."""
        return plan_memory(options, self.sizes(options), self.services, ranks, self.prompt)


def main(arguments: list[str] | None = None) -> None:
    """Print the plan for several numbers of devices. A user's mistake is one line, with exit code 2."""
    parser = argparse.ArgumentParser(
        "python -m grail_lightning.plan",
        description="Memory of each device of a run, and what to set if it is too much. All further options are those "
        "of `fit`.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--gpus", type=PositiveInt, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="numbers of devices"
    )
    parser.add_argument("--gpu_memory_gib", type=PositiveFloat, help="memory of one (default: 80, or this machine's)")
    parser.add_argument(
        "--prompt_tokens", type=PositiveInt, help="longest prompt (default: data.max_prompt_length, or 256)"
    )
    parser.add_argument("--model_config", type=Path, help="a config.json, if the policy's cannot be read here")
    parser.add_argument("--json", action="store_true", help="print bytes as JSON")
    options, others = parser.parse_known_args(arguments)
    with mistakes_in_one_line():
        fit = FitOptions().parse(others)
        config = _config(fit, options.model_config)
        prompt = options.prompt_tokens or (fit.get("data.init_args") or {}).get("max_prompt_length") or 256
        plan = Planner(fit, config, prompt)
        plans = [plan(fit, ranks) for ranks in options.gpus]
    if options.json:
        print(json.dumps(plans, indent=2))
        return
    model = plan.sizes(fit)
    on_cpu, nodes = fit.trainer.accelerator == "cpu", int(fit.trainer.num_nodes or 1)
    default_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB if on_cpu else 80
    limit = options.gpu_memory_gib or default_gib
    # The ranks of a machine without GPUs share its memory.
    sharing = [max(1, ranks // nodes) if on_cpu and not options.gpu_memory_gib else 1 for ranks in options.gpus]
    print(f"{fit.model.policy}: {model.parameters:,} parameters, {model.trained:,} trained")
    print(_table(plans, limit, sharing))
    own = fit.trainer.devices * nodes if isinstance(fit.trainer.devices, int) else 1
    asked = options.gpus.index(own) if own in options.gpus else 0
    row = prompt + fit.model.sampling.max_response_length
    room = SHARE * limit * _GIB / sharing[asked]
    print(_answer(fit, plan, options.gpus[asked], row, limit, room))


def _config(fit: Namespace, file: Path | None) -> Any:
    """The config of the run's model, which may be given as a file."""
    policy = file.absolute() if file else fit.model.policy
    try:
        return read_config(str(policy), fit.model.loading.trust_remote_code)
    except ValueError as error:
        if file:
            message = f"`--model_config` must be the config.json of a model, but got {file}"
            raise ValueError(f"{message}: {first_line(error.__cause__ or error)}") from error
        raise ValueError(f"{error} For a plan its config.json is enough: --model_config FILE.") from error


def _table(plans: list[dict[str, Any]], limit: float, sharing: list[int]) -> str:
    """One column for each number of devices, in GiB.

    `sharing` ranks of each plan have the memory of one device together.
    """
    columns = {}
    for plan, together in zip(plans, sharing, strict=True):
        column: dict[str, float | str] = {}
        for phase, needed in peaks(plan).items():
            column |= {f"  {phase}: {part}": size / _GIB for part, size in plan[phase].items()}
            column[f"peak of {phase}"] = needed / _GIB
        column[f"fits {limit:.0f} GiB"] = "yes" if together * peak(plan)[0] < SHARE * limit * _GIB else "NO"
        column["a checkpoint on disk"] = plan["checkpoint"] / _GIB
        columns[plan["devices"]] = column
    table = pd.DataFrame(columns).rename_axis(columns="GiB of each device")
    shown = table[(table != 0).any(axis=1)]
    return str(shown.to_string(float_format="{:.2f}".format, justify="right", col_space=9))


def peak(plan: Plan) -> tuple[float, str]:
    """The bytes of the phase that needs most, and its name."""
    return max((size, phase) for phase, size in peaks(plan).items())


def _answer(
    fit: Namespace, plan: Callable[[Namespace, int], Plan], ranks: int, row: int, limit: float, room: float
) -> str:
    """Whether the run fits on so many devices, of `limit` GiB, and what to set if not."""
    devices = f"{limit:.0f} GiB on {ranks} device{'s' * (ranks > 1)}"
    needed, phase = peak(plan(fit, ranks))
    of = f"{needed / _GIB:.1f} GiB ({phase}) of the {room / _GIB:.1f} that can be used"
    if needed < room:
        return f"\nIt fits {devices}: it needs {of}."
    ways = levers(fit, row, ranks)
    alone = effects(fit, ways, lambda options: plan(options, ranks), room)
    together = fitting(fit, ways, lambda options: plan(options, ranks), room)
    lines = [f"\nIt does not fit {devices}: it needs {of}."]
    if alone:
        phases, width = [*alone[0].saved], max(len(effect.price) for effect in alone)
        lines.append("GiB that each of these saves alone, the largest effect first:")
        lines.append("".join(f"{phase:>10}" for phase in phases))
        for effect in alone:
            saved = "".join(f"{size / _GIB:10.2f}" for size in effect.saved.values())
            lines.append(f"{saved}  {effect.price:{width}}  {effect.change.command}")
    if together is None:
        return "\n".join([*lines, "All together are not enough: take more devices, or a smaller model."])
    after, phase = peak(plan(applied(fit, together), ranks))
    lines += ["It fits with", *(f"  {change.command}" for change in together)]
    return "\n".join([*lines, f"and then needs {after / _GIB:.1f} GiB ({phase})."])
