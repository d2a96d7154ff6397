"""The command line: ``grail-lightning fit | validate | test | predict``. The only place that composes."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.callbacks import ProgressBar as LightningProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

import grail_lightning.data
import grail_lightning.engines  # noqa: F401  (imported so that short class names are known)
from grail_lightning._version import __version__
from grail_lightning.callbacks import (
    Evaluation,
    ExportPolicy,
    LastCheckpoint,
    PredictionWriter,
    Preflight,
    ProgressBar,
    RolloutTable,
    Throughput,
)
from grail_lightning.commands import SUBCOMMANDS, check_subcommand, refuse
from grail_lightning.config_files import expand_configs
from grail_lightning.errors import explain, one_line, option_error
from grail_lightning.module import GrailModule
from grail_lightning.policy.options import check_dtype, check_precision
from grail_lightning.policy.sharding import check_strategy
from grail_lightning.quiet import leave_out_messages
from grail_lightning.run_folder import RunFolder
from grail_lightning.tasks.boxed import BoxedTask

ALWAYS_ON = {
    "evaluation": Evaluation,
    "rollout_table": RolloutTable,
    "throughput": Throughput,
    "preflight": Preflight,
    "export": ExportPolicy,
    "predictions": PredictionWriter,
    "checkpoint": ModelCheckpoint,
    "last_checkpoint": LastCheckpoint,
}
LEFT_OUT: dict[str, tuple[tuple[Any, ...], str]] = {
    "gradient_clip_val": (
        (None, 0),
        "The module clips by itself: set `--model.objective.max_grad_norm` instead.",
    ),
    "gradient_clip_algorithm": (
        (None, "norm"),
        "The module clips the norm, of all gradients: set `--model.objective.max_grad_norm`.",
    ),
    "accumulate_grad_batches": (
        (None, 1),
        "The module accumulates by itself: set `--model.objective.token_budget` instead.",
    ),
    "enable_checkpointing": (
        (None, True),
        "For less on disk set `--checkpoint.save_top_k=0` (no best checkpoint) and "
        "`--last_checkpoint.on_validation=false` (the last one at the end alone).",
    ),
    "barebones": (
        (None, False),
        "It forbids the logger and the checkpoints of every run. Set `--trainer.enable_progress_bar=false` and "
        "`--trainer.enable_model_summary=false` for less.",
    ),
}


class SaveRunConfig(SaveConfigCallback):
    """Saves the resolved config with the run; each subcommand has a file of its own, so none loses another's.

    A resumed run keeps the one that it was begun with until its checkpoint is there.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called by Lightning for every stage."""
        self.config_filename = "config.yaml" if stage == "fit" else f"config_{TrainerFn(stage).value}.yaml"
        if stage != "fit" or self.config.get("ckpt_path") is None:
            super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Of a resumed run."""
        if not self.already_saved:
            options = yaml.safe_load(self.parser.dump(self.config))
            tell_changes(RunFolder(trainer).path / "config.yaml", options)
            super().setup(trainer, pl_module, "fit")


class GrailCLI(LightningCLI):
    """LightningCLI with the callbacks that every run has, and what the command line says winning over a checkpoint."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Callbacks that are always on stand beside `trainer`, so that their options are too."""
        for name, callback in ALWAYS_ON.items():
            parser.add_lightning_class_args(callback, name)
        parser.set_defaults(
            {
                "checkpoint.monitor": "val/accuracy",
                "checkpoint.mode": "max",
                "checkpoint.filename": "best",
                "checkpoint.enable_version_counter": False,
                "trainer.num_sanity_val_steps": 0,
                "trainer.enable_model_summary": False,  # One row: the policy.
                "trainer.log_every_n_steps": 1,
            }
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """A wrong option is told with the names of those that there are, and with its file.

        Raises:
            ValueError: If there is one.
        """
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:
            known = {name for sub in self._subcommand_parsers.values() for name, _ in sub.get_defaults().items()}
            given = args if isinstance(args, list) else sys.argv[1:]
            raise ValueError(option_error(error, sorted(known), given)) from error

    def _parse_ckpt_path(self) -> None:
        # Lightning 2.6 lets hyper-parameters in a checkpoint override what the command line says. Here they never do.
        return

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The Trainer, with the progress bar unless it is switched off."""
        config = self.config_init[self.subcommand].trainer
        callbacks = _as_list(config.callbacks)
        wanted = config.enable_progress_bar is not False
        if wanted and not any(isinstance(callback, LightningProgressBar) for callback in callbacks):
            kwargs["callbacks"] = [*callbacks, ProgressBar()]
        trainer = super().instantiate_trainer(**kwargs)
        check_strategy(trainer.strategy)
        spread(trainer)
        return trainer

    def before_instantiate_classes(self) -> None:
        """Refuse what a run cannot honour, before anything is built."""
        trainer = self.config[self.subcommand].trainer
        for name, (honoured, instead) in LEFT_OUT.items():
            if (given := trainer.get(name)) not in honoured:
                raise ValueError(f"`trainer.{name}` must be left out, but got {given}. {instead}")
        check_precision(trainer.get("precision"))
        trainer.strategy = strategy_options(trainer.get("strategy", "auto"))

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        kwargs["ckpt_path"] = RunFolder(self.trainer).checkpoint(kwargs.get("ckpt_path"))
        if subcommand == "test":
            kwargs["verbose"] = False  # `Evaluation` prints a table with intervals.
        return kwargs

    def fit(self, **kwargs: Any) -> None:
        """Train: a new run in an empty folder, or a resumed one with what its options have become."""
        check_dtype(self.model.policy_name, self.model.loading)
        if isinstance(task := getattr(self.datamodule, "task", None), BoxedTask):
            task.check_length(self.model.sampling.max_response_length)
        folder = RunFolder(self.trainer)
        resumed = kwargs["ckpt_path"] is not None
        unkept = resumed or getattr(self.trainer, "fast_dev_run", False)
        with nullcontext() if unkept else folder.fresh():
            self.trainer.fit(**kwargs)


def strategy_options(given: Any) -> Any:
    """What was given for `trainer.strategy`, with FSDP2 under its class path: to Lightning, its name alone is none.

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


def spread(trainer: Any) -> None:
    """Shard over all devices where nothing is said: Lightning's "auto" would have each node's share the layers."""
    strategy = trainer.strategy
    if isinstance(strategy, ModelParallelStrategy):
        if strategy._data_parallel_size == "auto":
            strategy._data_parallel_size = trainer.num_devices * trainer.num_nodes
        if strategy._tensor_parallel_size == "auto":
            strategy._tensor_parallel_size = 1


@rank_zero_only
def tell_changes(saved: Path, options: dict[str, Any]) -> None:
    """Say which options differ from those that a run was begun with, and keep the file that has those."""
    if not saved.is_file():
        return
    before, after = (dict(_flat(tree)) for tree in (yaml.safe_load(saved.read_text()), options))
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    changed = [f"{name}: {before.get(name)} -> {after.get(name)}" for name in names if not name.startswith("ckpt_path")]
    if changed:
        kept = next(f for n in itertools.count(1) if not (f := saved.with_name(f"config.{n}.yaml")).exists())
        shutil.copy(saved, kept)
        rank_zero_info(f"Resuming with other options than {kept}: {'; '.join(changed)}")


def _flat(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Nested options as dotted names and values."""
    if not isinstance(tree, dict):
        yield name, tree
        return
    for key, value in tree.items():
        yield from _flat(value, f"{name}.{key}" if name else str(key))


def main(args: ArgsType = None) -> None:
    """Entry point. What the user got wrong is one line and exit code 2; ``GRAIL_DEBUG=1`` shows the traceback."""
    # Lightning 2.6 calls what jsonargparse 4.53 deprecates (`add_instantiator`); nothing that a user could mend.
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    leave_out_messages()
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # So that `--model.credit=mypackage.Mine` is found, as `python -m` would.
    quiet = {"exit_on_error": False}
    given = sys.argv[1:] if args is None else args
    try:
        if isinstance(given, list):
            given = expand_configs(given)
            check_subcommand(given)
        if args is None:
            sys.argv[1:] = given
        GrailCLI(
            GrailModule,
            LightningDataModule,
            subclass_mode_data=True,
            args=None if args is None else given,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            save_config_callback=SaveRunConfig,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={
                "version": __version__,
                "allow_abbrev": False,
                **quiet,
                **dict.fromkeys(SUBCOMMANDS, quiet),
            },
        )
    except (ArgumentError, ValueError, TypeError, OSError, RuntimeError, MisconfigurationException) as error:
        if not explain(error):
            raise
        if os.environ.get("GRAIL_DEBUG"):
            traceback.print_exc()
        refuse(one_line(error))


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


if __name__ == "__main__":
    main()
