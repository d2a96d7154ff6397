"""What the benchmark judges: a credit method with its control and its estimator of the advantage, made from options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jsonargparse import ArgumentError, ArgumentParser
from torch import Tensor

from grail_lightning.app.benchmark.reads import recording
from grail_lightning.app.cli.config_files import GivenText, as_arguments, merged, with_arguments
from grail_lightning.app.cli.wrong_options import check_arguments, last_line, wrong_option
from grail_lightning.core.advantages import AdvantageEstimator, GroupMean
from grail_lightning.core.credit.base import CreditContext, CreditControl, TokenCredit
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.rollout.batch import RolloutBatch
from grail_lightning.core.runtime.guard import said_in_a_line
from grail_lightning.core.step.assign import check_credit

Scorer = Callable[[Policy, RolloutBatch, CreditContext], Tensor]
"""A function that gives a bare score ``[B, T]`` of each token, which no training could use."""
_PARTS = ("credit", "control", "advantage")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A credit method as it is judged.

    Attributes:
        name: Its name in tables.
        method: The method, or a `Scorer`.
        control: The control that wraps the method.
        advantage: The estimator of the advantage.
        by: What ranks tokens in detection: the method's scores, or its weights. None: the scores if the weights in
            front of the answer never fall where the scores rise, and mostly rise with them, else the weights.
        given: What was given, in the form of a configuration: by `credit`, `control` and `advantage` the class path and
            the options of each.
        reads: What its constructors have read; see `reads.KINDS`.
    """

    name: str
    method: TokenCredit | Scorer
    control: CreditControl | None = None
    advantage: AdvantageEstimator = field(default_factory=GroupMean)
    by: Literal["score", "weight"] | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    reads: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """The options of the method that were given."""
        return dict(self.given.get("credit", {}).get("init_args", {}))


def subject_of(credit: str, arguments: Sequence[str] = (), name: str | None = None) -> Subject:
    """The subject of a class and options, as `fit` takes them without the first part ``model.``.

    Args:
        credit: The short name of a method of the package, or the import path of a class.
        arguments: Further options, such as ``--credit.top=3.0``, ``--control=Shuffled`` or ``--advantage.share=0.5``.
        name: The name in tables; default that of the class with what was given.

    Raises:
        ValueError: One line about the first mistake.
    """
    _, rest = merged([f"--model.credit={credit}", *map(_of_model, with_estimator(arguments))])
    with recording() as reads:
        try:
            check_arguments(rest)
            parser, given = _parser(), with_arguments({}, rest)
            try:
                made = parser.instantiate(parser.parse_args(as_arguments({}, rest)))
            except (ArgumentError, TypeError) as error:
                raise ValueError(wrong_option(parser, given) or last_line(error)) from error
            except ValueError as error:
                raise ValueError(wrong_option(parser, given) or str(error)) from error
            parts = made["model"]
            check_credit(parts["advantage"], parts["credit"])
        except ValueError as error:
            raise ValueError(_without_model(str(error))) from error
        except Exception as error:  # The constructor of the user's class.
            raise ValueError(f"`{credit}` cannot be made: its constructor raised {said_in_a_line(error)}.") from error
    told = {part: _told(given["model"][part]) for part in _PARTS if part in given["model"]}
    return Subject(
        name=name or _name(parts["credit"], told),
        method=parts["credit"],
        control=parts["control"],
        advantage=parts["advantage"] or GroupMean(),
        given=told,
        reads=tuple(reads),
    )


def with_estimator(arguments: Sequence[str]) -> list[str]:
    """The options with the group's mean in front, if they change an estimator of the advantage but name none."""
    changed = any(argument.startswith("--advantage.") for argument in arguments)
    named = any(argument.split("=")[0] == "--advantage" for argument in arguments)
    return ["--advantage=GroupMean", *arguments] if changed and not named else [*arguments]


def _parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--model.credit", type=TokenCredit)
    parser.add_argument("--model.control", type=CreditControl | None, default=None)
    parser.add_argument("--model.advantage", type=AdvantageEstimator | None, default=None)
    return parser


def _of_model(argument: str) -> str:
    """The argument as `fit` takes it; the value of an option that follows it stays as it is."""
    if not argument.startswith("--") or argument.startswith("--model."):
        return argument
    part = re.split(r"[.=+]", argument[2:], maxsplit=1)[0]
    if part not in _PARTS:
        raise ValueError(
            f"Options of a method must begin with {', '.join(f'--{p}' for p in _PARTS)}, but got {argument!r}."
        )
    return f"--model.{argument[2:]}"


def _without_model(text: str) -> str:
    """A message about options with the names that they have here."""
    return re.sub(r"\bmodel\.(?=(credit|control|advantage)\b)", "", text)


def _told(given: Any) -> dict[str, Any]:
    """An object of a configuration as class path and options, with values as YAML reads them."""
    read = _read(given)
    return read if isinstance(read, dict) else {"class_path": read}


def _read(value: Any) -> Any:
    if isinstance(value, GivenText):
        return value.read()
    if isinstance(value, Mapping):
        return {key: _read(part) for key, part in value.items()}
    return [*map(_read, value)] if isinstance(value, list) else value


def _name(method: TokenCredit, told: Mapping[str, Any]) -> str:
    """The name of a subject: class, options, control and estimator."""
    name = _in_words(type(method).__name__, told["credit"])
    if isinstance(inner := told["credit"].get("init_args", {}).get("inner"), str | Mapping):
        inner = _told(inner)
        rest = {key: value for key, value in told["credit"]["init_args"].items() if key != "inner"}
        inside = _in_words(str(inner.get("class_path", "")).rpartition(".")[2], inner)
        name = _in_words(f"{type(method).__name__}({inside})", {"init_args": rest})
    if control := told.get("control"):
        its = _in_words(str(control.get("class_path", "")).rpartition(".")[2], {})
        name = f"{its}({name})"
    if advantage := told.get("advantage"):
        name += f" with {_in_words(str(advantage.get('class_path', 'GroupMean')).rpartition('.')[2], advantage)}"
    return name


def _in_words(name: str, told: Mapping[str, Any]) -> str:
    options = [f"{key}={value}" for key, value in told.get("init_args", {}).items()]
    return ", ".join([name, *options])


def is_scorer(subject: Subject) -> bool:
    """Whether the subject is a bare score, which has no weights."""
    return not isinstance(subject.method, TokenCredit)


def explains(method: object) -> str:
    """The first sentence of a method's docstring, for reports; empty without one."""
    text = inspect.getdoc(type(method)) or ""
    return " ".join(text.partition("\n\n")[0].split())
