"""The command line: ``grail-lightning fit | validate | test | predict``. This module composes all parts of a run."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from jsonargparse import ArgumentError, Namespace
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import ModelParallelStrategy

from grail_lightning.app.callbacks.checkpoints import LastCheckpoint
from grail_lightning.app.callbacks.credit_plots import CreditPictures
from grail_lightning.app.callbacks.evaluation import Evaluation
from grail_lightning.app.callbacks.export import ExportPolicy, check_steps_left
from grail_lightning.app.callbacks.hooks import fast_dev_run
from grail_lightning.app.callbacks.predictions import PredictionWriter
from grail_lightning.app.callbacks.preflight import Preflight, check_folders
from grail_lightning.app.callbacks.progress import BatchProgressBar
from grail_lightning.app.callbacks.responses import ShowResponses
from grail_lightning.app.callbacks.throughput import Throughput
from grail_lightning.app.cli.classes import load_for_help
from grail_lightning.app.cli.config_files import as_arguments, merged, with_arguments
from grail_lightning.app.cli.help import answer
from grail_lightning.app.cli.mistakes import mistakes_in_one_line
from grail_lightning.app.cli.run_files import SaveRunConfig, keep_tables
from grail_lightning.app.cli.trainer_options import (
    as_list,
    check_checkpoints,
    check_devices,
    check_options,
    fsdp2_options,
    log_beside_training,
    strategy_options,
)
from grail_lightning.app.cli.wrong_options import KINDS, Kind, check_arguments, last_line, wrong_option
from grail_lightning.core.distributed.checkpoint_io import read_state
from grail_lightning.core.engines.checks import check_draws
from grail_lightning.core.module import GrailModule
from grail_lightning.core.policy.source import check_dtype, check_precision
from grail_lightning.core.runtime.run_folder import RunFolder
from grail_lightning.core.tasks.answered import AnswerTask

ALWAYS_ON = {
    "evaluation": Evaluation,
    "throughput": Throughput,
    "responses": ShowResponses,  # Behind `throughput`, whose seconds are those of the batch alone.
    "pictures": CreditPictures,
    "preflight": Preflight,
    "export": ExportPolicy,
    "predictions": PredictionWriter,
    "checkpoint": ModelCheckpoint,
    "last_checkpoint": LastCheckpoint,
}
CLI = TypeVar("CLI", bound="GrailCLI")
__all__ = ["ALWAYS_ON", "FitOptions", "GrailCLI", "main", "mistakes_in_one_line", "run"]


class _Parser(LightningArgumentParser):
    """A parser that takes whole names of options alone, as do those that it makes for the options of nested classes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False} | kwargs)

    def parse_args(self, args: Any = None, *more: Any, **options: Any) -> Any:
        """Parse arguments. In those of a nested class jsonargparse writes the value `null` as `None`."""
        if args is not None:
            load_for_help(args)
            args = [re.sub(r"(?<=^--)([\w.]+)=None$", r"\1=null", arg) for arg in args]
        return super().parse_args(args, *more, **options)


class GrailCLI(LightningCLI):
    """LightningCLI with the callbacks of every run, in which the command line takes precedence over a checkpoint."""

    def __init__(self, model: type[GrailModule], data: type[LightningDataModule], args: list[str], **more: Any) -> None:
        self._asked = args[0]
        super().__init__(model, data, args=args, **more)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # Static in Lightning.
        """The subcommand with which the arguments begin: no parser is made for the others, which takes 0.2 s each."""
        return {self._asked: super().subcommands()[self._asked]}

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
        self.known_options = list(parser.get_defaults().keys())
        self._callback_keys, self._parser_of_asked = parser.callback_keys, parser

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments; a ValueError if one is wrong."""
        assert isinstance(args, list)
        options, rest = merged(args)
        check_arguments(rest)
        self._given = with_arguments(options, rest)
        try:
            self.config = parser.parse_args(as_arguments(options, rest))
        except ArgumentError as error:
            raise ValueError(self._mistake() or last_line(error)) from error

    @contextmanager
    def mistakes_named(self) -> Iterator[None]:
        """A context in which objects are made, which may show mistakes that the parser does not see."""
        try:
            yield
        except (ValueError, TypeError) as error:
            if mistake := self._mistake("null", "made"):
                raise ValueError(mistake) from error
            raise

    def _mistake(self, *kinds: Kind) -> str | None:
        """The sentence about what is wrong in the options that the user has given; None if nothing is found."""
        return wrong_option(self._parser_of_asked, self._given, kinds or KINDS)

    def _parse_ckpt_path(self) -> None:
        # In Lightning 2.6 hyper-parameters in a checkpoint override the command line. Here they never do.
        return

    def before_instantiate_classes(self) -> None:
        """Reject options that the module cannot follow, before any object is built."""
        options = self.config[self.subcommand]
        check_options(options, list(ALWAYS_ON))
        if self.subcommand == "fit":
            check_checkpoints(options)
        check_precision(options.trainer.get("precision"))
        options.trainer.strategy = strategy_options(options.trainer.get("strategy", "auto"))

    def instantiate_classes(self) -> None:
        """Build all objects. The loggers of an evaluation are made for a part of the run's folder."""
        trainer = self.config[self.subcommand].trainer
        logger = trainer.logger
        if self.subcommand != "fit":
            trainer.logger = log_beside_training(logger, str(self.subcommand))
        with self.mistakes_named():
            super().instantiate_classes()
        trainer.logger = logger  # The config that is saved can be run again, for training, too.

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the Trainer, with one folder for all checkpoints."""
        options, config = (c[self.subcommand].trainer for c in (self.config, self.config_init))
        if isinstance(options.strategy, Namespace) and isinstance(config.strategy, ModelParallelStrategy):
            kwargs["strategy"] = type(config.strategy)(**fsdp2_options(options))
        saves = config.enable_checkpointing is not False  # Lightning refuses the flag beside callbacks that save.
        self._callback_keys[:] = [key for key, kind in ALWAYS_ON.items() if saves or not issubclass(kind, Checkpoint)]
        callbacks = as_list(config.callbacks)
        if config.enable_progress_bar is not False and not any(isinstance(c, ProgressBar) for c in callbacks):
            kwargs["callbacks"] = [*callbacks, BatchProgressBar()]  # Rich's would be drawn again below the last line.
        trainer = super().instantiate_trainer(**kwargs)
        check_devices(trainer)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = str(RunFolder(trainer).path / "checkpoints")  # Lightning would use the logger's.
        return trainer

    def _run(self, **options: Any) -> None:
        """Run the subcommand in its folder, with the arguments of the Trainer's method."""
        check_folders(self.trainer)
        folder = RunFolder(self.trainer)
        checkpoint = options["ckpt_path"] = folder.checkpoint(options.get("ckpt_path"))
        state = read_state(checkpoint, self.trainer.strategy, options.get("weights_only"))
        if self.subcommand == "fit":
            if checkpoint and "global_step" in state:
                check_steps_left(self.trainer, checkpoint, state)
                if "optimizer_states" not in state and not Path(checkpoint).is_dir():  # In a folder they are sharded.
                    raise ValueError(
                        f"`ckpt_path` must be a checkpoint to go on from, but {checkpoint} holds weights alone "
                        "(`checkpoint.save_weights_only`). Use --ckpt_path=last, or its export as `model.policy`."
                    )
            check_draws(self.model.sampling)
            check_dtype(self.model.policy_name, self.model.loading)
            if isinstance(task := getattr(self.datamodule, "task", None), AnswerTask):
                task.check_length(self.model.sampling.max_response_length)
        if self.subcommand == "test":
            options["verbose"] = False  # `Evaluation` prints its own table, with intervals.
        folder_lock = folder.taken(checkpoint) if self.subcommand == "fit" else folder.shared()
        with nullcontext() if fast_dev_run(self.trainer) else folder_lock, keep_tables(self.trainer):
            getattr(self.trainer, str(self.subcommand))(**options)

    fit = validate = test = predict = _run  # Lightning calls the method of the subcommand's name.


def main(args: Sequence[str] | None = None) -> None:
    """Entry point. A user's mistake is reported in one line with exit code 2; ``GRAIL_DEBUG=1`` shows the traceback."""
    with mistakes_in_one_line():
        run(GrailCLI, args)


def run(cli: type[CLI], args: Sequence[str] | None = None) -> CLI:
    """Parse the arguments, those of the process by default, build what they describe, and run the subcommand."""
    # Lightning 2.6 calls `add_instantiator`, which jsonargparse 4.53 deprecates. A user cannot change that.
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    _leave_out_messages()
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # Modules of the working folder can be imported, as with `python -m`.
    arguments = [*(sys.argv[1:] if args is None else args)]
    answer(arguments)
    quiet = {"exit_on_error": False}
    usage = f"grail-lightning {arguments[0]} --config FILE [--OPTION=VALUE ...]"
    return cli(
        GrailModule,
        LightningDataModule,
        subclass_mode_data=True,
        args=arguments,
        parser_class=_Parser,
        seed_everything_default=0,
        auto_configure_optimizers=False,
        save_config_callback=SaveRunConfig,
        save_config_kwargs={"save_to_log_dir": False},
        parser_kwargs={**quiet, arguments[0]: {"usage": usage, **quiet}},
    )


def _leave_out_messages() -> None:
    """Suppress messages of Lightning 2.6 on which users cannot act, and that it has no option to disable."""
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addFilter(lambda record: not record.getMessage().startswith(("💡 Tip: ", "TPU available: False")))
    for message in (
        "Experiment logs directory .* exists and is not empty",  # `keep_tables` has moved the files.
        "You defined a `validation_step` but have no `val_dataloader`",  # `Preflight` says what is lacking.
        r"`ModelCheckpoint\(monitor='val/.*could not find the monitored key",  # The same; other names are an error.
    ):
        warnings.filterwarnings("ignore", message=message)


class _ParsedOnly(GrailCLI):
    """Parses the options of a fit and checks them as a run does, and builds nothing."""

    def _set_seed(self) -> None:
        return

    def instantiate_classes(self) -> None:
        return

    def _run_subcommand(self, subcommand: str) -> None:
        return


class FitOptions:
    """Parses command lines of ``fit`` one after the other. The parser is made once."""

    def __init__(self) -> None:
        self._cli: _ParsedOnly | None = None

    def parse(self, arguments: Sequence[str]) -> Namespace:
        """The options that a command line of ``fit`` and its config files give; a ValueError if one is wrong."""
        if self._cli is None:
            self._cli = run(_ParsedOnly, ["fit", *arguments])
        else:
            self._cli.parse_arguments(self._cli.parser, ["fit", *arguments])
            self._cli.before_instantiate_classes()
        options: Namespace = self._cli.config.fit
        return options

    def build(self) -> None:
        """Build the objects of the options that were parsed last, all but the Trainer; no weights are loaded."""
        assert self._cli is not None
        with self._cli.mistakes_named():
            self._cli.parser.instantiate_classes(self._cli.config)
