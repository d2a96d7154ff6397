"""What the command line answers without torch: the first screen, the version, and a wrong subcommand."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from grail_lightning._version import __version__

SUBCOMMANDS = ("fit", "validate", "test", "predict")
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
  --model.objective                     the algorithm: DrGRPO (the default), GRPO, DAPO, CISPO, …
  --model.credit                        Uniform (the default), GRAIL, OARGradient, …
  --model.sampling.max_response_length  most tokens of a response
  --model.execution.group_size          rollouts of each prompt
  --model.execution.token_budget        most tokens of a micro-batch; sets the memory
  --model.optimizer.lr                  the learning rate
  --trainer.max_steps                   optimiser steps
  --trainer.precision                   `bf16-mixed` for training on GPUs

More:
  fit --help                            all options with types and defaults, by group
  fit --model.credit.help GRAIL         the options of a class
  fit --config FILE --print_config      every option of a config with its value, as YAML
  --version                             the version
The package's configs (quickstart.yaml, saliency.yaml, published/*.yaml) are found from any folder."""


def answer(arguments: Sequence[str]) -> None:
    """Print what needs no torch, and end; return for the command line of a subcommand."""
    first = arguments[0] if arguments else ""
    if first in SUBCOMMANDS:
        return
    if first in ("-h", "--help", "--version"):
        print(f"grail-lightning {__version__}" if first == "--version" else SCREEN)
        raise SystemExit(0)
    listed = ", ".join(SUBCOMMANDS)
    refuse(f"`grail-lightning` must be followed by {listed} or --help, but got {first or 'nothing'!r}.")


def refuse(message: str) -> NoReturn:
    """Print a user's mistake in one line, and end with exit code 2."""
    print(f"grail-lightning: error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2) from None
