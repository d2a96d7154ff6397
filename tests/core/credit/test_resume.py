"""A resumed run equals one that never stopped, also where the credit method remembers something."""

import runpy
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from grail_lightning import ArithmeticData, Loading
from grail_lightning.credit import PRIME, RLSD, PermutedRewards, Resampled
from tests.core.credit.groups import GROUP, LATE, OTHER, SOUND, groups
from tests.core.credit.rollouts import context
from tests.runs import module, trainer, weights

RememberedValues = runpy.run_path(str(Path(__file__).parents[3] / "docs/examples/my_memory.py"))["RememberedValues"]
_adam = partial(torch.optim.AdamW, lr=1e-3)
_warm_up = partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.2)
CASES = [
    # Between two refreshes of a teacher inside of another method.
    pytest.param(lambda: PermutedRewards(RLSD(refresh_steps=2)), 32, "float32", id="teacher"),
    # Values of prompts that come again, of the example in the documentation.
    pytest.param(RememberedValues, 4, "float32", id="values", marks=pytest.mark.slow),
    # With its optimiser and its schedule.
    pytest.param(lambda: PRIME(optimizer=_adam, scheduler=_warm_up), 32, "float32", id="reward model"),
    pytest.param(
        lambda: PRIME(optimizer=_adam), 32, "bfloat16", id="reward model with master weights", marks=pytest.mark.slow
    ),
    # Their random numbers belong to the step, the row and the place.
    pytest.param(lambda: Resampled(2), 32, "float32", id="continuations", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("credit", "num_train", "dtype"), CASES)
def test_a_resumed_run_ends_with_the_same_weights_to_the_bit(credit, num_train, dtype, monkeypatch, tmp_path):
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")

    def save(trainer, *_):
        trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    def run(path=None):
        it = module(credit=credit(), loading=Loading(dtype=dtype))
        data = ArithmeticData(num_train=num_train, prompts_per_batch=4)
        trainer(2, LambdaCallback(on_train_batch_end=save), limit_val_batches=0).fit(it, data, ckpt_path=path)
        # The second model, too, which a run trains for its method.
        second = it.services.state_dict().get("TrainedModel", {"weights": {}})["weights"]
        return weights(it) | {f"second.{name}": weight.clone() for name, weight in second.items()}

    whole, resumed = run(), run(tmp_path / "1.ckpt")
    assert all(torch.equal(p, resumed[name]) for name, p in whole.items())
    if isinstance(credit(), Resampled):  # It has no state.
        return
    saved = torch.load(tmp_path / "1.ckpt", weights_only=False)
    del saved["services" if saved["services"] else "credit"]
    torch.save(saved, tmp_path / "1.ckpt")
    forgot = run(tmp_path / "1.ckpt")
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
