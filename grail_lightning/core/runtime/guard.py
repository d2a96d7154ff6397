"""What code of the user's raises, as one error that says where it was raised: no run ends without a word.

`SystemExit` would end the process with the code's own exit code, and `asyncio.CancelledError` and `GeneratorExit` pass
each ``except Exception``. Lightning takes a `StopIteration` for the end of an epoch or of a validation, and goes on.
"""

from __future__ import annotations

import site
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PACKAGE = str(Path(__file__).parents[2])
_PATHS = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib", "scripts")}
_NOT_USERS = (_PACKAGE, *_PATHS, *site.getsitepackages(), "<frozen")


def of_a_signal(error: BaseException) -> bool:
    """Whether Ctrl-C or a SIGTERM has raised it, in whatever code the main thread was; it is no fault of this code."""
    lightning: Any = sys.modules.get("lightning.pytorch.utilities.exceptions")
    if lightning is not None and isinstance(error, lightning.SIGTERMException):
        return True
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def ends_silently(error: BaseException) -> bool:
    """Whether it would end a process, a thread, an epoch or a validation without a message."""
    return not isinstance(error, Exception) or isinstance(error, (StopIteration, StopAsyncIteration))


def said(error: BaseException) -> str:
    """The class of an error and its text, which may be empty or fail itself."""
    try:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    except BaseException:  # From its own `__str__`.
        return type(error).__name__


def said_in_a_line(error: BaseException, most: int | None = None) -> str:
    """What `said` gives, in one line and in at most `most` characters: errors of compilers are long."""
    return " ".join(said(error).split())[:most]


@contextmanager
def explained(
    explain: Callable[[BaseException], str], only: Callable[[BaseException], bool] = lambda error: True
) -> Iterator[None]:
    """A context in which what is raised becomes a `ValueError` with the text of `explain`.

    Ctrl-C and a SIGTERM pass, and so does what `only` is false for.
    """
    try:
        yield
    except BaseException as error:
        if of_a_signal(error) or not only(error):
            raise
        raise ValueError(explain(error)) from error


def users_place(error: BaseException) -> str:
    """Where code outside of libraries and of this package has raised an error; empty if none has."""
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        code = frame.f_code
        if not code.co_filename.startswith(_NOT_USERS):
            return f"`{code.co_qualname}` ({Path(code.co_filename).name}, line {line})"
    return ""


def silent_end(error: BaseException, called: str) -> str:
    """The message about an error that `ends_silently`; `called` names what was called."""
    place = users_place(error)
    return (
        f"{called} must not raise what ends a run without a message, but raised {said(error)}"
        f"{place and f' in {place}'}. Raise an error that says what is wrong, such as a `ValueError`."
    )
