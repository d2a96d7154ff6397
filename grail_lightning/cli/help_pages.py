"""The first screens of ``--help``. This module does not import torch: they are printed at once."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from grail_lightning.cli.commands import SUBCOMMANDS

CONFIGS = Path(__file__).parents[1] / "configs"
WIDTH = 100
ALL = "all"
PURPOSE = {
    "fit": "Trains a policy in a new folder, or resumes a run.",
    "validate": "Evaluates a policy on the validation problems.",
    "test": "Evaluates a policy on the test problems.",
    "predict": "Writes responses with the credit of each of their tokens to a page and a Parquet file.",
}
EXAMPLES = {
    "fit": (
        "--config configs/quickstart.yaml",
        "--config configs/quickstart.yaml --ckpt_path last --trainer.max_steps=240",
    ),
    "validate": (
        "--config configs/quickstart.yaml --ckpt_path best",
        "--config configs/quickstart.yaml --model.policy=runs/quickstart/export",
    ),
    "test": (
        "--config configs/quickstart.yaml --ckpt_path best",
        "--config configs/eval_math.yaml --model.policy=Qwen/Qwen3-4B",
    ),
    "predict": (
        "--config configs/saliency.yaml",
        "--config configs/saliency.yaml --model.policy=runs/quickstart/export",
    ),
}
# What is listed by `--help NAME`: groups of options, and options that take a class.
GROUPS = {
    "trainer": "Lightning's Trainer: length, devices, strategy, precision, logger, callbacks.",
    "model": "All of the model: the policy, the engine, and what follows.",
    "model.sampling": "How responses are sampled: length, temperature, top-p, top-k, stop strings.",
    "model.loading": "How the policy is loaded: dtype, attention, checkpointed blocks, LoRA.",
    "model.objective": "The loss: aggregation, clips, KL, entropy.",
    "model.execution": "How a step is run: group size, passes, mini-batches, token budget.",
    "model.credit": "The credit method, a class; `model.control` is a control experiment around it.",
    "model.optimizer": "The optimiser, a class; `model.scheduler` is its learning-rate schedule.",
    "data": "The problems, a class: ArithmeticData, MathData, WordProblemData.",
    "evaluation": "How held-out problems are sampled: samples a problem, pass@k, at which times.",
    "rollout_table": "The rollouts shown in TensorBoard's text panel.",
    "pictures": "The pictures of token credit: how often, and at which cost.",
    "preflight": "The warnings about problems with which training cannot learn.",
    "export": "The policy in Hugging Face format at the end of training.",
    "predictions": "The page and the Parquet file of `predict`, and methods to compare.",
    "checkpoint": "The best checkpoint (Lightning's ModelCheckpoint): metric, number, folder.",
    "last_checkpoint": "The newest checkpoint: when it is saved.",
}
_EVALUATED = ("trainer", "model", "model.sampling", "model.loading", "data", "evaluation")
RELEVANT: dict[str, tuple[str, ...]] = {
    "fit": tuple(name for name in GROUPS if name != "predictions"),
    "validate": _EVALUATED,
    "test": _EVALUATED,
    "predict": (*_EVALUATED[:3], "model.loading", "model.credit", "data", "evaluation", "predictions"),
}
# Default and meaning of the options worth knowing.
OPTIONS = {
    "model.policy": ("required", "a model on the hub, a folder, or `arithmetic`"),
    "data": ("required", "the problems, as in `--data=MathData`"),
    "ckpt_path": ("none", "`best` or `last` of the run's folder, or a file"),
    "model.credit": ("Uniform", "Uniform (GRPO), GRAIL, OARGradient, …"),
    "model.sampling.max_response_length": ("required", "most tokens of a response"),
    "model.sampling.temperature": ("1.0", "temperature of sampling; 0 is greedy"),
    "model.execution.group_size": ("8", "rollouts of each prompt"),
    "model.execution.mini_batches": ("1", "optimiser steps of each pass over a batch"),
    "model.execution.token_budget": ("16384", "most tokens of a micro-batch; sets the memory"),
    "model.optimizer.lr": ("1.0e-06", "the learning rate"),
    "model.loading.dtype": ("float32", "dtype of the weights"),
    "evaluation.num_samples": ("1", "responses to each problem"),
    "evaluation.pass_at": ("[1]", "the k of each pass@k, as in `[1, 8]`"),
    "evaluation.sampling": ("none", "its sampling options; none takes model.sampling"),
    "predictions.file": ("none", "none is predictions.parquet in the run's folder"),
    "trainer.max_steps": ("-1", "optimiser steps; -1 leaves the end to max_epochs"),
    "trainer.precision": ("32-true", "`bf16-mixed` for training on GPUs"),
    "trainer.limit_val_batches": ("all", "a share of the batches, or their number"),
    "trainer.limit_test_batches": ("all", "a share of the batches, or their number"),
    "trainer.limit_predict_batches": ("all", "a share of the batches, or their number"),
}
_COMMON = ("model.policy", "data", "model.sampling.max_response_length", "trainer.precision")
_STEP = ("model.execution.group_size", "model.execution.mini_batches", "model.execution.token_budget")
_HELD_OUT = ("ckpt_path", "model.loading.dtype", "evaluation.num_samples", "evaluation.pass_at", "evaluation.sampling")
WORTH_KNOWING = {
    "fit": (*_COMMON, "model.credit", *_STEP, "model.optimizer.lr", "trainer.max_steps"),
    "validate": (*_COMMON, *_HELD_OUT, "trainer.limit_val_batches"),
    "test": (*_COMMON, *_HELD_OUT, "trainer.limit_test_batches"),
    "predict": (
        *(*_COMMON, "ckpt_path", "model.credit", "evaluation.num_samples", "evaluation.sampling"),
        *("predictions.file", "trainer.limit_predict_batches"),
    ),
}


def asked(arguments: Sequence[str]) -> tuple[str, str] | None:
    """The subcommand and the name of what `--help` asks for, each "" without one; None without `--help`."""
    subcommand = arguments[0] if arguments and arguments[0] in SUBCOMMANDS else ""
    for place, argument in enumerate(arguments):
        flag, _, name = argument.partition("=")
        if flag in ("-h", "--help"):
            following = arguments[place + 1] if place + 1 < len(arguments) else "-"
            return subcommand, name or ("" if following.startswith("-") else following)
    return None


def first_screen(arguments: Sequence[str]) -> str | None:
    """The page for a command line that asks for no group of options; None if it asks for one, or not for help."""
    if (wanted := asked(arguments)) is None:
        return None
    subcommand, name = wanted
    if not subcommand:
        return _command(name) if name in SUBCOMMANDS else _program()
    return None if name else _command(subcommand)


def show(page: str) -> None:
    """Print a page. A reader that closes the pipe early, as `head` does, is no error."""
    try:
        print(page, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # For what Python flushes when it ends.


def _program() -> str:
    """The page of `grail-lightning --help`."""
    about = (
        "Trains language models by reinforcement learning with verifiable rewards, where each token gets its own share "
        "of the credit. It is a LightningCLI: every option can be set in a YAML file or on the command line, which "
        "takes precedence."
    )
    files = [f"configs/{file.name}" for file in sorted(CONFIGS.glob("*.yaml"))]
    named = textwrap.wrap(f"{', '.join(files)} and configs/published/*.yaml", WIDTH - 2)
    return "\n".join(
        [
            "usage: grail-lightning SUBCOMMAND --config FILE [--OPTION=VALUE ...]",
            "",
            *textwrap.wrap(about, WIDTH),
            "",
            "Subcommands, each with an example:",
            *(
                line
                for name, purpose in PURPOSE.items()
                for line in (f"  {name:<10}{purpose}", f"            grail-lightning {name} {EXAMPLES[name][0]}")
            ),
            "",
            "Configs that come with the package are found from any folder:",
            *(f"  {line}" for line in named),
            f"  They lie in {CONFIGS}.",
            "",
            "Options:",
            *_rows(
                {
                    "fit --help": "The options worth knowing, and the groups of all options.",
                    "fit --help model.execution": "The options of a group, with types and defaults.",
                    "fit --help all": "All options.",
                    "fit --model.credit.help GRAIL": "The options of a class.",
                    "fit --config FILE --print_config": "Every option of a config with its value, as YAML.",
                    "--version": "The version.",
                }
            ),
        ]
    )


def _command(subcommand: str) -> str:
    """The first screen of a subcommand."""
    names = WORTH_KNOWING[subcommand]
    width = max(len(name) for name in names)
    return "\n".join(
        [
            usage(subcommand),
            "",
            PURPOSE[subcommand],
            "",
            *(f"  grail-lightning {subcommand} {example}" for example in EXAMPLES[subcommand]),
            "",
            "Options worth knowing, with their defaults:",
            *(f"  --{name:<{width}}  {OPTIONS[name][0]:<8}  {OPTIONS[name][1]}" for name in names),
            "",
            f"Groups of options. `{subcommand} --help GROUP` lists one in full, with types and defaults:",
            *_rows({name: GROUPS[name] for name in RELEVANT[subcommand]}),
            "",
            "More:",
            *_rows(
                {
                    f"{subcommand} --help {ALL}": "All options.",
                    f"{subcommand} --model.credit.help GRAIL": "The options of a class.",
                    f"{subcommand} --config FILE --print_config": "Every option of a config with its value, as YAML.",
                }
            ),
        ]
    )


def usage(subcommand: str) -> str:
    """The first line of each page of a subcommand."""
    return f"usage: grail-lightning {subcommand} --config FILE [--OPTION=VALUE ...]"


def _rows(table: dict[str, str]) -> list[str]:
    width = max(len(name) for name in table)
    return [f"  {name:<{width}}  {meaning}" for name, meaning in table.items()]
