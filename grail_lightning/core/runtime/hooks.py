"""The hooks of a run, in which no code of the user's ends the run without a message."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from grail_lightning.core.runtime.guard import ends_silently, explained, said, silent_end

_KINDS = ("[Callback]", "[LightningModule]", "[LightningDataModule]", "[Strategy]")


def adapt_trainer(trainer: Trainer) -> None:
    """Guard the hooks of a run, and let batches pass as they are."""
    of_run: Any = trainer  # Lightning does not declare its profiler.
    of_run.profiler = GuardedHooks(of_run.profiler)
    # Lightning's conversion (FSDP, double) refuses the frozen records in a batch. It has no hook for this.
    trainer.precision_plugin.convert_input = lambda data: data  # type: ignore[method-assign]


class GuardedModule(LightningModule):
    """A module in whose runs no hook ends the run without a message, from `prepare_data` on."""

    def configure_callbacks(self) -> Sequence[Callback] | Callback:
        """Guard the hooks: no other hook that the module has is called before those of callbacks and data modules."""
        adapt_trainer(self.trainer)
        return super().configure_callbacks()


class GuardedHooks:
    """A Lightning profiler, in whose contexts what ends a run without a message becomes a `ValueError`.

    Lightning calls the hooks of callbacks, modules, data modules and strategies within ``profile("[Kind]name")``. An
    error in ``on_exception`` becomes a warning, since the error before it is the one that has ended the run.
    """

    def __init__(self, profiler: Any) -> None:
        vars(self)["given"] = profiler.given if isinstance(profiler, GuardedHooks) else profiler

    def __getattr__(self, name: str) -> Any:
        if name == "given":  # Of a copy that is being made.
            raise AttributeError(name)
        return getattr(self.given, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.given, name, value)

    @contextmanager
    def profile(self, action: str) -> Iterator[str]:
        """See `lightning.pytorch.profilers.Profiler`."""
        is_hook = action.startswith(_KINDS)
        # Behind the kind there is the class, perhaps with options in braces, and the hook.
        called = f"`{'.'.join(re.sub('{.*}', '', action).rpartition(']')[2].split('.')[-2:])}`" if is_hook else "A loop"

        def ends(error: BaseException) -> bool:
            # Lightning's own loops end with a `StopIteration`.
            return ends_silently(error) and (is_hook or not isinstance(error, Exception))

        try:
            with explained(lambda error: silent_end(error, called), ends), self.given.profile(action):
                yield action
        except Exception as error:
            if not (is_hook and action.endswith(".on_exception")):
                raise
            rank_zero_warn(f"{called} failed ({said(error)}), after the error that has ended the run.")
