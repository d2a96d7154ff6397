"""The command line: ``grail-lightning fit | validate | test | predict``. This module composes all parts of a run."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from jsonargparse import ArgumentError, Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.callbacks import ProgressBar as LightningProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

import grail_lightning.data
import grail_lightning.engines  # noqa: F401  (imported so that short class names are known)
from grail_lightning._version import __version__
from grail_lightning.callbacks import (
    CreditPictures,
    Dashboard,
    Evaluation,
    ExportPolicy,
    LastCheckpoint,
    PredictionWriter,
    Preflight,
    ProgressBar,
    RolloutTable,
    Throughput,
)
from grail_lightning.callbacks.export import check_steps_left
from grail_lightning.callbacks.requirements import check_callbacks, check_folders
from grail_lightning.cli.commands import SUBCOMMANDS, check_subcommand, refuse
from grail_lightning.cli.config_files import expand_configs
from grail_lightning.cli.errors import explain, one_line, option_error
from grail_lightning.cli.help_pages import first_screen, show
from grail_lightning.cli.lists import whole_lists
from grail_lightning.cli.methods import as_given, expand_methods
from grail_lightning.cli.option_help import describe, print_options
from grail_lightning.cli.run_config import SaveRunConfig
from grail_lightning.cli.stage_loggers import beside_training, files_after_checks
from grail_lightning.cli.strategies import check_launcher, default_mesh_sizes, strategy_options
from grail_lightning.distributed.checkpoint_io import read_state
from grail_lightning.distributed.sharding import check_strategy
from grail_lightning.module import GrailModule
from grail_lightning.policy.options import check_dtype, check_precision
from grail_lightning.runtime.console import leave_out_messages
from grail_lightning.runtime.run_folder import RunFolder
from grail_lightning.tasks.answered import AnswerTask

ALWAYS_ON = {
    "dashboard": Dashboard,
    "evaluation": Evaluation,
    "rollout_table": RolloutTable,
    "throughput": Throughput,
    "pictures": CreditPictures,  # Behind `throughput`, whose seconds are those of the batch alone.
    "preflight": Preflight,
    "export": ExportPolicy,
    "predictions": PredictionWriter,
    "checkpoint": ModelCheckpoint,
    "last_checkpoint": LastCheckpoint,
}
INTERRUPTED = 130  # The exit code of a process that Ctrl-C has ended.
LEFT_OUT: dict[str, tuple[tuple[Any, ...], str]] = {
    "gradient_clip_val": (
        (None, 0),
        "The module clips by itself: set `--model.execution.max_grad_norm` instead.",
    ),
    "gradient_clip_algorithm": (
        (None, "norm"),
        "The module clips the norm, of all gradients: set `--model.execution.max_grad_norm`.",
    ),
    "accumulate_grad_batches": (
        (None, 1),
        "The module accumulates by itself: set `--model.execution.token_budget` instead.",
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


class GrailCLI(LightningCLI):
    """LightningCLI with the callbacks of every run, in which the command line takes precedence over a checkpoint."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the callbacks of every run as top-level groups of options, beside `trainer`."""
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

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        describe(parser, subcommand)
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments, or print the options that `--help GROUP` asks for.

        The message about a wrong option names the accepted ones and the config file.

        Raises:
            ValueError: If an option is wrong.
        """
        given = args if isinstance(args, list) else sys.argv[1:]
        print_options(self._subcommand_parsers, given)
        try:
            with whole_lists():
                super().parse_arguments(parser, args)
        except ArgumentError as error:
            parsers = [sub for name, sub in self._subcommand_parsers.items() if name in given[:1]]
            known = {name for sub in parsers for name, _ in sub.get_defaults().items()}
            raise ValueError(option_error(error, sorted(known), given)) from error

    def _parse_ckpt_path(self) -> None:
        # In Lightning 2.6 hyper-parameters in a checkpoint override the command line. Here they never do.
        return

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the Trainer, with a progress bar unless it is switched off, and with one folder for all checkpoints."""
        config = self.config_init[self.subcommand].trainer
        if self.subcommand != "fit" and not isinstance(config.logger, (bool, type(None))):
            given = zip(_as_list(config.logger), _as_list(self.config[self.subcommand].trainer.logger), strict=True)
            kwargs["logger"] = [beside_training(logger, options, str(self.subcommand)) for logger, options in given]
        callbacks = _as_list(config.callbacks)
        wanted = config.enable_progress_bar is not False
        if wanted and not any(isinstance(callback, LightningProgressBar) for callback in callbacks):
            kwargs["callbacks"] = [*callbacks, ProgressBar()]
        trainer = super().instantiate_trainer(**kwargs)
        check_strategy(trainer.strategy)
        check_launcher(trainer)
        default_mesh_sizes(trainer)
        check_callbacks(trainer)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = str(RunFolder(trainer).path / "checkpoints")  # Lightning would use the logger's.
        return trainer

    def before_instantiate_classes(self) -> None:
        """Reject options that the module cannot follow, before any object is built."""
        check_groups(options := self.config[self.subcommand])
        trainer = options.trainer
        for name, (honoured, instead) in LEFT_OUT.items():
            if (given := trainer.get(name)) not in honoured:
                raise ValueError(f"`trainer.{name}` must be left out, but got {given}. {instead}")
        check_precision(trainer.get("precision"))
        trainer.strategy = strategy_options(trainer.get("strategy", "auto"))

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        check_folders(self.trainer)
        self._checkpoint = kwargs["ckpt_path"] = RunFolder(self.trainer).checkpoint(kwargs.get("ckpt_path"))
        state = read_state(kwargs["ckpt_path"], self.trainer.strategy, kwargs.get("weights_only"))
        if subcommand == "fit" and "global_step" in state:
            check_steps_left(self.trainer, kwargs["ckpt_path"], state["global_step"])
        if subcommand == "test":
            kwargs["verbose"] = False  # `Evaluation` prints its own table, with intervals.
        return kwargs

    def _run_subcommand(self, subcommand: str) -> None:
        with files_after_checks(self.trainer, self._folder):
            super()._run_subcommand(subcommand)

    def _folder(self) -> AbstractContextManager[None]:
        """The folder of the subcommand: an empty one for a new run, that of the checkpoint's run, or a shared one."""
        folder = RunFolder(self.trainer)
        if self.subcommand != "fit":
            folder.shared()
            return nullcontext()
        return folder.resumed(self._checkpoint) if self._checkpoint else folder.fresh()

    def fit(self, **kwargs: Any) -> None:
        """Train a new run in an empty folder, or a resumed one with its current options."""
        check_dtype(self.model.policy_name, self.model.loading)
        if isinstance(task := getattr(self.datamodule, "task", None), AnswerTask):
            task.check_length(self.model.sampling.max_response_length)
        self.trainer.fit(**kwargs)


def check_groups(options: Namespace) -> None:
    """Check that no group of options is null or a value, and that no callback of every run is listed a second time.

    Raises:
        ValueError: If one is.
    """
    groups = ["trainer", "model", *(name for name, made in ALWAYS_ON.items() if inspect.signature(made).parameters)]
    groups += [f"model.{name}" for name in ("sampling", "loading", "objective", "execution")]
    for name in groups:
        if not isinstance(value := options.get(name), Namespace):
            given = "null" if value is None else repr(value)
            raise ValueError(
                f"`{name}` must be a group of options, but got {given}. Fill it in, or leave the line out."
            )
    listed = {str(getattr(c, "class_path", "")).rpartition(".")[2] for c in _as_list(options.trainer.get("callbacks"))}
    for name, callback in ALWAYS_ON.items():
        if callback.__name__ in listed and callback is not ModelCheckpoint:
            raise ValueError(
                f"`trainer.callbacks` must leave out {callback.__name__}, which every run has. Set its options with "
                f"`--{name}.…`."
            )


def main(args: ArgsType = None) -> None:
    """Entry point. A user's mistake is reported in one line with exit code 2; ``GRAIL_DEBUG=1`` shows the traceback."""
    with mistakes_in_one_line():
        run(GrailCLI, args)


@contextmanager
def mistakes_in_one_line() -> Iterator[None]:
    """A context that reports a user's mistake in one line with exit code 2, and ends with 130 after Ctrl-C."""
    try:
        yield
    except (ArgumentError, ValueError, TypeError, OSError, RuntimeError, MisconfigurationException) as error:
        if not explain(error):
            raise
        if os.environ.get("GRAIL_DEBUG"):
            traceback.print_exc()
        refuse(as_given(one_line(error), sys.argv[1:]))
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # Lightning's code after Ctrl-C is 1.
            raise SystemExit(INTERRUPTED) from None
        raise


def run(cli: type[GrailCLI], args: ArgsType) -> GrailCLI:
    """Parse the arguments, those of the process by default, build what they describe, and run the subcommand."""
    # Lightning 2.6 calls `add_instantiator`, which jsonargparse 4.53 deprecates. A user cannot change that.
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    leave_out_messages()
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # Modules of the working folder can be imported, as with `python -m`.
    quiet = {"exit_on_error": False}
    given = sys.argv[1:] if args is None else args
    if isinstance(given, list):
        if (page := first_screen(given)) is not None:
            show(page)
            raise SystemExit(0)
        given = expand_methods(expand_configs(given))
        check_subcommand(given)
    if args is None:
        sys.argv[1:] = given
    return cli(
        GrailModule,
        LightningDataModule,
        subclass_mode_data=True,
        args=None if args is None else given,
        seed_everything_default=0,
        auto_configure_optimizers=False,
        save_config_callback=SaveRunConfig,
        save_config_kwargs={"save_to_log_dir": False},
        parser_kwargs={
            "version": __version__,
            "allow_abbrev": False,
            **quiet,
            **dict.fromkeys(SUBCOMMANDS, quiet),
        },
    )


def _as_list(value: object) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


if __name__ == "__main__":
    main()
