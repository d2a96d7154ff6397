"""The command line: ``grail-lightning fit | validate | test | predict``. This module composes all parts of a run."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

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
from grail_lightning.cli.config_files import expand_configs, expand_methods, replace_lists
from grail_lightning.cli.help import (
    GROUPS,
    SUBCOMMANDS,
    asked,
    check_subcommand,
    first_screen,
    print_options,
    refuse,
    show,
)
from grail_lightning.cli.mistakes import explain, one_line, option_error
from grail_lightning.cli.run_files import SaveRunConfig, beside_training, files_after_checks
from grail_lightning.cli.trainer_options import (
    as_list,
    check_groups,
    check_launcher,
    check_left_out,
    default_mesh_sizes,
    strategy_options,
)
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
CLI = TypeVar("CLI", bound="GrailCLI")
# Where the text of a library does not fit: an option has another meaning here, or its text is no sentence.
TEXTS = {
    "seed_everything": "The seed of all random numbers. true takes a random one.",
    "ckpt_path": "The checkpoint to begin with: `last` or `best` of the run's folder, or a file. With it, `fit` "
    "resumes a run.",
    "data": "The data module, a class with its options, as in `--data=MathData --data.train=problems.jsonl`.",
    "checkpoint.dirpath": "The folder of the checkpoints; default `checkpoints` in the folder of the run.",
    "checkpoint.monitor": "The metric by which checkpoints are compared.",
}
INTERRUPTED = 130  # The exit code of a process that Ctrl-C has ended.


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
        parser.usage, parser.description = f"grail-lightning {subcommand} --config FILE [--OPTION=VALUE ...]", None
        for name, group in (parser.groups or {}).items():  # Titles are cut at the first line of a docstring.
            group.title = GROUPS.get(name, group.title or name).removesuffix(".")
        for action in parser._actions:
            action.help = TEXTS.get(action.dest, action.help)
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments, or print the options that `--help GROUP` asks for; a ValueError if one is wrong."""
        assert isinstance(args, list)
        arguments: list[str] = args
        print_options(self._subcommand_parsers, arguments)
        try:
            self.config = parser.parse_args([*replace_lists(arguments)])
        except ArgumentError as error:
            parsers = [sub for name, sub in self._subcommand_parsers.items() if name in arguments[:1]]
            known = {name for sub in parsers for name, _ in sub.get_defaults().items()}
            raise ValueError(option_error(error, sorted(known), arguments)) from error

    def _parse_ckpt_path(self) -> None:
        # In Lightning 2.6 hyper-parameters in a checkpoint override the command line. Here they never do.
        return

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the Trainer, with a progress bar unless it is switched off, and with one folder for all checkpoints."""
        config = self.config_init[self.subcommand].trainer
        if self.subcommand != "fit" and not isinstance(config.logger, (bool, type(None))):
            given = zip(as_list(config.logger), as_list(self.config[self.subcommand].trainer.logger), strict=True)
            kwargs["logger"] = [beside_training(logger, options, str(self.subcommand)) for logger, options in given]
        callbacks = as_list(config.callbacks)
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
        options = self.config[self.subcommand]
        check_groups(options, ALWAYS_ON)
        trainer = options.trainer
        check_left_out(trainer)
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


def main(args: Sequence[str] | None = None) -> None:
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
        refuse(one_line(error))
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # Lightning's code after Ctrl-C is 1.
            raise SystemExit(INTERRUPTED) from None
        raise


def run(cli: type[CLI], args: Sequence[str] | None = None) -> CLI:
    """Parse the arguments, those of the process by default, build what they describe, and run the subcommand."""
    # Lightning 2.6 calls `add_instantiator`, which jsonargparse 4.53 deprecates. A user cannot change that.
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    leave_out_messages()
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # Modules of the working folder can be imported, as with `python -m`.
    quiet = {"exit_on_error": False}
    arguments = [*(sys.argv[1:] if args is None else args)]
    if asked(arguments) == "":
        show(first_screen())
        raise SystemExit(0)
    arguments = expand_methods(expand_configs(arguments))
    check_subcommand(arguments)
    return cli(
        GrailModule,
        LightningDataModule,
        subclass_mode_data=True,
        args=arguments,
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


class _ParsedOnly(GrailCLI):
    """Parses the options of a fit and checks them as a run does, and builds nothing."""

    def _set_seed(self) -> None:
        return

    def instantiate_classes(self) -> None:
        return

    def _run_subcommand(self, subcommand: str) -> None:
        return


class FitOptions:
    """Parses command lines of ``fit`` one after the other. The parser, which takes a second to make, is made once."""

    def __init__(self) -> None:
        self._cli: _ParsedOnly | None = None

    def parse(self, arguments: Sequence[str]) -> Namespace:
        """The options that a command line of ``fit`` and its config files give; a ValueError if one is wrong."""
        if self._cli is None:
            self._cli = run(_ParsedOnly, ["fit", *arguments])
        else:
            self._cli.parse_arguments(self._cli.parser, expand_methods(expand_configs(["fit", *arguments])))
            self._cli.before_instantiate_classes()
        options: Namespace = self._cli.config.fit
        return options

    def build(self) -> None:
        """Build the objects of the options that were parsed last, all but the Trainer; no weights are loaded."""
        assert self._cli is not None
        self._cli.parser.instantiate_classes(self._cli.config)


if __name__ == "__main__":
    main()
