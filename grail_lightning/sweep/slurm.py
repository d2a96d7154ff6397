"""The script with which SLURM runs a sweep, one task of a job array for each run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from grail_lightning.sweep.plan import Planned


def script(file: Path, output: Path | None, plans: Sequence[Planned], numbers: Sequence[int]) -> str:
    """An sbatch script for these runs, to be adapted to the cluster.

    Args:
        file: The file of the sweep.
        output: The folder that `--output` gives; None without it.
        plans: Those of its runs that the script is for, in their order.
        numbers: The number of each of them among all runs of the sweep.
    """
    devices = max(plan.devices for plan in plans)
    gpu = any(plan.on_gpu for plan in plans)
    given = ["--output", str(output)] if output is not None else []
    command = shlex.join([sys.executable, "-m", "grail_lightning.sweep", str(file), *given])
    choosing = sum(plan.run.choosing for plan in plans)
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={file.stem}",
        f"#SBATCH --array={_array(numbers)}",
        "#SBATCH --ntasks=1",
        f"#SBATCH --cpus-per-task={4 * devices if gpu else devices}",
        *([f"#SBATCH --gpus={devices}"] if gpu else []),
        "#SBATCH --time=12:00:00",
        "#SBATCH --signal=B:TERM@600",
        f"#SBATCH --output={file.stem}_%a.out",
        f"# One task for each of the {len(plans)} runs. Submitted again, it goes on with those that are not finished.",
    ]
    if choosing:
        lines += [
            f"# The first {choosing} choose the points of the others, which are submitted behind them:",
            f"#   sbatch --array={_array(numbers[:choosing])} SCRIPT",
            f"#   sbatch --array={_array(numbers[choosing:])} --dependency=afterok:JOB SCRIPT",
        ]
    # `exec`, so that the signal before the end reaches the sweep, which lets its run save.
    lines += [f"cd {shlex.quote(str(Path.cwd()))}", f'exec {command} --index "$SLURM_ARRAY_TASK_ID"']
    return "\n".join(lines)


def _array(numbers: Sequence[int]) -> str:
    """Ascending numbers as SLURM takes them: `0-3,6`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in ranges)
