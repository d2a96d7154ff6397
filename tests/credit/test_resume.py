"""A resumed run equals one that never stopped, also where the credit method remembers something."""

import lightning.pytorch as pl
import pytest
import torch

from grail_lightning.credit import RLSD, Product, Uniform, WarmUp
from grail_lightning.data import ArithmeticData
from tests.runs import module, trainer, weights


class _Save(pl.Callback):
    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("wrap", [lambda c: c, lambda c: Product(Uniform(), WarmUp(c, 2))])
def test_a_run_resumed_between_two_refreshes_of_the_teacher_ends_with_the_same_weights(wrap, monkeypatch, tmp_path):
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")

    def run(credit, path=None, *callbacks):
        it = module(credit=credit)
        trainer(5, *callbacks).fit(it, ArithmeticData(num_train=64, prompts_per_batch=4), ckpt_path=path)
        return weights(it)

    path = tmp_path / "some.ckpt"
    whole = run(wrap(RLSD(refresh_steps=4)), None, _Save(path, 2))
    resumed = run(wrap(RLSD(refresh_steps=4)), path)
    assert all(torch.equal(p, resumed[name]) for name, p in whole.items())
    saved = torch.load(path, weights_only=False)
    del saved["credit"]
    torch.save(saved, tmp_path / "forgot.ckpt")
    forgot = run(wrap(RLSD(refresh_steps=4)), tmp_path / "forgot.ckpt")
    assert any(not torch.equal(p, forgot[name]) for name, p in whole.items()), "the teacher matters"
