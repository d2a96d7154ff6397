"""A resumed run equals one that never stopped, also where the credit method remembers something."""

import runpy
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from grail_lightning.credit import PRIME, RLSD, Product, Resampled, Uniform, WarmUp
from grail_lightning.data import ArithmeticData
from grail_lightning.policy import Loading
from tests.credit.groups import GROUP, LATE, OTHER, SOUND, groups
from tests.credit.rollouts import context
from tests.runs import module, trainer, weights

RememberedValues = runpy.run_path(str(Path(__file__).parents[2] / "docs/examples/my_memory.py"))["RememberedValues"]


class _Save(pl.Callback):
    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


_adam = partial(torch.optim.AdamW, lr=1e-3)
_warm_up = partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.2)
CASES = [
    # Between two refreshes of a teacher inside of other methods.
    pytest.param(lambda: Product(Uniform(), WarmUp(RLSD(refresh_steps=4), 2)), 64, "float32", id="teacher"),
    # Values of prompts that come again, of the example in the documentation.
    pytest.param(RememberedValues, 8, "float32", id="values", marks=pytest.mark.slow),
    # With its optimiser and its schedule.
    pytest.param(lambda: PRIME(optimizer=_adam, scheduler=_warm_up), 64, "float32", id="reward model"),
    pytest.param(
        lambda: PRIME(optimizer=_adam), 64, "bfloat16", id="reward model with master weights", marks=pytest.mark.slow
    ),
    # Their random numbers belong to the step, the row and the place.
    pytest.param(lambda: Resampled(2), 64, "float32", id="continuations", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("credit", "num_train", "dtype"), CASES)
def test_a_resumed_run_ends_with_the_same_weights_to_the_bit(credit, num_train, dtype, monkeypatch, tmp_path):
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")

    def run(path=None, *callbacks):
        it = module(credit=credit(), loading=Loading(dtype=dtype))
        trainer(4, *callbacks).fit(it, ArithmeticData(num_train=num_train, prompts_per_batch=4), ckpt_path=path)
        # The second model, too, which a run trains for its method.
        second = it.second.state_dict()["weights"] if it.second else {}
        return weights(it) | {f"second.{name}": weight.clone() for name, weight in second.items()}

    path = tmp_path / "some.ckpt"
    whole = run(None, _Save(path, 2))
    resumed = run(path)
    assert all(torch.equal(p, resumed[name]) for name, p in whole.items())
    if isinstance(credit(), Resampled):  # It has no state.
        return
    saved = torch.load(path, weights_only=False)
    del saved["second" if saved.get("second") else "credit"]
    torch.save(saved, tmp_path / "forgot.ckpt")
    forgot = run(tmp_path / "forgot.ckpt")
    assert any(not torch.equal(p, forgot[name]) for name, p in whole.items()), "the state matters"


def test_the_example_with_a_memory_has_the_values_of_all_rollouts_of_a_prompt(arithmetic):
    """As one group of eight; another prompt's rollouts change nothing; the limit holds."""
    late = [LATE, LATE, SOUND, SOUND]
    now, earlier = groups(arithmetic, GROUP), groups(arithmetic, (GROUP[0], late))
    method = RememberedValues()
    for batch in (groups(arithmetic, OTHER), earlier):
        method(arithmetic, batch, context())
    found = method(arithmetic, now, context()).additive
    together = RememberedValues()(arithmetic, groups(arithmetic, (GROUP[0], [*GROUP[1], *late])), context()).additive
    torch.testing.assert_close(found, together[:4, : found.shape[1]], rtol=0, atol=1e-6)
    alone = RememberedValues()(arithmetic, now, context()).additive
    assert (alone - found).abs().max() > 0.05, "the memory matters"
    small = RememberedValues(limit=5)
    small(arithmetic, now, context())
    assert len(small.outcomes) == 5
