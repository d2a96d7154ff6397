"""How many runs a machine takes at once, and what each of them gets of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from grail_lightning.plan.capacity import Planner
from grail_lightning.plan.seconds import PRESETS
from grail_lightning.plan.settings import read_settings
from grail_lightning.plan.shapes import model_config
from grail_lightning.sweep.plan import Planned

# What a process takes before it has a model: Python, torch, Transformers and Lightning (0.6 GiB measured), with room.
PROCESS_BYTES = 2**30
THREADS, VISIBLE = "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The places of a machine in which runs can be at once.

    Attributes:
        environments: The variables of the environment of each place.
        reason: What limits their number, in words.
    """

    environments: tuple[dict[str, str], ...]
    reason: str


def slots(plans: Sequence[Planned], jobs: int | None) -> Slots:
    """The places for these runs on this machine.

    On GPUs each run gets as many as its `trainer.devices` asks for, for itself. On CPUs a run gets a core for each of
    its processes, and its share of the others as threads; the memory that is available limits their number.

    Args:
        plans: The runs.
        jobs: The number of places that the user wants; None for as many as fit.

    Raises:
        ValueError: If a run asks for more GPUs than there are, or `jobs` does.
    """
    devices = max(plan.devices for plan in plans)
    gpus = visible_gpus() if any(plan.on_gpu for plan in plans) else []
    if not gpus and any(plan.fit.trainer.get("accelerator") in ("gpu", "cuda") for plan in plans):
        raise ValueError("`trainer.accelerator` must be cpu or auto on a machine without GPUs, but got gpu.")
    visible = shared_out(gpus, devices, jobs) if gpus else []
    if jobs is not None:
        number, reason = jobs, "--jobs"
    else:
        number, reason = (len(visible), f"{len(gpus)} GPU(s)") if gpus else _on_cpus(plans, devices)
    threads = {} if THREADS in os.environ else {THREADS: str(max(1, cores() // (number * devices)))}
    places = [threads | {VISIBLE: names} for names in visible] if gpus else [threads] * number
    return Slots(environments=tuple(places), reason=reason)


def shared_out(gpus: Sequence[str], devices: int, jobs: int | None) -> list[str]:
    """The GPUs of each place, as ``CUDA_VISIBLE_DEVICES`` names them.

    Args:
        gpus: The names of all GPUs.
        devices: The number that each run asks for.
        jobs: The number of places; None for as many as there are GPUs for.

    Raises:
        ValueError: If there are not enough.
    """
    number = max(1, len(gpus) // devices) if jobs is None else jobs  # A place too many stays empty.
    if number * devices > len(gpus):
        raise ValueError(
            f"`--jobs` must leave {devices} GPU(s) to each run, but {number} at once need {number * devices} and "
            f"{len(gpus)} can be seen. Lower it, or `trainer.devices`."
        )
    return [",".join(gpus[place * devices : (place + 1) * devices]) for place in range(number)]


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    given = os.environ.get(VISIBLE)
    number = torch.cuda.device_count()
    return [name.strip() for name in given.split(",")][:number] if given else [str(k) for k in range(number)]


def cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _on_cpus(plans: Sequence[Planned], devices: int) -> tuple[int, str]:
    """The number of runs for which there are cores and memory, and what limits it."""
    by_cores = min(len(plans), max(1, cores() // devices))
    one_of_each = {plan.run.group: plan for plan in plans}.values()  # The runs of a method and task need the same.
    available, needed = available_bytes(), devices * max(_bytes(plan) for plan in one_of_each)
    if available is not None and (by_memory := max(1, available // needed)) < by_cores:
        return by_memory, f"{available / 2**30:.1f} GiB of memory, {needed / 2**30:.1f} a run"
    return by_cores, f"{cores()} core(s)" if by_cores < len(plans) else "all of them"


def available_bytes() -> int | None:
    """The memory for new processes, within the limit of a container; None where the system does not say."""
    found, system = [], Path("/proc/meminfo")
    if system.is_file():
        lines = system.read_text().splitlines()
        found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.is_file() and used.is_file() and (given := limit.read_text().strip()).isdigit():
        found.append(max(0, int(given) - int(used.read_text())))
    return min(found) if found else None


def _bytes(plan: Planned) -> int:
    """The memory of one process of a run, as `python -m grail_lightning.plan` computes it; 0 where it cannot."""
    try:
        settings = read_settings(plan.fit)
        config, _ = model_config(settings)
        capacity = Planner(config, PRESETS["h100"]).plan(settings, plan.devices)  # Times are not asked for.
        return PROCESS_BYTES + capacity.peak.total
    except (ValueError, OSError):  # A model that is not here, or settings that cannot be planned.
        return PROCESS_BYTES
