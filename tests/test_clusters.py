"""Recipes for several machines: Lightning's launchers, the configs, and the scripts of the page on clusters."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from grail_lightning.app.cli.app import FitOptions
from tests.shell import SHORT, built, fails_early
from tests.test_published import SMALL

ROOT = Path(__file__).parents[1]
CONFIGS, EXAMPLES = ROOT / "configs" / "clusters", ROOT / "docs" / "examples"
# The fourth process of the second machine, as `torchrun` describes it.
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "WORLD_SIZE": "16",
    "RANK": "11",
    "LOCAL_RANK": "3",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
ONE_CPU_EACH = [option for option in SMALL if "devices" not in option and "strategy" not in option]


def _files(model, method="grail", *more):
    names = [f"published/{model}", f"published/{method}", *more]
    return [f"--config=configs/{name}.yaml" for name in names]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # A Trainer sets it to the rank that a launcher names.
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # Lightning's SLURM environment sets them for good.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_two_machines_of_eight_devices_are_one_run(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    made = built(*_files("qwen3_8b", "grail", "clusters/nodes"), *ONE_CPU_EACH)
    assert (made.trainer.world_size, made.trainer.global_rank, made.trainer.node_rank) == (16, 11, 1)
    assert (made.trainer.strategy._data_parallel_size, made.trainer.strategy._tensor_parallel_size) == (16, 1)
    assert made.datamodule.prompts_per_batch % made.trainer.world_size == 0


def test_a_run_on_several_machines_that_no_launcher_has_started_does_not_wait_for_the_others(capsys):
    assert "needs a launcher" in fails_early(capsys, "fit", *SHORT, "--trainer.num_nodes=2")


def test_a_published_run_takes_the_files_of_several_machines():
    pytest.importorskip("grail_lightning.core.engines.vllm")
    options = FitOptions().parse(_files("qwen3_4b", "grail", "clusters/nodes", "clusters/servers"))
    assert (options.trainer.num_nodes, options.trainer.devices, options.last_checkpoint.every_n_batches) == (2, 8, 1)
    assert options.data.init_args.train is not None, "the data are still those of the run"
    assert options.model.engine.class_path.endswith("VLLMServer")
    assert options.model.engine.init_args.urls == ["http://node3:8000", "http://node4:8000"]
    assert options.model.execution.sample_ahead
    assert options.model.execution.num_iterations == 4, "the other options are still those of the run"
    assert {file.stem for file in CONFIGS.glob("*.yaml")} == {"nodes", "servers"}, "all files are tested here"


# What the scripts call, and cannot be had here, prints as its name says.
PROGRAMS = {
    "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
    "torchrun": 'while [[ "$1" == --* ]]; do shift; done; shift 2; exec grail-lightning "$@"',
    "squeue": "echo node[3-4]",
    "scontrol": "echo node3; echo node4",
    "scancel": 'echo "cancelled $1" >&2',
    "grail-lightning": "printf '%s\\n' \"$@\"",
    "vllm": "printf '%s\\n' \"$@\"",
}


def _run(script, *arguments):
    folder = Path("programs")
    folder.mkdir(exist_ok=True)
    for name, text in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    path = {"PATH": f"{folder.resolve()}:{os.environ['PATH']}"}
    run = subprocess.run(
        ["bash", str(EXAMPLES / script), *arguments], capture_output=True, text=True, env=os.environ | path, check=True
    )
    return run.stdout.splitlines(), run.stderr


@pytest.mark.parametrize(("script", "arguments"), [("two_nodes.sh", ("0", "node1")), ("trainers.sbatch", ("17",))])
def test_a_script_runs_a_command_that_is_accepted_and_goes_on_from_the_last_checkpoint(script, arguments):
    (_, *begun), _ = _run(script, *arguments)
    last = Path("runs/qwen3_8b/grail/checkpoints/last.ckpt")
    last.parent.mkdir(parents=True)
    last.touch()
    (subcommand, *given), said = _run(script, *arguments)
    assert subcommand == "fit"
    assert set(given) - set(begun) == {"--ckpt_path=last"}
    if "configs/clusters/servers.yaml" in given:
        assert "--model.engine.urls=[http://node3:8000,http://node4:8000]" in given
        assert said == "cancelled 17\n", "the servers end with the run"
        pytest.importorskip("grail_lightning.core.engines.vllm")
    assert FitOptions().parse(given).trainer.num_nodes == 2


def test_servers_are_started_as_the_engine_asks_for_it():
    (text, *_), _ = _run("servers.sbatch")
    assert text == "serve"
    client = pytest.importorskip("grail_lightning.core.engines.vllm.client")
    printed = (EXAMPLES / "servers.sbatch").read_text().replace("\\\n", " ")
    (command,) = [shlex.split(line) for line in printed.splitlines() if "vllm serve" in line]
    wanted = shlex.split(client.ServerClient("http://node3:8000", 1.0, 1.0).command)
    for option in ("--port", "--logprobs-mode", "--worker-extension-cls"):
        assert command[command.index(option) + 1] == wanted[wanted.index(option) + 1]
    assert set(wanted[:1]) <= set(command), "the environment"
