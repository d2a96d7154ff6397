"""What runs inside of a sandbox: it calls the entry of a program with literals and returns data.

The standard library alone is imported, for its text is given to an interpreter in the sandbox (`python -c`). Two roles:

- ``solve`` holds the program. It gets the arguments of one test at a time, never what is expected.
- ``check`` holds the assertions of a problem, which contain what is expected, and no program: the entry that they call
  is a proxy, whose arguments go to the process that solves, and whose result comes back as data.

A program can read and change all that is in its process, so nothing that it says is trusted: the other side of the pipe
reads it as JSON of limited length.
"""

import builtins
import json
import os
import reprlib
import sys
import types

MAX_DEPTH = 40
MAX_VISITS = 1000
_TRACE_CHARACTERS = 200_000
_DECIMAL_BITS = 4096  # Longer integers go as hexadecimal: Python limits decimal digits.
_NO_MORE = 77  # The exit status of a child that found the pipe closed.


def encode(value, depth=0):
    """A literal as JSON data; TypeError if it is none. Subclasses of containers are taken as their contents."""
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if kind is int:
        return value if value.bit_length() <= _DECIMAL_BITS else {"i": hex(value)}
    if depth == MAX_DEPTH:
        raise TypeError(f"a value nested deeper than {MAX_DEPTH}")
    for base, key in ((list, ""), (tuple, "t"), (set, "s"), (frozenset, "s")):
        if isinstance(value, base):
            items = [encode(item, depth + 1) for item in base.__iter__(value)]
            return {key: items} if key else items
    if isinstance(value, dict):
        return {"d": [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in dict.items(value)]}
    raise TypeError(f"{kind.__name__} is no literal")


def decode(data, depth=0):
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
        if key == "d":
            return {decode(k, depth + 1): decode(v, depth + 1) for k, v in items}
        return {"t": tuple, "s": set}[key](decode(item, depth + 1) for item in items)
    except (TypeError, KeyError) as error:  # also what cannot be hashed
        raise ValueError("data that stand for no literal") from error


class _OutputLimitError(BaseException):
    """A program printed more than it may; no `except Exception` of it catches this."""


class _TraceEndError(BaseException):
    """A trace is full. A traced run ends here, for one that does not end by itself is killed with its trace."""


class _Output:
    """Counts what a program prints, and keeps none of it."""

    encoding = "utf-8"

    def __init__(self, limit):
        self.left = limit

    def write(self, text):
        """Take the text off what is left."""
        self.left -= len(text)
        if self.left < 0:
            raise _OutputLimitError
        return len(text)

    def flush(self):
        """Nothing is kept."""


class _Canonical(reprlib.Repr):
    """Values of a trace: literals with sets and dictionaries sorted, other objects by their types, never an address."""

    def __init__(self):
        super().__init__()
        self.maxlevel, self.maxstring, self.maxlong, self.maxother = 6, 200, 200, 200
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = self.maxfrozenset = 100

    def repr_instance(self, x, level):
        """A float, a bool and None by what they are; anything else by its type."""
        return repr(x) if x is None or type(x) in (bool, float) else f"<{type(x).__name__}>"

    repr_bool = repr_float = repr_NoneType = repr_instance  # noqa: N815 (reprlib's own scheme of names)


class Tracer:
    """Which statements one call of the entry executed: line, kind of event, local names and their values."""

    def __init__(self, source):
        import ast

        self.first = {}  # line → first line of the innermost statement that holds it
        for node in ast.walk(ast.parse(source)):  # breadth first: what is inside comes later
            if isinstance(node, ast.stmt):
                self.first.update(dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), node.lineno))
        self.visits = []
        self.left = _TRACE_CHARACTERS
        self._show = _Canonical().repr
        self._inside = {}  # frame → the statement of several lines that it is in
        self._raising = set()  # frames in which an exception was raised and no statement followed

    def __call__(self, frame, event, argument):
        """The function of `sys.settrace`: comprehensions and lambdas are parts of statements."""
        code = frame.f_code
        return self._trace if code.co_filename == "<program>" and not code.co_name.startswith("<") else None

    def _trace(self, frame, event, argument):
        line = self.first.get(frame.f_lineno, frame.f_lineno)
        if event == "line":
            self._raising.discard(frame)
            within = self._inside.get(frame) == line
            self._inside[frame] = line if frame.f_lineno != line else None
            if not within:
                self._keep(line, "line", frame, None)
        elif event == "exception" and argument[0] is not StopIteration:  # with which `for` ends
            self._raising.add(frame)
            self._keep(line, "raise", frame, argument[0].__name__)
        elif event == "return":
            self._inside.pop(frame, None)
            if frame in self._raising:  # left by the exception
                self._raising.discard(frame)
            else:
                self._keep(line, "return", frame, self._show(argument))
        return self._trace

    def _keep(self, line, event, frame, value):
        if len(self.visits) == MAX_VISITS or self.left <= 0:
            sys.settrace(None)
            frame.f_trace = None
            raise _TraceEndError
        names = sorted((name, self._show(held)) for name, held in frame.f_locals.items() if not name.startswith("."))
        self.left -= sum(len(name) + len(held) for name, held in names) + len(value or "") + 20
        self.visits.append([line, event, names, value])


def _failure(error):
    """An exception as data: its kind, its text and the line of the program where it was raised."""
    if isinstance(error, _OutputLimitError):
        return {"error": "output", "message": "printed more than it may"}
    if isinstance(error, _TraceEndError):
        return {"error": "trace", "message": "the trace is full"}
    if isinstance(error, MemoryError):
        return {"error": "memory", "message": "MemoryError"}
    line, step = None, error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == "<program>":
            line = step.tb_lineno
        step = step.tb_next
    try:
        text = str(error)[:300]
    except BaseException:  # noqa: BLE001 (text of an exception of the program's own)
        text = ""
    return {"error": "raised", "type": type(error).__name__, "message": text, "line": line}


def _load(first, module):
    """Compile and run a program; the reply."""
    try:
        code = compile(first["program"], "<program>", "exec", dont_inherit=True)
    except MemoryError:
        return {"error": "memory", "message": "MemoryError in the compiler"}
    except (SyntaxError, ValueError, OverflowError, RecursionError) as error:
        return {"error": "syntax", "message": str(error)[:300], "line": getattr(error, "lineno", None)}
    try:
        exec(code, module.__dict__)  # noqa: S102 (this is the sandbox)
    except BaseException as error:  # noqa: BLE001
        return _failure(error)
    return {"ok": None}


def _call(first, module, message):
    """Call the entry; the reply, with the trace if it is asked for."""
    tracer = Tracer(first["program"]) if message.get("trace") else None
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
            reply = {"error": "value", "message": f"the entry returned {error}"}
    except BaseException as error:  # noqa: BLE001
        reply = _failure(error)
    if tracer is not None:
        reply["trace"] = tracer.visits
    return reply


def solve(first, exchange):
    """Hold a program and answer calls of its entry, until told to end."""
    module = types.ModuleType("program")
    sys.modules["program"] = module
    sys.stdout = sys.stderr = _Output(first["output"])
    message = exchange(_load(first, module))
    while "arguments" in message:
        message = exchange(_call(first, module, message))


def check(first, exchange):
    """Run assertions, whose entry is a proxy for that of another process, until told to end."""

    def proxy(*arguments, **keywords):
        reply = exchange({"call": encode(arguments), "keywords": encode(keywords)})
        if "ok" in reply:
            return decode(reply["ok"])
        error = getattr(builtins, reply.get("type", ""), None)
        known = isinstance(error, type) and issubclass(error, Exception)
        raise (error if known else RuntimeError)(reply.get("message", ""))

    names = {"__name__": "tests"}
    sys.stdout = sys.stderr = _Output(first["output"])
    message = {"assertion": first["preamble"]}
    while "assertion" in message:
        try:
            exec(compile(message["assertion"], "<tests>", "exec", dont_inherit=True), names)  # noqa: S102 (in the sandbox)
            reply = {"ok": None}
        except BaseException as error:  # noqa: BLE001
            reply = _failure(error)
        names["candidate"] = names[first["entry"] or "candidate"] = proxy
        message = exchange(reply)


def serve(exchange):
    """Take the role that the first message names."""
    first = exchange({"ready": True})
    {"solve": solve, "check": check}[first["role"]](first, exchange)


def _read(source, length):
    data = b""
    while len(data) < length:
        part = os.read(source, length - len(data))
        if not part:
            os._exit(_NO_MORE)
        data += part
    return data


def _exchange_over(source, sink):
    """Messages over pipes: four bytes with the length, then JSON. The first reply is not sent: nobody asked yet."""

    def exchange(reply):
        if "ready" not in reply:
            data = json.dumps(reply).encode()
            data = len(data).to_bytes(4, "big") + data
            while data:
                data = data[os.write(sink, data) :]
        return json.loads(_read(source, int.from_bytes(_read(source, 4), "big")))

    return exchange


def _confine(config, libc):
    """Limits of this process, then the filter of system calls, both for good."""
    import ctypes
    import resource
    import signal

    seconds = int(config["seconds"]) + 1
    memory = config["memory_mb"] + 64 << 20  # the interpreter's own, besides
    for name, limit in {"CPU": seconds, "AS": memory, "CORE": 0, "FSIZE": 0, "NOFILE": 32}.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: no program outlives the process that started it
    # The program cannot take this timer back, nor catch or block its signal: the filter has none of the calls for it.
    signal.setitimer(signal.ITIMER_PROF, config["seconds"])
    code = bytes.fromhex(config["filter"])
    buffer = ctypes.create_string_buffer(code, len(code))
    pointer = ctypes.c_void_p(ctypes.addressof(buffer))

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    if libc.prctl(22, 2, ctypes.byref(Filter(len(code) // 8, pointer)), 0, 0):  # PR_SET_SECCOMP
        os._exit(78)


def main(config):
    """Fork a confined child for each program; after each, write its status to the third pipe, which no child has."""
    import ctypes

    for name in config["preload"]:
        __import__(name)
    sys.modules["random"].seed(0)
    os.environ.clear()
    libc = ctypes.CDLL(None)
    nowhere = os.open("/dev/null", os.O_RDWR)
    libc.prctl(1, 9, 0, 0, 0)
    os.write(2, b"ready\n")
    status = 0
    while status != _NO_MORE << 8:
        child = os.fork()
        if child == 0:
            source, sink = os.dup(0), os.dup(1)
            for standard in range(3):
                os.dup2(nowhere, standard)
            os.close(nowhere)
            _confine(config, libc)
            serve(_exchange_over(source, sink))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        os.write(2, b"%d\n" % status)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
