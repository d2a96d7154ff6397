"""The callback that saves the resolved config of each subcommand with the run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from grail_lightning.runtime.run_folder import RunFolder, unused


class SaveRunConfig(SaveConfigCallback):
    """Saves the resolved config with the run, in one file for each subcommand.

    An earlier file with other options is kept under a number. A resumed run replaces the config only after its
    checkpoint has been loaded.
    """

    begin: Callable[[], None] | None = None
    """Called first in `setup`, which runs after that of all callbacks that check something."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save the config, except in a resumed fit. Lightning calls this for every stage."""
        if self.begin is not None:
            self.begin()
        name = "config.yaml" if stage == "fit" else f"config_{TrainerFn(stage).value}.yaml"
        self._file = RunFolder(trainer).path / name
        if stage != "fit" or self.config.get("ckpt_path") is None:
            super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the config of a resumed run, and report the options that have changed."""
        if not self.already_saved:
            options = yaml.safe_load(self.parser.dump(self.config))
            tell_changes(self._file, options)
            super().setup(trainer, pl_module, "fit")

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the file. Lightning calls this on the first rank."""
        text = self.parser.dump(self.config, skip_none=False)
        if stage != "fit" and self._file.exists() and self._file.read_text() != text:
            shutil.copy(self._file, unused(self._file))
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(text)


@rank_zero_only
def tell_changes(saved: Path, options: dict[str, Any]) -> None:
    """Log the options that differ from those of the saved file, and keep that file under a number."""
    if not saved.is_file():
        return
    before, after = (dict(flat(tree)) for tree in (yaml.safe_load(saved.read_text()), options))
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    changed = [f"{name}: {before.get(name)} -> {after.get(name)}" for name in names if not name.startswith("ckpt_path")]
    if changed:
        kept = unused(saved)
        shutil.copy(saved, kept)
        rank_zero_info(f"Resuming with other options than {kept}: {'; '.join(changed)}")


def flat(tree: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """Nested options as dotted names and values."""
    if not isinstance(tree, dict):
        yield name, tree
        return
    for key, value in tree.items():
        yield from flat(value, f"{name}.{key}" if name else str(key))
