"""Weights in bfloat16 are moved in float32."""

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from grail_lightning import Loading, Sampling
from grail_lightning.core.distributed.gradients import Gradients, MasterWeights
from grail_lightning.core.policy.layout import padded_layout
from grail_lightning.core.policy.load import load_policy
from tests.runs import Watch, batches, module, trainer, weights

ALONE = SingleDeviceStrategy("cpu")
HALF = Loading(dtype="bfloat16")
# Short responses, each of which has a gradient by the bonus.
SHORT = {
    "objective": {"group_size": 2, "entropy_coefficient": 0.1, "mask_truncated": False},
    "sampling": Sampling(max_response_length=3),
}


def _adamw(lr):
    return lambda p: torch.optim.AdamW(p, lr=lr, weight_decay=0.0)


def _masters(*weights):
    return MasterWeights({str(k): weight for k, weight in enumerate(weights)}, {})


def test_small_steps_add_up_although_each_rounds_to_nothing():
    """At 1 the next bfloat16 below is 2^-8 away: 100 steps of 1e-4 are 0.01, which is 0.9883 or 0.9922."""
    weight = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    masters = _masters(weight)
    optimizer = torch.optim.SGD(masters.by_name.values(), lr=1e-4)
    optimizer.register_step_post_hook(masters.write_back)
    for _ in range(100):
        with masters.collecting():
            weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(masters.by_name["0"].detach(), torch.full((8,), 0.99))
    assert set(weight.tolist()) == {0.98828125}
    assert weight.grad is None


def test_an_optimiser_step_equals_adamw_on_float32_copies():
    policy = load_policy("arithmetic", HALF).train()
    expected = [torch.nn.Parameter(p.detach().float()) for p in policy.parameters()]
    gradients = Gradients(policy, ALONE)
    optimizer = gradients.make_optimizer(_adamw(1e-4))
    by_hand = _adamw(1e-4)(expected)
    tensors = (
        torch.arange(3, 43).reshape(2, 20),
        torch.ones(2, 20, dtype=torch.bool),
        torch.ones(2, 9, dtype=torch.bool),
    )
    rows = [padded_layout(*(tensor[row : row + 1] for tensor in tensors)) for row in range(2)]
    for _ in range(3):
        for parameter in expected:
            parameter.grad = torch.zeros_like(parameter)
        for row in rows:
            found = torch.autograd.grad(policy(row).sum(), list(policy.parameters()))
            for parameter, gradient in zip(expected, found, strict=True):
                parameter.grad += gradient.float()
        by_hand.step()
        for number, row in enumerate(rows):
            with gradients.accumulating(last=number == 1):
                policy(row).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert all(torch.equal(a, b) for a, b in zip(gradients.weights, expected, strict=True))
        assert all(torch.equal(p, m.bfloat16()) for p, m in zip(policy.parameters(), expected, strict=True))


def test_a_resumed_run_goes_on_where_the_masters_were(tmp_path, recwarn):
    """At this rate hardly a bfloat16 weight takes a single step: without their masters a resume would lose them."""

    def masters(ours):
        return [m.detach() for m in ours.gradients.weights]

    whole, first, second = (module(optimizer=_adamw(1e-5), **SHORT) for _ in range(3))
    watch = Watch()
    trainer(2, watch, precision="bf16-true").fit(whole, batches(1, size=1))
    run = trainer(1, precision="bf16-true")
    run.fit(first, batches(1, size=1))
    run.save_checkpoint(tmp_path / "one.ckpt")
    trainer(2, precision="bf16-true").fit(second, batches(1, size=1), ckpt_path=tmp_path / "one.ckpt")
    assert watch.steps == [1, 2]
    assert second.policy.model.dtype == torch.bfloat16
    assert {m.dtype for m in masters(whole)} == {torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(masters(second), masters(whole), strict=True))
    assert all(torch.equal(p, weights(whole)[name]) for name, p in weights(second).items())
    assert any(not torch.equal(m, m.bfloat16().float()) for m in masters(whole))
    assert not [w for w in recwarn if "rounds" in str(w.message)]
    assert watch.outputs[-1].metrics["grad_norm"] > 0


@pytest.mark.parametrize(("before", "after"), [(HALF, Loading()), (Loading(), HALF)], ids=["to float32", "to bfloat16"])
def test_a_checkpoint_hands_on_all_digits_to_another_precision(before, after, tmp_path):
    first, second = module(loading=before, **SHORT), module(loading=after, **SHORT)
    run = trainer(1)
    run.fit(first, batches(1, size=1))
    run.save_checkpoint(tmp_path / "one.ckpt")
    seen = []

    class Look(Watch):
        def on_train_start(self, trainer, pl_module):
            seen.extend(w.detach().clone() for w in pl_module.gradients.weights)

    trainer(2, Look()).fit(second, batches(1, size=1), ckpt_path=tmp_path / "one.ckpt")
    held = [w.detach() for w in first.gradients.weights]
    assert any(not torch.equal(w, w.bfloat16().float()) for w in held)
    assert all(torch.equal(a, b) for a, b in zip(seen, held, strict=True))


def test_a_checkpoint_after_other_weights_were_loaded_holds_those(tmp_path):
    first, second = (module(loading=HALF, optimizer=_adamw(rate), **SHORT) for rate in (1e-4, 1e-3))
    for ours in (second, first):
        run = trainer(1)
        run.fit(ours, batches(1, size=1))
    run.save_checkpoint(tmp_path / "0.ckpt")
    run = trainer(1)
    run.validate(second, batches(1, size=1), ckpt_path=tmp_path / "0.ckpt", verbose=False, weights_only=True)
    assert second.gradients is None
    run.save_checkpoint(tmp_path / "again.ckpt")
    digits, again = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"] for name in ("0", "again"))
    assert any(not torch.equal(w, w.bfloat16().float()) for w in digits.values())  # After a fit: all digits.
    assert all(torch.equal(w.float(), digits[name].bfloat16().float()) for name, w in again.items())
