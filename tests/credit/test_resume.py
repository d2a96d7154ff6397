"""A resumed run equals one that never stopped, also where the credit method remembers something."""

import lightning.pytorch as pl
import pytest
import torch

from grail_lightning.credit import RLSD, Product, TreeAdvantage, Uniform, WarmUp
from grail_lightning.data import ArithmeticData
from tests.runs import module, trainer, weights


class _Save(pl.Callback):
    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


CASES = {
    "between two refreshes of the teacher": (lambda: RLSD(refresh_steps=4), 64),
    "a teacher inside of other methods": (lambda: Product(Uniform(), WarmUp(RLSD(refresh_steps=4), 2)), 64),
    "values of prompts that come again": (lambda: TreeAdvantage(memory=10_000), 8),
}


@pytest.mark.parametrize(("credit", "num_train"), CASES.values(), ids=CASES)
def test_a_resumed_run_ends_with_the_same_weights(credit, num_train, monkeypatch, tmp_path):
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")

    def run(path=None, *callbacks):
        it = module(credit=credit())
        trainer(5, *callbacks).fit(it, ArithmeticData(num_train=num_train, prompts_per_batch=4), ckpt_path=path)
        return weights(it)

    path = tmp_path / "some.ckpt"
    whole = run(None, _Save(path, 2))
    resumed = run(path)
    assert all(torch.equal(p, resumed[name]) for name, p in whole.items())
    saved = torch.load(path, weights_only=False)
    del saved["credit"]
    torch.save(saved, tmp_path / "forgot.ckpt")
    forgot = run(tmp_path / "forgot.ckpt")
    assert any(not torch.equal(p, forgot[name]) for name, p in whole.items()), "the state matters"
