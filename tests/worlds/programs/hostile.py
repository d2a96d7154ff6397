"""Programs that attack the grader. Each should return its argument plus one, and does so only if its attack succeeds.

Those that are one expression stand in the first table, each with a name and the statuses that it may end with, none of
which is `passed`; the modules that it names are imported. A line `## name: statuses` begins each of the others.
"""

import re
import sys

_EXPRESSIONS = """
endless loop in C: timeout | sum(iter(int, 1))
endless generator: timeout memory | max(itertools.count())
power of powers: timeout memory | 10**10**9
large factorial: timeout memory | math.factorial(10**9) and x + 1
digits of a large number: timeout raised | int("9" * 4000)**100000 and str(7**10**8) and x + 1
catastrophic regular expression: timeout | re.match("(a+)+$", "a" * 60 + "b") or x + 1
sleep: timeout raised failed | [time.sleep(1000)] and -1
block the timer: raised timeout | [signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))] and x + 1
stop the timer: raised timeout | [signal.setitimer(signal.ITIMER_PROF, 0)] and x + 1
raise the limits: raised | [resource.setrlimit(resource.RLIMIT_CPU, (1000, 1000))] and x + 1
memory in one piece: memory raised | len(bytearray(10**9)) and x + 1
map memory: memory raised | len(mmap.mmap(-1, 10**9)) and x + 1
recursion: raised | f(x)
null pointer: crashed raised | ctypes.string_at(0) and x + 1
call the kernel by ctypes: raised failed crashed | x + 1 if ctypes.CDLL(None).socket(1, 1, 0) >= 0 else -1
run a command by ctypes: failed raised crashed | x + 1 if ctypes.CDLL(None).system(b"true") == 0 else -1
large result: output | "x" * 10**7
integer that cannot be shown: failed | 10**6000
subprocess: raised | [subprocess.run(["/bin/true"])] and x + 1
shell: failed raised | x + 1 if os.system("true") == 0 else -1
replace the process: raised crashed | os.execv(sys.executable or "/usr/bin/python3", ["python3", "-c", "print(4)"])
kill the parent: raised | [os.kill(os.getppid(), 9)] and x + 1
kill all: raised | [os.kill(-1, 9)] and x + 1
kill itself: raised crashed | os.kill(os.getpid(), signal.SIGSEGV)
leave the group: raised | [os.setsid()] and x + 1
trace the parent: failed raised crashed | x + 1 if ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0 else -1
socket: raised | [socket.create_connection(("127.0.0.1", 80), 1)] and x + 1
datagram: raised | [socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 53))] and x + 1
UNIX socket: raised | [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)] and x + 1
pair of sockets: raised | [socket.socketpair()] and x + 1
look up a name: raised | socket.gethostbyname("example.com") and x + 1
read a file of the system: raised | open("/etc/passwd").read() and x + 1
read the grader: raised | open("{grader}").read() and x + 1
read an installed package: raised | open("{package}").read() and x + 1
read a package of the interpreter: raised | open("{base_package}").read() and x + 1
read the memory of the parent: raised | open(f"/proc/{os.getppid()}/mem", "rb") and x + 1
read its own command: raised | open("/proc/self/cmdline").read() and x + 1
list processes: raised | os.listdir("/proc") and x + 1
write a file: raised | [open("left", "w").write("x")] and x + 1
write outside: raised | [open("{canary}", "w").write("x")] and x + 1
remove a file: raised | [os.remove("{canary}")] and x + 1
write to the standard library: raised | [open(os.__file__, "a").write("x")] and x + 1
hidden file in memory: raised | os.memfd_create("x") and x + 1
environment: failed raised | x + 1 if os.environ else -1
leave with success: raised | sys.exit(0)
leave at once: crashed timeout | os._exit(0)
abort: crashed | os.abort()
print the marker of success: failed | print("passed", 4, '{"ok": 4}')
not a number: failed | float("nan")
hash collisions: timeout failed output | {i * (2**61 - 1): i for i in range(20000)} and -1
leave with the status that ends the sandbox: crashed | os._exit(77)
leave with the status of a filter that failed: crashed | os._exit(78)
bytes: failed | b"4"
close the connection: crashed raised failed | [os.close(3)] and -1
read what others would read: raised failed | input() or x + 1
raise a signal: raised crashed | [signal.raise_signal(signal.SIGKILL)] and x + 1
alarm: failed raised | signal.alarm(1) or signal.pause()
load into the interpreter of the grader: raised crashed | ctypes.pythonapi.Py_Exit(0)
ignore the timer: raised timeout | [signal.signal(signal.SIGPROF, signal.SIG_IGN)] and max(itertools.count())
memory in many pieces: memory timeout crashed | [str(n) + "x" * 100000 for n in itertools.count()]
recursion without a limit: crashed raised memory timeout | [sys.setrecursionlimit(10**9)] and [f(x)]
flood the output: output | any(print("x" * 1000) for _ in itertools.count())
fork: raised | x + 1 if os.fork() else os._exit(0)
fork bomb: raised | all(os.fork() >= 0 for _ in itertools.count())
threads: raised | [threading.Thread(target=print).start()] and x + 1
read by a link: raised | [os.symlink("/etc/passwd", "link")] and open("link").read() and x + 1
make folders without end: raised | [os.mkdir("d") or os.chdir("d") for _ in range(10**6)] and x + 1
secrets of the environment: raised failed | x + 1 if any(map(ctypes.CDLL(None).getenv, (b"HOME", b"PATH"))) else -1
one byte at a time: output raised timeout | all(os.write(3, b"x") for _ in itertools.count())
one byte at a time, slowly: timeout raised | all(os.write(3, b"x") and not time.sleep(0.05) for _ in itertools.count())
close all and go on: timeout raised | [os.closerange(0, 64)] and max(itertools.count())
exhaust descriptors: raised timeout crashed | all(os.dup(5) for _ in itertools.count())
a watchdog of its own: raised | [faulthandler.dump_traceback_later(0.1, exit=True)] and max(itertools.count())
trace nothing: failed | [sys.settrace(lambda *a: None)] and sys.settrace(None)
result that holds itself: failed | (lambda held: [held.append(held)] and held)([])
wait for a lock: timeout crashed | (lambda lock: lock.acquire() and lock.acquire())(threading.Lock()) and x + 1
"""
_TEXT = """
## endless loop: timeout
def f(x):
    while True: pass
## endless loop while loading: timeout
while True: pass
## endless loop that catches everything: timeout
def f(x):
    while True:
        try:
            while True: pass
        except BaseException: pass
## read the pipe dry: timeout refused crashed raised
import os
def f(x):
    for fd in range(3, 10):
        while os.read(fd, 1): pass
    return x + 1
## memory by recursion of lists: memory timeout
def f(x):
    held = []
    while True: held = [held, held[:], [0] * 100000]
## memory that is caught: memory timeout crashed
def f(x):
    held = []
    while True:
        try:
            while True: held.append(bytearray(10**6))
        except MemoryError: pass
## memory while compiling: syntax memory timeout raised crashed
exec("x = " + "(" * 100000)
def f(x): return x + 2
## deep nesting: syntax memory timeout raised crashed
x = {nested}
def f(x): return x + 2
## broken byte code: crashed raised timeout memory
def f(x): return x + 1
f.__code__ = f.__code__.replace(co_code=bytes(range(64)) * 4)
## flood the output under the counter: timeout raised crashed output
import os
def f(x):
    while True: os.write(1, b"x" * 65536)
## flood the output and choose the status: output
def f(x):
    try: print("x" * 10**6)
    except BaseException as error:
        error.args = ("syntax", "of my own")
        raise
## flood the output and raise the limit anew: output
def f(x):
    try: print("x" * 10**6)
    except BaseException as error: raise type(error)()
## flood the pipe: timeout output crashed refused raised
import os
def f(x):
    for fd in range(3, 10):
        try:
            while True: os.write(fd, b"\\xff" * 65536)
        except OSError: pass
    raise ValueError
## endless result: memory timeout failed
def f(x):
    class Endless(list):
        def __iter__(self):
            while True: yield 0
    return [Endless([0])]
## list the home folder: raised failed
import os
def f(x): return len(os.listdir("{home}")) and x + 1 if os.path.isdir("{home}/..") and open("{home}/.profile") else -1
## shared memory: raised
from multiprocessing import shared_memory
def f(x): return shared_memory.SharedMemory(create=True, size=100) and x + 1
## leave with success while loading: raised
raise SystemExit(0)
## leave at the end: raised failed
import atexit
atexit.register(print, 4)
def f(x): raise ValueError
## equal to all: failed
class Yes:
    def __eq__(self, other): return True
def f(x): return Yes()
## integer that is equal to all: failed
class Yes(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def f(x): return Yes(7)
## list that is equal to all: failed
class Yes(list):
    def __eq__(self, other): return True
def f(x): return Yes([7])
## string with a class of its own: failed
class Yes(str): __class__ = int
def f(x): return Yes(4)
## change the builtins: crashed failed raised
import builtins
builtins.isinstance = builtins.len = builtins.type = lambda *a: True
def f(x): return object
## change JSON: failed raised refused crashed
import json
json.dumps = lambda *a, **k: '{"ok": 5, "error": "", "passed": true, "status": "passed"}'
def f(x): return 5
## answer in the grader's place: failed refused crashed output timeout
import os
for fd in range(10):
    try: os.write(fd, b'{"ok": "yes"}\\n')
    except OSError: pass
def f(x): return 5
## answer in no form: refused raised timeout crashed
import json
json.dumps = lambda *a, **k: "[[[" * 1000
def f(x): return 4
## answer nested deeply: output refused raised
import json
json.dumps = lambda *a, **k: "[" * 5000 + "]" * 5000
def f(x): return 4
## read the tests in memory: failed
import gc, sys
def f(x):
    frame, seen = sys._getframe(), []
    while frame:
        seen += [value for value in frame.f_locals.values() if type(value) is dict]
        frame = frame.f_back
    found = [held for held in gc.get_objects() + seen if type(held) is dict and ("result" in held or "calls" in held)]
    return x + 1 if any(held.get("result") == 4 or held.get("calls") for held in found) else -1
## rewrite the harness: failed raised crashed refused
import sys
for module in list(sys.modules.values()):
    for name in ("encode", "decode", "serve", "solve", "check"):
        if hasattr(module, name): setattr(module, name, lambda *a: {"ok": True, "passed": True})
def f(x): return None
## replace the caller: failed raised
import sys
def f(x):
    frame = sys._getframe().f_back
    while frame:
        for name, held in frame.f_globals.items():
            if name in ("_call", "_load", "_failure"): frame.f_globals[name] = lambda *a: {"ok": True}
        frame = frame.f_back
## exception with a text of its own: raised timeout
class Bad(Exception):
    def __str__(self): raise KeyboardInterrupt
def f(x): raise Bad
## exception without end: timeout
class Bad(Exception):
    def __str__(self):
        while True: pass
def f(x): raise Bad
## line feeds and escapes in the message: raised
def f(x): raise ValueError("\\x1b[2J\\n\\npassed\\n" * 1000)
## pickle: raised failed
import pickle
class Run:
    def __reduce__(self): return (open, ("/etc/passwd",))
def f(x): return pickle.loads(pickle.dumps(Run())) and x + 1
## change the arguments: failed
def f(x, *rest): return rest
## null byte: syntax
def f(x): return "\\0"\0
## lone surrogate: syntax raised failed
def f(x): return "\ud800"
## collector that never ends: timeout
class Last:
    def __del__(self):
        while True: pass
def f(x): return [Last()] and x + 1
## return from a signal that was none, which blocks the timer: crashed raised
import ctypes, mmap, struct
def f(x):
    code, memory = b"", mmap.mmap(-1, 8192, prot=7)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    stores = {4: b"L\\x89\\xa7", 5: b"L\\x89\\xaf", 6: b"L\\x89\\xb7", 7: b"L\\x89\\xbf"}
    stores |= {10: b"H\\x89\\xaf", 11: b"H\\x89\\x9f", 15: b"H\\x89\\xa7"}
    for place, store in stores.items(): code += store + struct.pack("<i", 40 + 8 * place)
    memory[:] = (code + b"H\\x89\\xfc\\xb8\\x0f\\0\\0\\0\\x0f\\x05\\xc3").ljust(8192, b"\\0")
    for place, word in {16: base + len(code) + 10, 17: 0x202, 18: 0x33 | 0x2b << 48, 32: 2**64 - 1}.items():
        struct.pack_into("<Q", memory, 4096 + 40 + 8 * place, word)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(base)(base + 4096)
    while True: pass
## advice about memory that only root may give: failed raised
import ctypes, mmap
def f(x):
    memory = mmap.mmap(-1, 4096)
    base = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    return x + 1 if any(ctypes.CDLL(None).madvise(base, 4096, advice) == 0 for advice in (12, 101)) else -1
## call the kernel as a 32-bit program: crashed raised
import ctypes, mmap
def f(x):
    memory = mmap.mmap(-1, 4096, prot=7)
    memory.write(b"\\xb8\\x02\\0\\0\\0\\xcd\\x80\\xc3")
    return x + 1 if ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))() >= 0 else -1
## call the kernel with numbers of x32: crashed failed raised
import ctypes
def f(x): return x + 1 if ctypes.CDLL(None).syscall(0x40000000 + 57) >= 0 else -1
## rarer calls of the kernel: failed raised
import ctypes
def f(x): return x + 1 if any(ctypes.CDLL(None).syscall(n, 0, 0, 0) >= 0 for n in (425, 323, 319, 434, 272, 58)) else -1
## overwrite the stack: crashed raised
import ctypes
def f(x):
    held = ctypes.create_string_buffer(1)
    return ctypes.memset(ctypes.addressof(held) - 4096, 65, 1 << 22) and x + 1
## exception whose class has no name: crashed raised
class M(type):
    @property
    def __name__(self): raise KeyboardInterrupt
class Bad(Exception, metaclass=M): pass
def f(x): raise Bad
## exception whose name is an answer: raised
class M(type):
    @property
    def __name__(self): return {"ok": 4}
class Bad(Exception, metaclass=M): pass
def f(x): raise Bad
## text that is an answer: raised
class Text(str):
    def __getitem__(self, key): return {"ok": 4}
class Bad(Exception):
    def __str__(self): return Text("x")
def f(x): raise Bad
## exception with arguments of its own: raised
def f(x): raise UnicodeDecodeError("a", b"b", 1, 2, "c")
## group of exceptions: raised
def f(x): raise ExceptionGroup("a", [ValueError()])
## object that says that it is a list: failed
class Yes:
    __class__ = list
    def __iter__(self): yield x
def f(x): return Yes()
## dictionary with items of its own: failed
class Yes(dict):
    def items(self): return [(1, 4)]
def f(x): return Yes(a=4)
## hash and index of its own: failed
class Yes:
    def __hash__(self): return 4
    def __index__(self): return 4
    __int__ = __index__
def f(x): return {Yes(): Yes()}
## a name that looks alike: raised
def \u0192(x): return x + 1
## send a file through the connection: raised
import array, socket
def f(x): return socket.socket(fileno=3).sendmsg([b"x"], [(1, 1, array.array("i", [3]))]) and x + 1
## loop of events: raised timeout
import asyncio
async def endless():
    while True: await asyncio.sleep(0)
def f(x): asyncio.run(endless())
## collector that keeps all: failed timeout memory
import gc
def f(x):
    gc.set_debug(gc.DEBUG_SAVEALL)
    return [gc.set_threshold(1)] and [[gc.collect()] * 3 and -1]
"""


def _program(expression):
    modules = sorted({*re.findall(r"\b([a-z]+)\.", expression)} & sys.stdlib_module_names)
    return "".join(f"import {name}\n" for name in modules) + f"def f(x): return {expression}\n"


HOSTILE = {
    name: (_program(expression), frozenset(statuses.split()))
    for name, statuses, expression in re.findall(r"^(.*?): (.*?) \| (.*)$", _EXPRESSIONS, re.M)
} | {
    name: (source, frozenset(statuses.split()))
    for name, statuses, source in re.findall(r"^## (.*?): (.*?)\n(.*?)(?=^## |\Z)", _TEXT, re.M | re.S)
}
