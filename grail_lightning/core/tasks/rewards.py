r"""Rewards of responses: the built-in functions, and the user's functions by import path, each with a weight.

A reward is any callable ``(responses, references, **columns) -> floats or None``. It is called once per batch, with one
entry for each response. It may be ``async``: such rewards of a batch are awaited side by side. ``None`` means that the
reward does not apply; it adds nothing, and a response about which all rewards say None has no reward. The columns are
those of the dataset's rows, and

- ``correct`` (bool) and ``status`` (right, wrong, missing, …) of the verdict, ``answers`` (the graded answer, or None),
- ``ends_with_answer`` (bool), whether the response ends with an answer in the task's form,
- ``lengths``: generated tokens, the end token included.

These replace columns of the same name. A function gets only the columns that its signature names, unless it takes
``**columns``. The reward of response ``i`` is ``Σ_k weight_k · value_ki``. Accuracy depends on the verdict alone.

A function in TRL's form ``(prompts, completions, completion_ids, environments, **columns)`` is taken, too. It is known
by these names, of which it may leave out some, and gets all of them by name.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import math
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from grail_lightning.answers.find import find_boxes
from grail_lightning.answers.records import AnswerSpan
from grail_lightning.core.environments.side_by_side import background_loop
from grail_lightning.core.records.task import LARGEST_REWARD
from grail_lightning.core.runtime.guard import explained, said
from grail_lightning.core.runtime.import_path import GIVEN, import_function
from grail_lightning.core.runtime.pages import page
from grail_lightning.core.tasks.attempts import Attempts

Values = list[float | None]


class RewardValues(Values):
    """The values of a reward, with what is logged of its calls beside their mean, as shares of the responses."""

    shares: Mapping[str, float] = {}


_FAILED = object()  # In place of values, where each call has failed.
_GRADED = ("correct", "status", "answers", "ends_with_answer", "lengths")  # Columns beside those of the data.
_TRL = ("prompts", "completions", "completion_ids", "environments")
_FROM_TRAINER = ("trainer_state", "log_extra", "log_metric")  # What only TRL's trainer gives.
if TYPE_CHECKING:
    Function: TypeAlias = str | Callable[..., Any]
else:  # What YAML can say.
    Function: TypeAlias = str
_NOTHING = re.compile(r"(?:\s|[$.*]|\\[\])])*")


@dataclass(frozen=True, kw_only=True)
class RewardSpec:
    """The options of one reward.

    Attributes:
        function: The function: `correctness`, `boxed_format`, `answer_format`, `overlong`, `environment` (what the
            environment's `get_reward` returned), `tests_passed` (the share of a program's tests), or an import path
            such as `mypkg.brevity`. From Python also any callable. Its form is ours or TRL's.
        weight: The factor of its values, which may be negative.
        arguments: Further keyword arguments of the function, the same in each call.
        name: The name under which its mean is logged (`rewards/<name>/mean`); default the function's.
        retries: How often the function is called again in a batch if it raises, as one that asks a server may.
        pause_seconds: The pause before the first of these calls; each further pause is twice as long, at most a minute.
        after_retries: What happens if the last call fails, too. `stop`: the run ends. `none`: the responses of that
            batch have no value of this reward, as if it had returned None for each.
    """

    function: Function
    weight: float = 1.0
    arguments: dict[str, Any] | None = None
    name: str | None = None
    retries: int = 0
    pause_seconds: float = 1.0
    after_retries: Literal["stop", "none"] = "stop"


if TYPE_CHECKING:
    Rewards: TypeAlias = Sequence[RewardSpec | Callable[..., Any]]
else:
    Rewards: TypeAlias = list[RewardSpec]


def correctness(responses: Sequence[str], references: Sequence[str], *, correct: Sequence[bool]) -> list[float]:
    """1 for a right answer, else 0."""
    return [float(right) for right in correct]


def environment(
    responses: Sequence[str], references: Sequence[str], *, environment_reward: Sequence[float | None]
) -> Values:
    """What the environment's `get_reward` returned."""
    return list(environment_reward)


def tests_passed(
    responses: Sequence[str], references: Sequence[str], *, tests_passed: Sequence[float | None]
) -> Values:
    """The share of its tests that a program passed, of `CodeTask`."""
    return list(tests_passed)


def boxed_format(responses: Sequence[str], references: Sequence[str]) -> list[float]:
    r"""1 for a response that ends with a complete box, right or wrong, else 0; ``$ . \) \]`` may follow."""
    return [float(ends_with_answer(text, find_boxes(text))) for text in responses]


def answer_format(
    responses: Sequence[str], references: Sequence[str], *, ends_with_answer: Sequence[bool]
) -> list[float]:
    r"""1 for a response that ends with an answer in the task's form, right or wrong, else 0."""
    return [float(ends) for ends in ends_with_answer]


def ends_with_answer(text: str, answers: Sequence[AnswerSpan]) -> bool:
    r"""Whether nothing but white space, asterisks and ``$ . \) \]`` follows the last answer of a text."""
    return bool(answers) and _NOTHING.fullmatch(text, answers[-1].stop) is not None


def overlong(
    responses: Sequence[str], references: Sequence[str], *, lengths: Sequence[int], limit: int, buffer: int
) -> list[float]:
    """0 up to ``limit − buffer`` tokens, then a slope down to −1 at ``limit``: ``−(n − (limit − buffer)) / buffer``.

    `lengths` are the numbers ``n`` of generated tokens; `limit` is at most `sampling.max_response_length`.

    Source: DAPO (arXiv 2503.14476), equation 13.
    """
    if not 0 < buffer <= limit:
        raise ValueError(f"`buffer` must lie between 1 and `limit` ({limit}) tokens, but got {buffer}.")
    return [-min(1.0, max(0.0, (length - (limit - buffer)) / buffer)) for length in lengths]


_BUILT_IN: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (correctness, boxed_format, answer_format, overlong, environment, tests_passed)
}


class Reward:
    """A reward function, whose options and returned values are checked."""

    def __init__(self, spec: RewardSpec | Callable[..., Any]) -> None:
        spec = RewardSpec(function=spec) if callable(spec) else spec
        value: object = spec  # The constructor of a task of the user's may lack a type, without which it gets a dict.
        if not isinstance(value, RewardSpec):
            raise ValueError(
                f"`rewards` must be a list of `RewardSpec`, but got {str(value)[:80]}. If your task passes them on, "
                "write their type: `rewards: list[RewardSpec] | None = None`, of grail_lightning."
            )
        function_name = spec.function if isinstance(spec.function, str) else _name(spec.function)
        is_named = isinstance(spec.function, str) or _BUILT_IN.get(function_name) is spec.function
        self.spec, self._warned = spec, False
        self.path, self.weight = function_name if is_named else f"{function_name} {GIVEN}", spec.weight
        self.name = spec.name or function_name.rpartition(".")[2]
        self.arguments = dict(spec.arguments or {})
        if not math.isfinite(self.weight):
            raise ValueError(f"`weight` of the reward `{self.path}` must be a finite number, but got {self.weight}.")
        if spec.retries < 0 or not 0 <= spec.pause_seconds < math.inf or spec.after_retries not in ("stop", "none"):
            raise ValueError(
                f"The reward `{self.path}` must have `retries` and `pause_seconds` of at least 0, and `after_retries` "
                f"stop or none, but got {spec.retries}, {spec.pause_seconds} and {spec.after_retries!r}."
            )
        self.function = import_function(spec.function, _BUILT_IN, "`function` of a reward", "mypkg.brevity")
        self.is_trl = False  # Whether the function has TRL's form.
        self._columns, self._required = self._signature()

    def _signature(self) -> tuple[set[str] | None, set[str]]:
        """The names of the columns that the function takes, None for any, and of those that it must be given."""
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):  # A function written in C may have no signature.
            return None, set()
        self.is_trl = _has_trl_form(signature)
        texts: tuple[list[str], ...] = () if self.is_trl else ([], [])
        try:
            leading = [*signature.bind_partial(*texts).arguments]
        except TypeError:
            leading = []
        # One without references would be given these as a column.
        if not self.is_trl and (not leading or ({*_TRL, *_GRADED} - {"answers"}) & {*leading}):
            raise ValueError(
                f"The reward `{self.path}` must take responses and references first, and columns by their names, but "
                f"takes {signature}. {_instead(self.function)} TRL's form is taken, too: `(completions, **columns)`."
            )
        try:
            signature.bind_partial(*texts, **self.arguments)
            if self.function is overlong:  # A call without responses checks the values.
                overlong([], [], lengths=[], **self.arguments)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"The reward `{self.path}` must get `arguments` that it can use, but got {self.arguments}: {error}. It "
                f"takes {signature}. See {page('problems.md')}."
            ) from error
        named = [parameter for parameter in signature.parameters.values() if parameter.name not in leading]
        required = {
            p.name for p in named if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }
        return None if any(p.kind is p.VAR_KEYWORD for p in named) else {p.name for p in named}, required

    def check_columns(self, columns: Collection[str]) -> None:
        """Check that the data has the columns without which the function cannot be called."""
        inputs = [name for name in _TRL if name != "environments"] if self.is_trl else _GRADED
        if missing := sorted(self._required - {*columns, *inputs, *self.arguments}):
            data = ", ".join(sorted({*columns} - {*inputs}))
            only = f" ({', '.join(_FROM_TRAINER)} are those of TRL's trainer.)" if {*_FROM_TRAINER} & {*missing} else ""
            raise ValueError(
                f"The reward `{self.path}` must take columns of the data, {data}, or {', '.join(inputs)}, but asks for "
                f"{missing}. Correct their names, set them in `arguments`, or give them defaults.{only}"
            )

    def start(
        self, responses: Sequence[str], references: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> Callable[[], Values]:
        """Call the function. What is returned waits for its values, if it is ``async``, and checks them."""
        return self._start(responses, [list(responses), list(references)], columns, {})

    def start_trl(self, rollouts: TRLRollouts) -> Callable[[], Values]:
        """The same for a function in TRL's form, which gets everything by its name."""
        columns = {name: cells for name, cells in rollouts.columns.items() if name not in ("prompt", "completion")}
        told = {"prompts": rollouts.prompts, "completions": rollouts.completions}
        told |= {} if rollouts.ids is None else {"completion_ids": rollouts.ids}
        environments = {} if rollouts.environments is None else {"environments": list(rollouts.environments)}
        return self._start(rollouts.completions, [], columns | told, self._taken(environments))

    def _taken(self, columns: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
        """Those of the columns that the function takes."""
        return {key: column for key, column in columns.items() if self._columns is None or key in self._columns}

    def _start(
        self,
        responses: Sequence[Any],
        texts: list[list[str]],
        columns: Mapping[str, Sequence[Any]],
        uncopied: Mapping[str, Any],
    ) -> Callable[[], Values]:
        taken = self._taken(columns)

        def call() -> Any:
            # Copies, because the cells belong to the data, which the rest of the group and later epochs read.
            cells: dict[str, Any] = {key: [copy.deepcopy(cell) for cell in column] for key, column in taken.items()}
            return self.function(*texts, **{**cells, **uncopied, **self.arguments})

        def explain(error: BaseException) -> str:
            return (
                f"The reward `{self.path}` raised {said(error)}. It got {len(responses)} responses"
                f"{'' if self.is_trl else ', their references'} and the columns {sorted({*taken, *uncopied})}. Call it "
                f"by hand to debug it ({page('reference/your_task.md')})."
            )

        attempts = Attempts(call, partial(explained, explain), self.spec.retries, self.spec.pause_seconds)
        begun = self._outcome(attempts.begin)
        waiting: Future[Any] | None = None
        if inspect.isawaitable(begun):
            waiting = asyncio.run_coroutine_threadsafe(attempts.wait(begun), background_loop("rewards"))

        def finish() -> Values:
            returned = begun if waiting is None else self._outcome(waiting.result)
            failed = returned is _FAILED
            values = RewardValues([None] * len(responses) if failed else self._checked(returned, responses))
            if self.spec.retries or self.spec.after_retries == "none":
                values.shares = {"failed": float(failed), "retried": float(attempts.again > 0)}
            return values

        return finish

    def _outcome(self, ask: Callable[[], Any]) -> Any:
        """What a call returns, or `_FAILED`, if the run goes on without it."""
        try:
            return ask()
        except ValueError as error:
            if self.spec.after_retries == "stop":
                raise
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{error} After {self.spec.retries} retries these responses have no value of it, as `after_retries`"
                    f" says. `rewards/{self.name}/failed` is the share of such responses in each batch.",
                    stacklevel=2,
                )
            return _FAILED

    def _checked(self, returned: Any, responses: Sequence[Any]) -> Values:
        wanted = f"The reward `{self.path}` must return {len(responses)} finite numbers or None, one a response,"
        try:
            if isinstance(returned, str | Mapping | Set):
                raise TypeError(f"a {type(returned).__name__} has no order of responses")
            values = [None if value is None else float(value) for value in returned]
        except Exception as error:  # It may be a generator, which raises anything.
            raise ValueError(f"{wanted} but got {str(returned)[:200]} ({error}). Return a list of floats.") from error
        if len(values) != len(responses):
            raise ValueError(f"{wanted} but got {len(values)}. It is called with a whole batch, not with one response.")
        for value, response in zip(values, responses, strict=True):
            if value is not None and not math.isfinite(value):
                raise ValueError(
                    f"{wanted} but got {value} for the response {str(response)[-200:]!r}. Return None for no opinion."
                )
            if value is not None and abs(value) > LARGEST_REWARD:
                raise ValueError(
                    f"The reward `{self.path}` must return numbers between ±{LARGEST_REWARD:g}, since advantages are "
                    f"float32, but got {value:g} for the response {str(response)[-200:]!r}. Divide its values by a "
                    "constant."
                )
        return values


class TRLRollouts(NamedTuple):
    """What TRL's trainer tells reward functions of a batch, an entry for each rollout."""

    prompts: Sequence[Any]  # Texts or conversations.
    completions: Sequence[Any]  # Texts; lists of messages if the prompts are conversations.
    ids: Sequence[Sequence[int]] | None  # The tokens after the prompt; None if they are not known.
    columns: Mapping[str, Sequence[Any]]
    environments: Sequence[object] | None = None  # One for each rollout; None where the task has none.


def _has_trl_form(signature: inspect.Signature) -> bool:
    """Whether a reward takes its arguments by TRL's names, or any by name and none by position."""
    parameters = signature.parameters
    if all(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return bool(parameters)
    return not {"responses", "references"} & parameters.keys() and not parameters.keys().isdisjoint(_TRL)


def _name(function: Callable[..., Any]) -> str:
    """The name of a callable: a function's, that of the function in a `functools.partial`, or an object's class."""
    function = getattr(function, "func", function)
    return str(getattr(function, "__name__", type(function).__name__)).strip("<>")


def _instead(function: Callable[..., Any]) -> str:
    """How a reward of the same kind is written that takes what a reward is given, in Python that runs."""
    columns = "(responses, references, **columns)"
    if inspect.isclass(function):
        return f"Give an object of the class, whose method is `def __call__(self, {columns[1:]}`."
    if isinstance(function, functools.partial):
        return f"{_instead(function.func)} Give `functools.partial` the values of columns alone."
    name = getattr(function, "__name__", None)
    if name == "<lambda>":
        return "Write `lambda responses, references, **columns: …`."
    if name is None:
        return f"Write `def __call__(self, {columns[1:]}` in {type(function).__name__}."
    return f"Write `def {name}({'self, ' * inspect.ismethod(function)}{columns[1:]}`."
