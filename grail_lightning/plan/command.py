"""The command ``python -m grail_lightning.plan``: its options, and the plan that it prints."""

from __future__ import annotations

import argparse
import json
import os
import sys

from grail_lightning.cli.app import mistakes_in_one_line
from grail_lightning.cli.fit_options import fit_options
from grail_lightning.plan.advice import advise
from grail_lightning.plan.capacity import Planner
from grail_lightning.plan.seconds import read_rates
from grail_lightning.plan.settings import read_settings
from grail_lightning.plan.shapes import model_config
from grail_lightning.plan.table import GIB, Plans, as_values, lines
from grail_lightning.runtime.arguments import Parser

RANKS = (1, 2, 4, 8, 16, 32, 64)
DESCRIPTION = """What a run will need of each device: memory of each phase, and seconds. No weights are loaded.

All further options are those of `grail-lightning fit`, --config among them."""


def make_parser() -> Parser:
    """The options beside those of ``fit``."""
    parser = Parser("python -m grail_lightning.plan", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--gpus", type=int, nargs="+", help="numbers of devices (default: 1 to 64)")
    parser.add_argument(
        "--gpu_memory_gib", type=float, help="memory of a device (default: 80, or the machine for CPUs)"
    )
    parser.add_argument("--reserve", type=float, default=0.08, help="the share of it left free (default: %(default)s)")
    parser.add_argument(
        "--rates",
        nargs="+",
        default=[],
        help="a100, h100, h200 or measured (here), and values such as tflops=300 memory=2000 link=150 block_ms=0.4",
    )
    parser.add_argument("--prompt_tokens", type=int, help="longest prompt (default: data.max_prompt_length, or 256)")
    parser.add_argument("--response_tokens", type=float, help="mean response, for seconds (default: half of the limit)")
    parser.add_argument("--model_config", help="a config.json or its folder, if the policy's cannot be read here")
    parser.add_argument("--json", action="store_true", help="print bytes and seconds as JSON")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Plan a run and print the plan. A user's mistake is one line, with exit code 2."""
    with mistakes_in_one_line():
        own, others = make_parser().parse_known_args(sys.argv[1:] if arguments is None else arguments)
        plans = make_plans(own, others)
        text = json.dumps(as_values(plans), indent=2) if own.json else "\n".join(lines(plans))
        print(text)


def make_plans(own: argparse.Namespace, others: list[str]) -> Plans:
    """The plans for all numbers of devices.

    Args:
        own: The options of this command.
        others: The options of ``fit``.

    Raises:
        ValueError: If an option is wrong, or the run cannot be planned.
    """
    if not 0 <= own.reserve < 1:
        raise ValueError(f"`--reserve` must lie in [0, 1), but got {own.reserve:g}.")
    settings = read_settings(fit_options(others), prompt_tokens=own.prompt_tokens, response_tokens=own.response_tokens)
    memory = _memory(own.gpu_memory_gib, settings.device)
    ranks = _ranks(own.gpus, settings.prompts_per_batch)
    config, source = model_config(settings, own.model_config)
    planner = Planner(config, read_rates(own.rates, settings.device))
    found = [planner.plan(settings, number) for number in ranks]
    limit = memory * (1 - own.reserve)
    too_large = [plan.ranks for plan in found if plan.peak.total > limit]
    return Plans(
        settings=settings,
        source=source,
        shapes=planner.shapes(settings),
        rates=planner.rates,
        memory=memory,
        reserve=own.reserve,
        plans=found,
        advice={number: advise(planner, settings, number, limit) for number in too_large},
    )


def _memory(given: float | None, device: str) -> int:
    if given is not None and given <= 0:
        raise ValueError(f"`--gpu_memory_gib` must be positive, but got {given:g}.")
    if given is not None:
        return round(given * GIB)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if device == "cpu" else 80 * GIB


def _ranks(given: list[int] | None, prompts: int) -> list[int]:
    """The numbers of devices, each of which needs a prompt of every batch."""
    if given is None:
        return [number for number in RANKS if number <= prompts]
    for number in given:
        if not 1 <= number <= prompts:
            raise ValueError(
                f"`--gpus` must lie between 1 and the {prompts} prompts of a batch, since each device needs one, but "
                f"got {number}. Raise `data.prompts_per_batch` for more."
            )
    return sorted(set(given))
