"""A way to isolate programs: in namespaces, and on cores that the trainer can spare."""

from dataclasses import dataclass

from grail_lightning import Bubblewrap, Isolation, ProcessSandbox, ProgramLimits, Sandbox


@dataclass(frozen=True)
class OnCores(Isolation):
    """Bubblewrap's isolation, on some of the cores.

    Args:
        cores: Their numbers, such as 0-3.
    """

    cores: str

    def open(self, limits: ProgramLimits) -> Sandbox:
        """A sandbox whose processes run on these cores alone."""
        command = ["taskset", "--cpu-list", self.cores, *Bubblewrap().command(limits)]
        return ProcessSandbox(command, limits)
