"""The strategy: its names on the command line, and the sizes of its mesh."""

from __future__ import annotations

from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info

from grail_lightning.distributed.sharding import check_strategy


def strategy_options(given: object) -> object:
    """The value of `trainer.strategy`, where FSDP2 is given by its class path, because Lightning has no name for it.

    Raises:
        ValueError: For FSDP1.
    """
    name = given if isinstance(given, str) else getattr(given, "class_path", "")
    check_strategy(name)
    if name.lower() == "fsdp":
        rank_zero_info("`--trainer.strategy=fsdp` runs FSDP2 here (ModelParallelStrategy).")
    elif not isinstance(given, str) or name.rpartition(".")[2] != ModelParallelStrategy.__name__:
        return given
    path = f"{ModelParallelStrategy.__module__}.{ModelParallelStrategy.__name__}"
    return Namespace(class_path=path, init_args=Namespace())  # type: ignore[no-untyped-call]


def default_mesh_sizes(trainer: Trainer) -> None:
    """Replace the mesh sizes "auto": shard over all devices, without Lightning's tensor parallelism within a node.

    Raises:
        ValueError: If the sizes that are given do not fit the devices.
    """
    strategy, devices = trainer.strategy, trainer.num_devices * trainer.num_nodes
    if isinstance(strategy, ModelParallelStrategy):
        if strategy._data_parallel_size == "auto":
            strategy._data_parallel_size = devices
        if strategy._tensor_parallel_size == "auto":
            strategy._tensor_parallel_size = 1
        sizes = strategy._data_parallel_size, strategy._tensor_parallel_size
        if sizes != (devices, 1):
            raise ValueError(
                f"`data_parallel_size` must be the {devices} devices and `tensor_parallel_size` 1, since layers are "
                f"never split, but got {sizes[0]} and {sizes[1]}. Leave both out of `trainer.strategy`."
            )


def check_launcher(trainer: Trainer) -> None:
    """Check that torchrun or SLURM has started as many processes as there are devices; the run would wait for others.

    Raises:
        ValueError: If it has not. Lightning asks for this only if it starts processes by itself.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if environment is not None and environment.creates_processes_externally:
        environment.validate_settings(num_devices=trainer.num_devices, num_nodes=trainer.num_nodes)
