"""Options of the Trainer and of groups: what must be left out, strategies by their names, loggers of an evaluation."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Sequence
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info

from grail_lightning.core.distributed.sharding import check_strategy
from grail_lightning.core.runtime.import_path import import_function
from grail_lightning.core.runtime.pages import page

# Options of the Trainer that manual optimisation cannot follow: the values that ask for nothing, and what to set.
_LEFT_OUT: dict[str, tuple[tuple[Any, ...], str]] = {
    "gradient_clip_val": ((None, 0), "`--model.execution.max_grad_norm`"),
    "gradient_clip_algorithm": ((None, "norm"), "`--model.execution.max_grad_norm`, which clips the norm of all"),
    "accumulate_grad_batches": ((None, 1), "`--model.execution.token_budget`"),
}


def check_options(options: Namespace, groups: Sequence[str]) -> None:
    """Raise a ValueError for a group of options that a file leaves empty, and for what the module cannot follow."""
    ours = [f"model.{name}" for name in ("sampling", "loading", "execution")]
    for name in (*groups, "trainer", "model", *ours):
        if name in options and not isinstance(value := options.get(name), Namespace):
            raise ValueError(f"`{name}` must be a group of options, but got {value!r}. Fill it in, or leave it out.")
    for name, (without_effect, instead) in _LEFT_OUT.items():
        if (value := options.trainer.get(name)) not in without_effect:
            raise ValueError(f"`trainer.{name}` must be left out, but got {value}. Set {instead} instead.")
    for name in ("val_check_interval", "check_val_every_n_epoch"):  # Lightning divides by them.
        if options.trainer.get(name) == 0:
            raise ValueError(f"`trainer.{name}` must be positive, but got 0. `trainer.limit_val_batches: 0` is off.")


def check_checkpoints(options: Namespace) -> None:
    """Refuse options of `checkpoint` with which one file would be written over by another."""
    saved, last = options.checkpoint, options.last_checkpoint
    one_file = saved.filename is not None and "{" not in saved.filename and not saved.enable_version_counter
    if saved.save_top_k not in (0, 1) and one_file:
        raise ValueError(
            f"`checkpoint.save_top_k` {saved.save_top_k} needs a `checkpoint.filename` of its own for each checkpoint, "
            f"such as 'best_{{step}}', but got {saved.filename!r}, which would hold the newest one."
        )
    if (saved.save_last or saved.filename == "last") and saved.dirpath is None and last.folder is None:
        raise ValueError("`checkpoint` must not write last.ckpt, which is `last_checkpoint`'s. Leave `save_last` out.")


def as_list(value: object) -> list[Any]:
    """What an option holds that takes one object, several or none."""
    if value is None or isinstance(value, bool):
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def strategy_options(strategy: object) -> object:
    """The value of `trainer.strategy`, where FSDP2 is given by its class path, because Lightning has no name for it."""
    name = strategy if isinstance(strategy, str) else getattr(strategy, "class_path", "")
    check_strategy(name)
    if name.lower() == "fsdp":
        rank_zero_info("`--trainer.strategy=fsdp` runs FSDP2 here (ModelParallelStrategy).")
    elif not isinstance(strategy, str) or name.rpartition(".")[2] != ModelParallelStrategy.__name__:
        return strategy
    path = f"{ModelParallelStrategy.__module__}.{ModelParallelStrategy.__name__}"
    return Namespace(class_path=path, init_args=Namespace())  # type: ignore[no-untyped-call]


def fsdp2_options(trainer: Namespace) -> dict[str, Any]:
    """The arguments of FSDP2 with sizes of its mesh: with "auto" Lightning would split layers within a node."""
    on_cuda = trainer.accelerator in ("auto", "gpu", "cuda") and CUDAAccelerator.is_available()
    kind: Any = CUDAAccelerator if on_cuda else CPUAccelerator
    each = kind.auto_device_count() if trainer.devices == "auto" else kind.parse_devices(trainer.devices)
    devices = (each if isinstance(each, int) else len(each)) * trainer.num_nodes
    options = dict(trainer.strategy.get("init_args") or {})
    sizes = {"data_parallel_size": devices, "tensor_parallel_size": 1}
    got = [size if options.get(name, "auto") == "auto" else options[name] for name, size in sizes.items()]
    if got != [devices, 1]:
        raise ValueError(
            f"`data_parallel_size` must be the {devices} devices and `tensor_parallel_size` 1, since layers are "
            f"never split, but got {got[0]} and {got[1]}. Leave both out of `trainer.strategy`."
        )
    return options | sizes


def check_devices(trainer: Trainer) -> None:
    """Check the strategy, and that torchrun or SLURM has started as many processes as there are devices."""
    check_strategy(trainer.strategy)
    # Lightning asks for their number only if it starts them by itself, and would wait for those that are missing.
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if environment is not None and environment.creates_processes_externally:
        environment.validate_settings(num_devices=trainer.num_devices, num_nodes=trainer.num_nodes)
    elif trainer.num_nodes > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise ValueError(
            f"`trainer.num_nodes` {trainer.num_nodes} needs a launcher that starts the processes of all machines, but "
            "this one was started without, and would wait for the others. Start it by torchrun or SLURM's srun "
            f"({page('reference/clusters.md')})."
        )


def environments_of_runs(jobs: int | None, devices: int) -> list[dict[str, str]]:
    """The variables of each run of a sweep at a time: its GPUs, or its threads on the CPU."""
    _check_jobs(jobs)
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    if gpus != [""]:
        if devices > len(gpus):
            raise ValueError(
                f"`trainer.devices` of a run must be at most the number of GPUs, {len(gpus)}, but got {devices}. Ask "
                "for fewer, or set CUDA_VISIBLE_DEVICES, which is empty for runs on the CPU."
            )
        parts = [gpus[start : start + devices] for start in range(0, len(gpus) - devices + 1, devices)]
        return [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts][:jobs]
    return environments_on_cores(jobs, devices)


def environments_on_cores(jobs: int | None, devices: int = 1) -> list[dict[str, str]]:
    """The variables of each run at a time, of so many processes on the CPU each: the threads of a process."""
    _check_jobs(jobs)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    number = jobs or max(1, cores // devices)
    threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(max(1, cores // number // devices))}
    return [threads] * number


def _check_jobs(jobs: int | None) -> None:
    if jobs is not None and jobs < 1:
        raise ValueError(f"`--jobs` must be at least 1, but got {jobs}.")


class StageCSVLogger(CSVLogger):
    """Lightning's `CSVLogger` with a `sub_dir`, which its `TensorBoardLogger` already has."""

    def __init__(self, sub_dir: str, **options: Any) -> None:
        super().__init__(**options)
        self.sub_dir = sub_dir

    @property
    def log_dir(self) -> str:
        """The sub-folder of the run's folder."""
        return os.path.join(super().log_dir, self.sub_dir)


def log_beside_training(loggers: object, stage: str) -> object:
    """The loggers with which an evaluation logs to a part of the run's folder, ``runs/quickstart/validate``.

    A class of the user's that takes no `sub_dir` stays as it is.
    """
    loggers = copy.deepcopy(loggers)
    for logger in as_list(loggers):
        logger_class: Any = import_function(logger.class_path, {}, "A logger", logger.class_path)
        if logger_class is CSVLogger:
            logger_class = StageCSVLogger
            logger.class_path = f"{logger_class.__module__}.{logger_class.__name__}"
        parameters = inspect.signature(logger_class).parameters.values()
        takes = any(option.name == "sub_dir" or option.kind is option.VAR_KEYWORD for option in parameters)
        board = issubclass(logger_class, TensorBoardLogger) and takes and not logger.init_args.get("sub_dir")
        if board or issubclass(logger_class, StageCSVLogger):
            logger.init_args.sub_dir = stage
    return loggers
