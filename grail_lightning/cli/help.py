"""The pages of ``--help``, and the output of a mistake. This module does not import torch: most are printed at once."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

SUBCOMMANDS = ("fit", "validate", "test", "predict")
DEBUG_HINT = "(GRAIL_DEBUG=1 shows the traceback)"
ALL = "all"
# What `--help NAME` lists: groups of options, and options that take a class.
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
SCREEN = """\
usage: grail-lightning SUBCOMMAND --config FILE [--OPTION=VALUE ...]

Trains language models by reinforcement learning with verifiable rewards, where each token gets its own
share of the credit. Every option can be set in a YAML file, or on the command line, which wins.

Subcommands:
  fit       Trains a policy in a new folder, or resumes a run (--ckpt_path=last).
            grail-lightning fit --config configs/quickstart.yaml
  validate  Evaluates a policy on the validation problems.
            grail-lightning validate --config configs/quickstart.yaml --ckpt_path=best
  test      Evaluates a policy on the test problems.
            grail-lightning test --config configs/eval_math.yaml --model.policy=Qwen/Qwen3-4B
  predict   Writes responses with the credit of each of their tokens to a page and a Parquet file.
            grail-lightning predict --config configs/saliency.yaml

Options worth knowing:
  --model.policy                        a model on the hub, a folder, or `arithmetic`
  --data                                the problems, as in --data=MathData --data.train=problems.jsonl
  --ckpt_path                           `best` or `last` of the run's folder, or a file
  --model.credit                        Uniform (GRPO, the default), GRAIL, OARGradient, …
  --model.sampling.max_response_length  most tokens of a response
  --model.execution.group_size          rollouts of each prompt
  --model.execution.token_budget        most tokens of a micro-batch; sets the memory
  --model.optimizer.lr                  the learning rate
  --trainer.max_steps                   optimiser steps
  --trainer.precision                   `bf16-mixed` for training on GPUs

More:
  fit --help GROUP                      options with types and defaults; the groups of options are
                                        {groups}
  fit --help all                        all options
  fit --model.credit.help GRAIL         the options of a class
  fit --config FILE --print_config      every option of a config with its value, as YAML
  --version                             the version
The package's configs (quickstart.yaml, saliency.yaml, published/*.yaml) are found from any folder."""


def check_subcommand(arguments: Sequence[str]) -> None:
    """Raise a ValueError unless the command line begins with a subcommand or an option."""
    first = arguments[0] if arguments else ""
    if first not in SUBCOMMANDS and not first.startswith("-"):
        raise ValueError(
            f"`grail-lightning` must be followed by {', '.join(SUBCOMMANDS)} or --help, but got {first or 'nothing'!r}."
        )


def refuse(message: str, code: int = 2) -> NoReturn:
    """Print the reason for which a run ends in one line, and end with an exit code; 2 is that of a user's mistake."""
    print(f"grail-lightning: error: {message}", file=sys.stderr)
    raise SystemExit(code) from None


def asked(arguments: Sequence[str]) -> str | None:
    """The name of what `--help` asks for, "" for the first screen; None without `--help`."""
    for place, argument in enumerate(arguments):
        flag, _, name = argument.partition("=")
        if flag in ("-h", "--help"):
            following = arguments[place + 1] if place + 1 < len(arguments) else "-"
            name = name or ("" if following.startswith("-") else following)
            return "" if name in SUBCOMMANDS or arguments[0] not in SUBCOMMANDS else name
    return None


def show(page: str) -> None:
    """Print a page. A reader that closes the pipe early, as `head` does, is no error."""
    try:
        print(page, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # For what Python flushes when it ends.


def first_screen() -> str:
    """The page of ``--help`` alone."""
    rows, indent = [""], " " * 40
    for name in GROUPS:
        if len(rows[-1]) + len(name) > 56:
            rows.append("")
        rows[-1] += f"{name}, "
    return SCREEN.format(groups=f"\n{indent}".join(row.rstrip() for row in rows).rstrip(","))


def print_options(parsers: Mapping[str, argparse.ArgumentParser], arguments: Sequence[str]) -> None:
    """Print the options of the group that a command line asks for, and end; do nothing if it asks for none."""
    if name := asked(arguments):
        show(options_page(parsers[arguments[0]], name.removeprefix("--")).rstrip("\n"))
        raise SystemExit(0)


def options_page(parser: argparse.ArgumentParser, name: str) -> str:
    """The options of a group, one option, or `all`. The parser is used up.

    Raises:
        ValueError: If there is no such group or option.
    """
    from grail_lightning.tasks.import_path import did_you_mean  # Loads torch.

    actions = parser._actions
    shown = [action for action in actions if name == ALL or f"{action.dest}.".startswith(f"{name}.")]
    if not shown:
        known = [ALL, *GROUPS, *(action.dest for action in actions)]
        hint = did_you_mean(name, [other for other in known if other.endswith(f".{name}")] or known)
        raise ValueError(
            f"`--help` must be followed by {ALL}, an option or a group of options, but got {name!r}."
            f"{hint or ' The groups are ' + ', '.join(GROUPS) + '.'} `--OPTION.help CLASS` lists those of a class."
        )
    for action in actions:
        if action not in shown:
            action.help = argparse.SUPPRESS  # argparse leaves out such an option, and a group without others.
    return parser.format_help()
