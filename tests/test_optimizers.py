"""Optimisers of other libraries, named on the command line: state in 8 bits, and weights in bfloat16."""

import shutil
from pathlib import Path

import pytest
import torch

from grail_lightning import Loading
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.step.optimizer import ConfiguredOptions
from tests.runs import batches, module, trainer, weights
from tests.shell import SHORT, main

pytest.importorskip("torchao")

from torchao.optim import AdamW8bit

pytestmark = pytest.mark.usefixtures("empty_folder")

# torchao writes its step for `torch.compile`, whose code takes a minute to build; eager, it does the same sums.
EAGER = torch.compiler.set_stance
EIGHT_BITS = ["--model.optimizer=torchao.optim.AdamW8bit", "--model.optimizer.lr=1e-4"]
LAST = Path("runs/quickstart/checkpoints/last.ckpt")


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")
def test_from_the_command_line_it_trains_and_resumes_bit_for_bit():
    with EAGER("force_eager"):
        main(["fit", *SHORT, *EIGHT_BITS, "--trainer.max_steps=4"])
        whole = torch.load(LAST, weights_only=False)
        shutil.rmtree("runs")
        main(["fit", *SHORT, *EIGHT_BITS])
        main(["fit", *SHORT, *EIGHT_BITS, "--trainer.max_steps=4", "--ckpt_path=last"])
    resumed = torch.load(LAST, weights_only=False)
    assert whole["global_step"] == resumed["global_step"] == 4
    for name, value in whole["state_dict"].items():
        assert torch.equal(value, resumed["state_dict"][name]), name
    ours, theirs = (checkpoint["optimizer_states"][0]["state"] for checkpoint in (resumed, whole))
    quantised = 0
    for number, state in theirs.items():
        for name, value in state.items():
            other = ours[number][name]
            if quant := hasattr(value, "codes"):
                value, other = value.codes, other.codes
            quantised += quant
            assert torch.equal(value, other)
    assert quantised > 0


def test_a_resumed_learning_rate_is_the_configured_one():
    weight = torch.nn.Parameter(torch.ones(64, 64))
    saved = AdamW8bit([weight], lr=1e-3)
    weight.grad = torch.ones_like(weight)
    with EAGER("force_eager"):
        saved.step()
        resumed = AdamW8bit([weight], lr=2e-3, weight_decay=0.5)
        configured = ConfiguredOptions(resumed, None)
        resumed.load_state_dict(saved.state_dict())
        assert resumed.param_groups[0]["weight_decay"] == 0.01
        configured.apply(resumed, None, num_steps=1)
        assert resumed.param_groups[0]["lr"].item() == pytest.approx(2e-3)
        assert resumed.param_groups[0]["weight_decay"] == 0.5
        resumed.step()  # It refuses a learning rate that is no tensor.


def test_a_schedule_that_fills_the_learning_rate_in_place_is_not_taken_for_a_new_one():
    """torchao keeps the rate in a tensor, and schedules write into it: what was configured must be a copy."""
    optimizer = AdamW8bit([torch.nn.Parameter(torch.ones(64, 64))], lr=1e-4)
    configured = ConfiguredOptions(optimizer, None)
    torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=10)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.5e-4)
    assert float(configured.groups[0]["lr"]) == pytest.approx(1e-4)


def test_a_policy_in_bfloat16_trains_by_stochastic_rounding():
    ours = module(
        optimizer=lambda p: AdamW8bit(p, lr=1e-5, weight_decay=0.0, bf16_stochastic_round=True),
        loading=Loading(dtype="bfloat16", master_weights=False),
    )
    with EAGER("force_eager"):
        trainer(1).fit(ours, batches(1, size=2))
    start = dict(load_policy("arithmetic", Loading(dtype="bfloat16")).named_parameters())
    assert all(p.dtype == torch.bfloat16 for p in start.values())
    assert any((p != start[name]).any() for name, p in weights(ours).items())
