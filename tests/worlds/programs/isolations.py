"""Ways to isolate programs that are not of the package, which options name by their import paths."""

from dataclasses import dataclass

from grail_lightning.worlds.programs.isolation import Bubblewrap, Isolation
from grail_lightning.worlds.programs.process import ProcessSandbox, interpreter
from grail_lightning.worlds.programs.sandbox import Sandbox


class Bare(Isolation):
    """None: a program sees what this process sees, and is held by the filter of system calls alone."""

    def open(self, limits):
        """See `Isolation`."""
        return ProcessSandbox(interpreter(limits), limits)


@dataclass(frozen=True)
class Behind(Isolation):
    """A command that is not installed."""

    command: str = "no-such-command"

    def open(self, limits):
        """See `Isolation`."""
        return ProcessSandbox([self.command, *interpreter(limits)], limits)


@dataclass
class Changeable(Isolation):
    """A dataclass that is not frozen cannot be hashed."""

    cores: int = 1

    def open(self, limits):
        """See `Isolation`."""
        return Bubblewrap().open(limits)


class Numbered(Isolation):
    """Bubblewrap's sandboxes, with an option that is an attribute; no dataclass."""

    def __init__(self, number: int = 1) -> None:
        self.number = number

    def open(self, limits):
        """See `Isolation`."""
        return Bubblewrap().open(limits)


class Counting(Sandbox):
    """A sandbox of another kind: it counts the programs that one of this machine runs for it."""

    programs = 0

    def __init__(self, limits):
        super().__init__(limits)
        self._inner = Bubblewrap().open(limits)

    def begin(self, message):
        """See `Sandbox`."""
        Counting.programs += 1
        return self._inner.begin(message)

    def ask(self, message, more=0):
        """See `Sandbox`."""
        return self._inner.ask(message, more)

    def end(self):
        """See `Sandbox`."""
        self._inner.end()

    def close(self):
        """See `Sandbox`."""
        self._inner.close()


@dataclass(frozen=True)
class Counted(Isolation):
    """Sandboxes that count."""

    def open(self, limits):
        """See `Isolation`."""
        return Counting(limits)
