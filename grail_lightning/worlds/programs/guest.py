"""What runs inside of a sandbox: it calls the entry of a program with literals and returns data.

It imports the standard library alone, for its text goes to an interpreter in the sandbox (`python -c`). Three roles:
``solve`` holds the program, and gets the arguments of one test at a time, never what is expected. ``check`` holds the
assertions of a problem, which contain what is expected, and no program: their entry is a proxy, whose arguments go to
the process that solves, and whose result comes back as data. ``script`` runs a program as a whole. A program can change
all that is in its process, so nothing that it says is trusted: the other side reads it as JSON of limited length.
"""

from __future__ import annotations

import ast
import builtins
import io
import json
import os
import random
import reprlib
import sys
import traceback
import types
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

MAX_DEPTH = 40
_MAX_VISITS = 1000
_TRACE_CHARACTERS = 200_000
_ENDS_ITERATION = (StopIteration, StopAsyncIteration)  # In `list(map(f, …))` such an error is an end, and no error.

Message = dict[str, Any]
Exchange = Callable[[Message], Message]
Door = Callable[[bytes], bytes]
"""Hands a reply on and brings the next message; an empty reply is none, an empty message the end."""


def encode(value: object, depth: int = 0) -> Any:
    """A literal as JSON data; TypeError if it is none. Subclasses of containers are taken as their contents.

    The members of a set stand in an order that does not depend on the process.
    """
    if value is None or type(value) in (bool, float):
        return value
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError:  # JSON has no two halves of a surrogate pair: it would join them to one character.
            return {"u": value.encode("utf-8", "surrogatepass").hex()}
        return value
    if type(value) is complex:
        return {"c": [value.real, value.imag]}
    if type(value) is int:  # Python limits the decimal digits that it reads
        return value if value.bit_length() <= 4096 else {"i": hex(value)}
    if depth == MAX_DEPTH:
        raise TypeError(f"a value nested deeper than {MAX_DEPTH} is no literal here")
    if isinstance(value, dict):
        return {"d": [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in dict.items(value)]}
    kinds: tuple[tuple[Any, str], ...] = ((list, ""), (tuple, "t"), (set, "s"), (frozenset, "f"))
    for base, key in kinds:
        if isinstance(value, base):
            items = [encode(item, depth + 1) for item in base.__iter__(value)]
            if key in ("s", "f"):
                items.sort(key=repr)
            return {key: items} if key else items
    raise TypeError(f"{type(value).__name__} is no literal")


def decode(data: Any, depth: int = 0) -> Any:
    """The literal that JSON data stand for; ValueError if they stand for none."""
    if depth > MAX_DEPTH:
        raise ValueError(f"data nested deeper than {MAX_DEPTH}")
    if isinstance(data, list):
        return [decode(item, depth + 1) for item in data]
    if not isinstance(data, dict):
        return data
    try:
        ((key, items),) = data.items()
        if key == "i":
            return int(items, 16)
        if key == "u":
            return bytes.fromhex(items).decode("utf-8", "surrogatepass")
        if key == "c":
            return complex(*items)
        if key == "d":
            return {decode(k, depth + 1): decode(v, depth + 1) for k, v in items}
        return {"t": tuple, "s": set, "f": frozenset}[key](decode(item, depth + 1) for item in items)
    except (TypeError, KeyError, OverflowError) as error:  # also what cannot be hashed
        raise ValueError("data that stand for no literal") from error


class _TooMuchOutput(BaseException):
    """Ends a run that printed too much. A program's `except Exception` does not catch it."""


class _TraceFull(BaseException):
    """Ends a run whose trace is full. If it does not end by itself, it would be killed with its trace."""


class _Output(io.StringIO):
    """Keeps what a program prints, up to a limit of characters."""

    encoding = "utf-8"

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def write(self, text: str) -> int:
        room = max(0, self._limit - self.tell())
        super().write(text[:room])
        if len(text) > room:
            raise _TooMuchOutput
        return len(text)


class _Canonical(reprlib.Repr):
    """Values of a trace: literals with sets and dictionaries sorted, other objects by their types, never an address.

    Numbers that are equal look alike. Integers of more digits than Python shows are hexadecimal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxlong = 200
        self.maxlist = self.maxtuple = 100

    def repr1(self, x: object, level: int) -> str:
        # `reprlib` goes by names, and a class of the program may be called `deque`.
        user_class = type(x).__module__ not in ("builtins", "collections", "array")
        return self.repr_instance(x, level) if user_class else super().repr1(x, level)

    def _sorted(self, members: Iterable[Any], level: int) -> list[Any]:
        """Numbers or texts by their values, others by their looks: the program's own `__lt__` must not run."""
        members = list(members)
        kinds = {type(member) for member in members}
        plain = kinds <= {str} or kinds <= {bool, int, float}
        return sorted(members, key=None if plain else lambda member: self.repr1(member, level))

    def repr_set(self, x: Any, level: int) -> str:
        return "set" + self.repr_list(self._sorted(x, level), level)

    def repr_frozenset(self, x: Any, level: int) -> str:
        return "frozen" + self.repr_set(x, level)

    def repr_dict(self, x: Any, level: int) -> str:
        values = {id(key): value for key, value in x.items()}  # Not `x[key]`, which runs the key's own `__eq__`.
        return "dict" + self.repr_list([(key, values[id(key)]) for key in self._sorted(x, level)], level)

    def repr_instance(self, x: object, level: int) -> str:
        if type(x) is bool or (type(x) is float and x.is_integer()):
            return self.repr_int(int(x), level)
        return repr(x) if x is None or type(x) in (float, complex) else f"<{type(x).__name__}>"

    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if x.bit_length() <= 4096 else hex(x)[: self.maxlong]

    repr_bool = repr_float = repr_complex = repr_NoneType = repr_instance  # noqa: N815 (reprlib's own scheme of names)


class _Tracer:
    """Which statements a call executed: line, kind of event, local names, what was returned, and depth of calls."""

    def __init__(self, source: str) -> None:
        self.first: dict[int, int] = {}  # line → first line of the innermost statement that holds it
        for node in ast.walk(ast.parse(source)):  # breadth first: what is inside comes later
            if isinstance(node, ast.stmt):
                self.first.update(dict.fromkeys(range(node.lineno, (node.end_lineno or 0) + 1), node.lineno))
        self.visits: list[list[Any]] = []
        self.left = _TRACE_CHARACTERS
        self.full = False
        self._depth = 0
        self._show = _Canonical().repr
        self._last: dict[types.FrameType, tuple[int, int]] = {}  # a frame's statement, and the line of it
        self._raising: set[types.FrameType] = set()  # those where no statement followed an exception

    def __call__(self, frame: types.FrameType, event: str, value: Any) -> Any:
        """The function of `sys.settrace`: comprehensions and lambdas are parts of statements."""
        code = frame.f_code
        if code.co_filename != "<program>" or code.co_name.startswith("<"):
            return None
        self._depth += 1
        return self._trace

    def _trace(self, frame: types.FrameType, event: str, value: Any) -> Any:
        line = self.first.get(frame.f_lineno, frame.f_lineno)
        if event == "line":
            self._raising.discard(frame)
            # Python comes back to the first line of a statement from its others.
            last, self._last[frame] = self._last.get(frame), (line, frame.f_lineno)
            if last is None or last[0] != line or last[1] == line == frame.f_lineno:
                self._keep(line, "line", frame, None)
        elif event == "exception" and value[0] is not StopIteration:  # with which `for` ends
            self._raising.add(frame)
            self._keep(line, "raise", frame, value[0].__name__)
        elif event == "return":
            self._last.pop(frame, None)
            if frame not in self._raising:  # else it is left by the exception
                self._keep(line, "return", frame, self._show(value))
            self._raising.discard(frame)
            self._depth -= 1
        return self._trace

    def _keep(self, line: int, event: str, frame: types.FrameType, value: str | None) -> None:
        if len(self.visits) == _MAX_VISITS or self.left <= 0:
            sys.settrace(None)
            frame.f_trace, self.full = None, True
            raise _TraceFull
        names = sorted((name, self._show(held)) for name, held in frame.f_locals.items() if name[0] != ".")
        visit = [line, event, names, value, self._depth]
        self.left -= len(json.dumps(visit))  # As it is sent: a character that is not ASCII takes 6 or 12.
        self.visits.append(visit)


def _failure(error: BaseException) -> Message:
    """An exception as data: its kind, its text and the line of the program where it was raised."""
    # By their classes: a program that catches one can change what it holds.
    if isinstance(error, _TooMuchOutput):
        return {"error": "output", "message": "printed more than it may"}
    if isinstance(error, _TraceFull):
        return {"error": "timeout", "message": "the trace is full"}
    line, step = None, error.__traceback__
    while step is not None:
        line = step.tb_lineno if step.tb_frame.f_code.co_filename == "<program>" else line
        step = step.tb_next
    try:
        text = str(error)[:300]
    except BaseException:  # of the program's own
        text = ""
    kind = "memory" if isinstance(error, MemoryError) else "raised"
    return {"error": kind, "type": type(error).__name__, "message": text, "line": line}


def _load(program: str, module: types.ModuleType) -> Message:
    try:
        try:
            code = compile(program, "<program>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, OverflowError, RecursionError) as error:
            return {"error": "syntax", "message": str(error)[:300], "line": getattr(error, "lineno", None)}
        exec(code, module.__dict__)  # noqa: S102 (this is the sandbox)
    except BaseException as error:
        return _failure(error)
    return {"ok": None}


def _call(first: Message, module: types.ModuleType, message: Message) -> Message:
    tracer = _Tracer(first["program"]) if message.get("trace") else None
    arguments: Any = None
    try:
        entry = getattr(module, first["entry"], None)
        if entry is None:
            raise NameError(f"the program defines no `{first['entry']}`")
        arguments, keywords = decode(message["arguments"]), decode(message.get("keywords", {"d": []}))
        try:
            sys.settrace(tracer)
            result = entry(*arguments, **keywords)
        finally:
            sys.settrace(None)
        try:
            reply = {"ok": encode(result)}
        except TypeError as error:
            reply = {"error": "failed", "message": f"the entry returned what is no literal: {error}"}
    except BaseException as error:
        reply = _failure(error)
    if message["in_place"] and arguments is not None:
        try:
            now = encode([arguments, keywords])
            if now != [message["arguments"], message["keywords"]]:
                reply["arguments"] = now
        except BaseException as error:
            if "ok" in reply:
                reply = {"error": "failed", "message": f"the entry left what is no literal in its arguments: {error}"}
    return reply | ({"trace": tracer.visits, "full": tracer.full} if tracer else {})


def solve(first: Message, exchange: Exchange) -> NoReturn:
    """Hold a program and answer calls of its entry, until `exchange` ends the process."""
    module = sys.modules["program"] = types.ModuleType("program")
    message = exchange(_load(first["program"], module))
    while True:
        message = exchange(_call(first, module, message))


def _changed(held: Any, new: Any) -> Any:
    """`held` with the contents that a program has left in it, down to what it holds; `new` if that is another kind."""
    if isinstance(held, list) and type(new) is list:
        held[:] = [_changed(*pair) for pair in zip(held, new, strict=False)] + new[len(held) :]
    elif isinstance(held, tuple) and type(new) is tuple and len(held) == len(new):
        members = tuple(map(_changed, held, new))
        return held if members == held else members
    elif isinstance(held, dict) and type(new) is dict:
        now = {key: _changed(held.get(key), value) for key, value in new.items()}
        held.clear()
        held.update(now)
    elif isinstance(held, set) and type(new) is set:
        held.clear()
        held.update(new)
    else:
        return new
    return held


def check(first: Message, exchange: Exchange) -> NoReturn:
    """Run assertions, whose entry is a proxy for that of another process, until `exchange` ends this one."""
    raised: list[BaseException] = []

    def proxy(*arguments: object, **keywords: object) -> object:
        reply = exchange({"call": encode(arguments), "keywords": encode(keywords)})
        if "arguments" in reply:
            _changed([arguments, keywords], decode(reply["arguments"]))
        if "ok" in reply:
            return decode(reply["ok"])
        error = getattr(builtins, str(reply.get("type")), None)
        if not (isinstance(error, type) and issubclass(error, Exception)) or issubclass(error, _ENDS_ITERATION):
            error = RuntimeError
        # Not by a call: some, such as UnicodeDecodeError, take other arguments.
        raised[:] = [error.__new__(error, reply.get("message"))]
        raise raised[0]

    names: dict[str, object] = {"__name__": "tests"}
    message = {"assertion": first["preamble"]}
    while True:
        try:
            exec(compile(message["assertion"], "<tests>", "exec", dont_inherit=True), names)  # noqa: S102
            reply: Message = {"ok": None}
        except BaseException as error:
            reply = _failure(error) | {"of_entry": error in raised}
        names["candidate"] = names[first["entry"]] = proxy
        message = exchange(reply)


def script(first: Message, exchange: Exchange) -> NoReturn:
    """Run a program as a whole, and answer with what it prints and the end of its traceback."""
    output: Any = sys.stdout
    last = ""
    module = sys.modules["__main__"] = types.ModuleType("__main__")  # Its classes can be pickled.
    try:
        exec(compile(first["program"], "<code>", "exec", dont_inherit=True), module.__dict__)  # noqa: S102
    except (_TooMuchOutput, _TraceFull):
        last = "… (cut)"
    except SystemExit as error:  # Python prints a text with which a program leaves.
        last = "" if error.code is None or isinstance(error.code, int) else f"{error.code}\n"
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        last = "".join(traceback.format_exception(error, limit=-2, chain=False))
    exchange({"ok": output.getvalue() + last[-first["output"] :]})
    os._exit(0)


def serve(door: Door) -> NoReturn:
    """Take the role that the first message names."""

    def exchange(reply: Message) -> Message:
        text = door(json.dumps(reply).encode() if reply else b"")
        if not text:
            os._exit(0)
        message: Message = json.loads(text)
        return message

    first = exchange({})
    random.seed(0)  # In each process: Python seeds it anew after a fork.
    sys.stdout = sys.stderr = _Output(first["output"])
    {"solve": solve, "check": check, "script": script}[first["role"]](first, exchange)


def door_of(connection: int) -> Door:
    """A door whose messages and replies are lines of a connection."""
    messages = os.fdopen(connection, "rb", closefd=False)

    def door(reply: bytes) -> bytes:
        data = reply and reply + b"\n"
        while data:
            data = data[os.write(connection, data) :]
        return messages.readline()

    return door
