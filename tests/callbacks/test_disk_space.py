"""The sizes that are compared with the free space are those of the files that a run writes."""

import shutil
from collections import namedtuple

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from grail_lightning.callbacks import Evaluation, ExportPolicy, LastCheckpoint, Preflight
from grail_lightning.callbacks.disk_space import _bytes, _files, _warning, check_disk_space
from grail_lightning.credit import PRIME
from grail_lightning.policy import Loading, LoRA, load_policy
from grail_lightning.runtime.writable import in_units
from tests.runs import batches, module, trainer

SMALL_PARTS = 150_000  # Names, states of callbacks and loops, and torch's alignment.
RUNS = {
    "float32": {},
    "halves with masters": {"loading": Loading(dtype="bfloat16")},
    "halves without masters": {"loading": Loading(dtype="bfloat16", master_weights=False)},
    "adapters": {"loading": Loading(lora=LoRA(rank=4))},
    "plain SGD": {"optimizer": lambda p: torch.optim.SGD(p, lr=1e-4)},
    "second model": {"credit": PRIME(optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4))},
}


@pytest.fixture
def files(tmp_path):
    """A function from a module to what is expected of its run, by kind, with the folder of what it wrote."""

    def run(pl_module):
        steps = ModelCheckpoint(dirpath=tmp_path / "weights", save_weights_only=True, filename="weights")
        last, export = LastCheckpoint(folder=str(tmp_path)), ExportPolicy(folder=str(tmp_path / "export"))
        fit = trainer(2, export, steps, last, default_root_dir=tmp_path, enable_checkpointing=True)
        fit.fit(pl_module, batches(2))
        return {file.name: file for file in _files(fit, pl_module)}

    return run


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
@pytest.mark.filterwarnings("ignore:.*cannot take a step of the learning rate")
def test_sizes_are_those_of_the_files(options, files, tmp_path):
    found = files(module(**options))
    written = {
        "last": tmp_path / "last.ckpt",
        "checkpoint": tmp_path / "weights" / "weights.ckpt",
        "export": tmp_path / "export" / "model.safetensors",
    }
    for name, file in written.items():
        assert found[name].size == pytest.approx(file.stat().st_size, abs=SMALL_PARTS, rel=0.01), name
        assert (found[name].missing, found[name].folder.exists()) == (0, True)


Disk = namedtuple("Disk", "total used free")
PARAMETERS = [p.numel() for p in load_policy("arithmetic").parameters()]
CHECKPOINT = sum(3 * 4 * size + 4 for size in PARAMETERS)  # Weights, two moments and a counter, in float32.


@pytest.mark.parametrize(
    ("free", "said"),
    [
        (CHECKPOINT - 1, "refused"),
        (CHECKPOINT, "up to 29 MiB more"),
        (3 * CHECKPOINT - 1, "up to 29 MiB more"),
        (3 * CHECKPOINT, None),
    ],
)
def test_what_is_missing_is_compared_with_what_is_free(free, said, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Disk(0, 0, free))
    best = ModelCheckpoint(dirpath=tmp_path, monitor="val/accuracy", mode="max", filename="best")
    export, last = ExportPolicy(folder=str(tmp_path / "export")), LastCheckpoint(folder=str(tmp_path))
    fit = trainer(
        1, Evaluation(), export, best, last, default_root_dir=tmp_path, enable_checkpointing=True, limit_val_batches=1
    )
    pl_module = module()

    class Ask(Preflight):
        warned = "not asked"

        def on_train_batch_end(self, trainer, pl_module, *_):
            self.warned = check_disk_space(trainer, pl_module)

    fit.callbacks.insert(0, ask := Ask())
    if said == "refused":
        with pytest.raises(ValueError, match=r"takes 9\.67 MiB, but .* has 9\.67 MiB free"):
            fit.fit(pl_module, batches(1), batches(1))
        assert not list(tmp_path.glob("*.ckpt"))
        return
    fit.fit(pl_module, batches(1), batches(1))
    assert (ask.warned is None) == (said is None)
    assert said is None or said in ask.warned
    # Nothing is missing after the run, so that a checkpoint's replacement is all that is needed.
    assert _warning(list(_files(fit, pl_module))) is None or free < CHECKPOINT


def test_a_run_is_refused_whatever_its_optimizer_keeps(tmp_path, monkeypatch):
    """Plain SGD never has a state."""
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Disk(0, 0, 1000))
    fit = trainer(1, Preflight(), LastCheckpoint(folder=str(tmp_path)), enable_checkpointing=True)
    with pytest.raises(ValueError, match=r"takes 3\.22 MiB, but .* has 0\.977 KiB free"):
        fit.fit(module(**RUNS["plain SGD"]), batches(1))


class _Quantised(torch.Tensor):
    """A tensor in the manner of torchao: it stands for float32 and keeps one byte an element, and a scale for 4."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], []

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


def test_quantised_states_count_what_they_keep():
    assert _bytes([_Quantised(torch.zeros(8, dtype=torch.uint8), torch.zeros(2)), torch.zeros(3)]) == 8 + 8 + 12


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (10_140_672, "9.67 MiB"),
        (1023 * 2**20, "1023 MiB"),
        (2**30, "1 GiB"),
        (3 * 2**40, "3 TiB"),
        (500, "0.488 KiB"),
        (150_000, "146 KiB"),
    ],
)
def test_sizes_are_readable(size, said):
    assert in_units(size) == said
