"""The methods of an environment that are no tools, called with what they may return in view."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any, Literal

from grail_lightning.environments.arguments import shown
from grail_lightning.environments.side_by_side import awaited
from grail_lightning.picture import Picture


def check_columns(environment_class: type, columns: Iterable[str]) -> None:
    """Check that `reset` takes the columns of a dataset. A ValueError if it does not.

    It may also name `seed` and `images`.
    """
    signature, there = inspect.signature(bound_method(environment_class, "reset")), dict.fromkeys(columns)
    try:
        signature.bind(**dict.fromkeys({"seed", "images"} & signature.parameters.keys()) | there)
    except TypeError as error:
        raise ValueError(
            f"`{environment_class.__name__}.reset` must take the columns {listed(there)} of a row, but got: {error}. "
            "Add or remove the column, give the parameter a default, or let `reset` end with `**columns`."
        ) from None


def call_reset(
    environment: object, columns: Mapping[str, Any], seed: int, pictures: Sequence[Picture] = ()
) -> str | None:
    """Begin a rollout: ``reset(**columns)``.

    If the signature names `seed`, or `images` for the pictures of the prompt, and no column has that name, it gets it.

    Returns:
        Text for the end of the prompt, or None.

    Raises:
        ValueError: `reset` raised an exception, or returned something else.
    """
    given = copy.deepcopy(dict(columns))  # The rollouts of a group share a row, and may change it.
    named = inspect.signature(environment.reset).parameters  # type: ignore[attr-defined]
    if "seed" in named:
        given.setdefault("seed", seed)
    if "images" in named and "images" not in given:
        given["images"] = [picture.open() for picture in pictures]
    made = _call(environment, "reset", given)
    if made is not None and not isinstance(made, str):
        raise _wrong(environment, "reset", "return text or None", made)
    return made


def call_number(environment: object, method: Literal["get_reward", "score_turn"]) -> float | None:
    """What `get_reward()` returns at the end of a rollout, or `score_turn()` at that of a turn; None without it.

    Raises:
        ValueError: It raised an exception, or returned something that is neither None nor a finite number.
    """
    made = _call(environment, method)
    if made is None:
        return None
    try:
        number = math.nan if isinstance(made, str | bytes) else float(made)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # The last one from a tensor.
        number = math.nan
    if not math.isfinite(number):
        raise _wrong(environment, method, "return a finite number or None", made)
    return number


def call_state(environment: object) -> Hashable:
    """What `state_key()` returns before a turn; None without the method.

    Raises:
        ValueError: It raised an exception, or returned something that has no hash.
    """
    made: Hashable = _call(environment, "state_key")
    try:
        hash(made)
    except TypeError as error:
        raise _wrong(environment, "state_key", "return a hashable key, such as a tuple", made) from error
    return made


def _call(environment: object, method: str, arguments: Mapping[str, Any] | None = None) -> Any:
    called = getattr(environment, method, None)
    if called is None:
        return None
    try:
        return awaited(called(**(arguments or {})))
    except BaseException as error:  # One that calls `sys.exit` would end the run without a word.
        name = f"{type(environment).__name__}.{method}"
        raise ValueError(f"`{name}` must not fail, but raised {type(error).__name__}: {error}") from error


def _wrong(environment: object, method: str, task: str, made: object) -> ValueError:
    kind = type(made).__name__
    return ValueError(f"`{type(environment).__name__}.{method}` must {task}, but got {shown(made)} of type `{kind}`.")


def bound_method(made: type, name: str) -> Callable[..., Any]:
    """The method as an instance has it, so that signatures have no `self`."""
    method: Callable[..., Any] = getattr(made, name)
    return method if isinstance(inspect.getattr_static(made, name), staticmethod) else MethodType(method, made)


def listed(names: Iterable[str]) -> str:
    """Names in backticks, in alphabetical order."""
    return ", ".join(f"`{name}`" for name in sorted(names))
