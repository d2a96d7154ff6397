"""An environment's methods: the schemas of its tools, calls run with checked arguments, and `reset` and its kin.

An environment is a class as TRL's `environment_factory` takes it. `reset` begins a rollout and gets the columns of a
row of the dataset; every other public method is a tool, but for `get_reward`, `score_turn`, `state_key` and `close`.
Functions without a state are tools beside them, as TRL's `tools`.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import re
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from itertools import groupby
from types import MethodType
from typing import Any, Literal

from grail_lightning.core.environments.calls import ParsedCall, checked_arguments, shown
from grail_lightning.core.environments.side_by_side import awaited, side_by_side
from grail_lightning.core.records.episode import CallStatus, EpisodeLimits, ToolCall
from grail_lightning.core.records.picture import PLACE, Picture, is_image
from grail_lightning.core.runtime.guard import explained, said

_NOT_TOOLS = frozenset({"reset", "get_reward", "score_turn", "state_key", "close"})

ResultFormat = Literal["text", "json"]
"""How a result that is no text is told. `text`: as TRL tells it, ``str(result)``; `json`: as JSON where that can hold
it, and nothing for None."""

_MAX_PICTURES = 16  # Of one result.
_MAX_PIXELS = 2**24  # Of one picture of a result.

_Ran = tuple[CallStatus, str, tuple[Picture, ...]]  # How a call ended, its result, and the pictures in it.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_OTHER_THREAD = re.compile(r"main thread|no (?:current|running) event loop|(?:same|different|another) thread")


class ToolSet:
    """The tools of an environment class, with TRL's schemas. A ValueError if one cannot be described to a policy.

    Args:
        environment: The class.
        functions: Further tools, which belong to no environment; they come first, as in TRL.
        results: How a result that is no text is told.
        may_be_empty: Whether there may be no tool, as where a response of one turn is judged by rewards.
    """

    def __init__(
        self,
        environment: type,
        functions: Sequence[Callable[..., Any]] = (),
        results: ResultFormat = "text",
        may_be_empty: bool = False,
    ) -> None:
        methods = dict(inspect.getmembers(environment, predicate=inspect.isfunction))
        if "reset" not in methods:
            raise ValueError(
                f"An environment must have a method `reset`, but `{environment.__name__}` has none. Write "
                "`def reset(self, **columns)`, which begins a rollout and returns text for the prompt, or None."
            )
        tools = [name for name in methods if name not in _NOT_TOOLS and not name.startswith("_")]
        if not (tools or functions or may_be_empty):
            raise ValueError(
                f"An environment must have a tool, but `{environment.__name__}` has no public method but "
                f"{_listed(methods.keys() & _NOT_TOOLS)}. Write one with type hints and a docstring."
            )
        # As a chat template takes them.
        self.schemas = [_schema(function, _name_of(function), is_method=False) for function in functions]
        self.schemas += [_schema(_bound(environment, name), f"{environment.__name__}.{name}") for name in tools]
        self.results = results
        self.show_pictures = any(_can_be_picture(s["function"].get("return", {})) for s in self.schemas)
        # A method by its name, which each environment has its own of, or a function.
        called: list[str | Callable[..., Any]] = [*functions, *tools]
        names = [schema["function"]["name"] for schema in self.schemas]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"Tools must have different names, but got {_listed(twice)} twice. Rename one of them.")
        self.by_name = dict(zip(names, zip(self.schemas, called, strict=True), strict=True))
        self._bound_to_thread: dict[str, bool] = {}  # Tools that failed since they ran in a thread; True once told.

    def run(self, environment: object, call: ParsedCall, max_characters: int) -> _Ran:
        """Run a call with a checked copy of its arguments; nothing is raised."""
        try:
            if call.error is not None:
                raise ValueError(call.error)
            if call.name not in self.by_name:
                raise ValueError(f"There is no tool {shown(call.name)}. The tools are: {_listed(self.by_name)}.")
            schema, called = self.by_name[call.name]
            arguments = checked_arguments(schema, call.arguments)
        except ValueError as error:
            return "invalid", result_text(f"Error: {error}", max_characters), ()
        try:
            function = getattr(environment, called) if isinstance(called, str) else called
            return "done", *_result(awaited(function(**arguments)), max_characters, self.results)
        except BaseException as error:  # A tool that calls `sys.exit` ends no run.
            if _thread_advice(error):
                self._bound_to_thread.setdefault(call.name, False)
            return "failed", result_text(f"Error: {said(error)}", max_characters), ()

    def warn_of_threads(self) -> None:
        """Warn once of each tool that failed because it did not run in the thread that it needs."""
        for name in [name for name, told in self._bound_to_thread.items() if not told]:
            self._bound_to_thread[name] = True
            warnings.warn(f"The tool `{name}` must run in any thread, but failed in one.{_THREADS}", stacklevel=2)


_THREADS = (
    " The methods of an environment run in threads, one after the other: Python sets signals (`signal.alarm`) in its "
    "main thread alone, and some objects belong to the thread that made them (SQLite needs `check_same_thread=False`). "
    "`limits.tool_seconds` limits the time of a call, asynchronous tools are awaited, and what needs a thread of its "
    "own belongs in another process."
)


def _thread_advice(error: BaseException) -> str:
    """What to do about an error that comes from the thread in which it was raised; empty for any other."""
    return _THREADS if _OTHER_THREAD.search(said(error)) else ""


def run_calls(
    rollouts: Sequence[tuple[ToolSet, object, Sequence[ParsedCall]]], limits: Sequence[EpisodeLimits]
) -> list[tuple[ToolCall, ...]]:
    """Run the calls of many rollouts side by side: the first ones of all, then the second ones, and so on.

    A rollout has its tools, its environment, and its calls. A tool that timed out may still be running: the calls
    behind it fail without being run, and the rollout's environment must not be used again.
    """
    results: list[list[ToolCall]] = [[] for _ in rollouts]
    for number in range(max((len(calls) for *_, calls in rollouts), default=0)):

        def run(k: int, number: int = number) -> _Ran:
            if any(call.status == "timeout" for call in results[k]):
                return "failed", "Error: it was not run, since a call before it did not return.", ()
            tools, environment, calls = rollouts[k]
            return tools.run(environment, calls[number], limits[k].result_characters)

        indices = [k for k, (*_, calls) in enumerate(rollouts) if number < len(calls)]
        outcomes = side_by_side([partial(run, k) for k in indices], [limits[k].tool_seconds for k in indices])
        for k, (_, value, seconds) in zip(indices, outcomes, strict=True):
            late: _Ran = "timeout", f"Error: the tool did not return within {seconds:g} seconds.", ()
            status, text, pictures = value or late
            name, arguments, _ = rollouts[k][2][number]
            call = ToolCall(
                name=name, arguments=arguments, result=text, status=status, seconds=seconds, pictures=pictures
            )
            results[k].append(call)
    for tools in {id(tools): tools for tools, *_ in rollouts}.values():
        tools.warn_of_threads()
    return [tuple(calls) for calls in results]


def _result(value: object, max_characters: int, form: ResultFormat = "text") -> tuple[str, tuple[Picture, ...]]:
    """A tool's result as text, with `PLACE` for each of its pictures, and copies of these: a tool may draw on them."""
    items = value if isinstance(value, list | tuple) else [value]
    parts = [_unwrapped(part) for part in items]
    pictures, texts, room = [], [], max_characters
    number = sum(map(is_image, parts))
    if not number and (items is not value or not any(map(_is_text_part, items))):
        return result_text(value, max_characters, form), ()
    if number > _MAX_PICTURES:
        raise ValueError(f"a result can have {_MAX_PICTURES} pictures, but got {number:,}")
    for are_images, neighbours in groupby(parts, is_image):
        if are_images:
            copies = [_copied(part) for part in neighbours]
            pictures += copies
            texts += [PLACE] * len(copies)
        else:
            text = ""
            for part in neighbours:
                text += result_text(part, room - len(text), form) if room >= len(text) else ""
            # Two texts together may make one.
            texts.append(text.replace(PLACE, f"{PLACE[0]} {PLACE[1:]}") if number else text)
            room -= len(text)
    return "".join(texts), tuple(pictures)


def _copied(image: Any) -> Picture:
    if not 0 < image.width * image.height <= _MAX_PIXELS:
        raise ValueError(f"a picture can have {_MAX_PIXELS:,} pixels, but got {image.width} x {image.height}")
    return Picture(Picture(image, "a result").open(), "a result")


def _unwrapped(part: Any) -> Any:
    """The content of a text or an image in the form of messages, as TRL's tools may return it."""
    return part.get(part["type"], part) if isinstance(part, dict) and part.get("type") in ("image", "text") else part


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def result_text(value: object, max_characters: int, form: ResultFormat = "text") -> str:
    """A tool's result as text for the policy, without control characters and half surrogate pairs, and cut."""
    text = value if isinstance(value, str) else str(value) if form == "text" else _as_json(value)
    note = f"… (cut: {len(text):,} characters)" if len(text) > max_characters else ""
    return _CONTROL.sub("", text[:max_characters].encode(errors="replace").decode()) + note


def _as_json(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bytes | bytearray):
        return value.decode(errors="replace")
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _can_be_picture(schema: dict[str, Any]) -> bool:
    kinds = schema.get("type", ())
    inner = [*schema.get("anyOf", ()), *schema.get("prefixItems", ()), *filter(None, [schema.get("items")])]
    return "image" in ([kinds] if isinstance(kinds, str) else kinds) or any(map(_can_be_picture, inner))


def _schema(called: Callable[..., Any], name: str, *, is_method: bool = True) -> dict[str, Any]:
    """The schema that TRL gives to the chat template."""
    from transformers.utils import get_json_schema

    try:
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            raise ValueError("It yields, but a result is returned as a whole.")
        kinds = {p.kind for p in inspect.signature(called).parameters.values()}
        if not kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}:
            raise ValueError("A parameter cannot be given by its name.")
        schema: dict[str, Any] = get_json_schema(called)
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".!")
        other = ", or begin the name with `_` if the method is no tool" if is_method else ""
        raise ValueError(
            f"A tool needs a type hint for each parameter and a docstring that describes each under `Args:`, but "
            f"`{name}` cannot be described to the policy: {reason}. Write them{other}."
        ) from error
    return schema


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


@cache
def _reset_signature(environment_class: type) -> inspect.Signature:
    return inspect.signature(_bound(environment_class, "reset"))


def check_columns(environment_class: type, columns: Iterable[str]) -> None:
    """Check that `reset` takes the columns of a row, beside `seed` and `images`."""
    signature = _reset_signature(environment_class)
    there = _taken(signature, dict.fromkeys(columns))
    try:
        signature.bind(**dict.fromkeys({"seed", "images"} & signature.parameters.keys()) | there)
    except TypeError as error:
        raise ValueError(
            f"`{environment_class.__name__}.reset` must take the columns {_listed(there)} of a row, but got: {error}. "
            "Add or remove the column, give the parameter a default, or let `reset` end with `**columns`."
        ) from None


def _taken(signature: inspect.Signature, columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns for `reset`. The text of TRL's `prompt` is also `problem`, which an environment of TRL's lacks."""
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if "prompt" not in columns or "problem" in signature.parameters or inspect.Parameter.VAR_KEYWORD in kinds:
        return dict(columns)
    return {name: value for name, value in columns.items() if name != "problem"}


def call_reset(
    environment: object, columns: Mapping[str, Any], seed: int, pictures: Sequence[Picture] = ()
) -> str | None:
    """``reset(**columns)``, with `seed` and `images` if it names them: a text for the end of the prompt, or None."""
    signature = inspect.signature(environment.reset)  # type: ignore[attr-defined]
    named = signature.parameters
    arguments = copy.deepcopy(_taken(signature, columns))  # The rollouts of a group share a row, and may change it.
    if "seed" in named:
        arguments.setdefault("seed", seed)
    if "images" in named and "images" not in arguments:
        arguments["images"] = [picture.open() for picture in pictures]
    text = _call(environment, "reset", arguments)
    if isinstance(text, list) and text and all(map(_is_text_part, text)):
        text = "".join(part["text"] for part in text)
    if text is not None and not isinstance(text, str):
        raise _wrong(environment, "reset", "return text, a list of text parts, or None", text)
    return text and text.encode(errors="replace").decode()  # Files take no lone surrogate.


def call_close(environment: object) -> None:
    """``close()``, if the environment has the method; a ValueError with the reason if it fails."""
    _call(environment, "close")


def call_number(environment: object, method: Literal["get_reward", "score_turn"]) -> float | None:
    """What `get_reward()` or `score_turn()` returns; None without the method."""
    value = _call(environment, method)
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # The last one from a tensor.
        number = math.nan
    if not math.isfinite(number):
        raise _wrong(environment, method, "return a finite number or None", value)
    return number


def call_state(environment: object) -> Hashable:
    """What `state_key()` returns; None without the method."""
    key: Hashable = _call(environment, "state_key")
    try:
        hash(key)
    except TypeError as error:
        raise _wrong(environment, "state_key", "return a hashable key, such as a tuple", key) from error
    return key


def _call(environment: object, method: str, arguments: Mapping[str, Any] | None = None) -> Any:
    called = getattr(environment, method, None)
    if called is None:
        return None
    with _must_not_fail(f"{type(environment).__name__}.{method}"):
        return awaited(called(**(arguments or {})))


def new_environment(make: Callable[[], Any]) -> Any:
    """A new environment; what its constructor raises is a ValueError that names it."""
    kind = getattr(make, "func", make)  # A `functools.partial` has the class as `func`.
    with _must_not_fail(f"{getattr(kind, '__name__', type(kind).__name__)}()"):
        return make()


@contextmanager
def trial_environment(make: Callable[[], Any]) -> Iterator[Any]:
    """A new environment to look at, which no rollout plays; it is closed behind."""
    environment = new_environment(make)
    try:
        yield environment
    finally:
        with suppress(ValueError):  # It may need what `reset` makes.
            call_close(environment)


def _must_not_fail(name: str) -> AbstractContextManager[None]:
    return explained(lambda error: f"`{name}` must not fail, but raised {said(error)}{_advice_after(error)}")


def _advice_after(error: BaseException) -> str:
    advice = _thread_advice(error)
    return f".{advice}" if advice else ""


def _wrong(environment: object, method: str, task: str, value: object) -> ValueError:
    kind = type(value).__name__
    return ValueError(f"`{type(environment).__name__}.{method}` must {task}, but got {shown(value)} of type `{kind}`.")


def _bound(environment: type, name: str) -> Callable[..., Any]:
    """The method as an instance has it, so that signatures have no `self`."""
    method: Callable[..., Any] = getattr(environment, name)
    is_static = isinstance(inspect.getattr_static(environment, name), staticmethod)
    return method if is_static else MethodType(method, environment)


def _listed(names: Iterable[str]) -> str:
    """Names in backticks, in alphabetical order."""
    return ", ".join(f"`{name}`" for name in sorted(names))
