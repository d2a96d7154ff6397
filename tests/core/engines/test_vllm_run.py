"""A run whose server goes away for good ends with one line, and goes on from its checkpoint with another server."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.served_ranks import assert_ranks_in_step
from tests.shell import RUN, fails, main
from tests.vllm_routes import SmallServer

ROOT = Path(__file__).parents[3]
# Short responses, whose entropy alone moves the policy.
OPTIONS = f"""--config={ROOT}/configs/quickstart.yaml --trainer.max_steps=4 --trainer.val_check_interval=100
--trainer.enable_progress_bar=false --last_checkpoint.every_n_batches=1 --evaluation.at_start=false
--model.sampling.max_response_length=6 --model.execution.group_size=2 --model.execution.sampler_cap=null
--model.objective.entropy_coefficient=0.1 --model.objective.mask_truncated=false --model.credit=Uniform
--evaluation.sampling.max_response_length=6 --data.num_train=24 --data.num_val=2 --data.num_test=2
--data.prompts_per_batch=2 --data.eval_prompts_per_batch=2 --model.engine=VLLMServer
--model.engine.patience_seconds=0.5""".split()


def fit(server, *more):
    main(["fit", *OPTIONS, f"--model.engine.urls=[{server.url}]", *more])


def weights():
    return load_file(RUN / "export" / "model.safetensors")


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.slow
def test_a_run_whose_server_goes_away_goes_on_with_another_one(tmp_path, monkeypatch, capsys):
    for name in ("alone", "again"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "alone")
    with SmallServer() as server:
        fit(server)
    undisturbed = weights()
    monkeypatch.chdir(tmp_path / "again")
    server = SmallServer()

    def goes_away(handler):
        """In the second batch, after two probes of 16 requests and a batch of 4."""
        handler.close_connection = True
        server.__exit__()

    server.faults += [None] * (16 + 4 + 16 + 2) + [goes_away]
    with server:
        said = fails(capsys, "fit", *OPTIONS, f"--model.engine.urls=[{server.url}]")
    assert f"{server.url} has not answered for 0.5 s (Connection refused). Start it: VLLM_SERVER_DEV_MODE=1" in said
    assert "training goes on from its last checkpoint with --ckpt_path=last" in said
    assert torch.load(RUN / "checkpoints/last.ckpt")["global_step"] == 2
    with SmallServer() as another:
        fit(another, "--ckpt_path=last")
    resumed = weights()
    assert resumed.keys() == undisturbed.keys()
    assert all(torch.equal(resumed[name], undisturbed[name]) for name in undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_push_once_and_sample_with_the_same_weights(strategy):
    with SmallServer() as server:
        assert_ranks_in_step(strategy, server.url)
    assert server.worker.loads == 5
