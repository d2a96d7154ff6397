"""Runs of several turns through the command line, on a small policy that calls tools."""

import importlib
import json
import re
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from grail_lightning.core.policy.load import load_policy
from tests.shell import fails, fails_early, main
from tests.tool_calling_policy import calling_policy

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*of the rollouts (ended by|call no)",
    "ignore:Checkpoint directory .* is not empty",
    "ignore:.*validation problems are training problems",  # They are the same few.
)

EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "my_environment.py"
MINE = """
from my_environment import Guess

class Column(Guess):
    def reset(self, largest_allowed: int, seed: int, **row):
        return super().reset(seed)

class Failing(Guess):
    def get_reward(self) -> float:
        raise KeyError("no reward")
"""
CONFIG = """
seed_everything: 3
trainer:
  {accelerator: cpu, devices: 1, max_steps: 2, max_epochs: -1, val_check_interval: 1, check_val_every_n_epoch: null,
   enable_progress_bar: false, logger: {class_path: CSVLogger, init_args: {save_dir: runs, name: guess, version: ""}}}
model:
  policy: policy
  sampling: {max_response_length: 20}
  execution: {group_size: 4}
  credit: GiGPO
  optimizer: {class_path: AdamW, init_args: {lr: 1.0e-4}}
data:
  class_path: MathData
  init_args:
    train: rows.jsonl
    val: rows.jsonl
    test: rows.jsonl
    predict: rows.jsonl
    prompts_per_batch: 2
    task:
      class_path: EnvironmentTask
      init_args:
        environment: {class_path: my_environment.Guess, init_args: {largest: 20}}
        instruction: ""
        tool_instruction: ""
        limits: {max_turns: 3, tool_seconds: 60}
evaluation: {sampling: {max_response_length: 20}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of a user, with a policy, an environment, problems and a config."""
    made = tmp_path_factory.mktemp("user")
    policy = calling_policy()
    policy.model.float().save_pretrained(made / "policy")
    policy.tokenizer.save_pretrained(made / "policy")
    (made / "my_environment.py").write_text(EXAMPLE.read_text())
    (made / "mine.py").write_text(MINE)
    (made / "rows.jsonl").write_text("".join(json.dumps({"problem": f"Go {k}. "}) + "\n" for k in range(3)) + "{}\n")
    (made / "guess.yaml").write_text(CONFIG)
    return made


@pytest.fixture(autouse=True)
def _there(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    for name in ("mine", "my_environment"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()


MINE_IS = "--data.task.environment=mine."
DECLARED = "--data.task.tool_instruction=null"  # A prompt has 6 tokens, and many more with what declares the tools.
LONG = "--evaluation.sampling.max_response_length=1000"  # The model has 1,024 places.


@pytest.mark.parametrize(
    ("run", "arguments", "message"),
    [
        (
            fails_early,
            f"fit {MINE_IS}Column",
            "`Column.reset` must take the columns `problem` .* missing .*'largest_allowed'",
        ),
        (fails_early, f"fit {MINE_IS}Nowhere", "`data.task.environment` must .*'mine.Nowhere'"),
        (fails_early, f"fit --data.max_prompt_length=30 {DECLARED}", "4 of 4 prompts .* longer than 30 tokens"),
        (fails, f"fit {MINE_IS}Failing", "`Failing.get_reward` must not fail, but raised KeyError: 'no reward'"),
        (fails, f"test {LONG} {DECLARED}", "4 of 4 prompts .* longer than 24 tokens"),
    ],
)
def test_what_is_wrong_is_one_line_and_what_can_be_before_a_model_is_loaded(run, arguments, message, capsys):
    subcommand, *options = arguments.split()
    said = run(capsys, subcommand, "--config=guess.yaml", *options)
    assert re.search(message, said), said


AHEAD = ["--model.engine=tests.copying_engine.Elsewhere", "--model.execution.sample_ahead=true"]


@pytest.mark.parametrize(
    "ahead", [pytest.param(case, marks=pytest.mark.slow) for case in (False, True)], ids=["on_policy", "sample_ahead"]
)
def test_a_resumed_run_equals_one_that_did_not_stop_and_is_tested_and_predicts(ahead, tmp_path, monkeypatch, folder):
    """Environments draw the same numbers again: their seeds depend on the step and the row, not on validation."""
    states = []
    options = [f"--config={folder}/guess.yaml", f"--model.policy={folder}/policy"]
    options += [f"--data.{name}={folder}/rows.jsonl" for name in ("train", "val", "test", "predict")]
    options += [*AHEAD, f"--model.engine.policy={folder}/policy"] if ahead else []
    for name, lengths in (("whole", [4]), ("halves", [2, 4])):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        validated = f"--trainer.limit_val_batches={int(name == 'halves')}"
        for number, length in enumerate(lengths):
            resumed = ["--ckpt_path=last"] if number else []
            main(["fit", *options, validated, f"--trainer.max_steps={length}", *resumed])
        states.append(torch.load("runs/guess/checkpoints/last.ckpt", weights_only=True))
    whole, halves = states
    assert whole["global_step"] == halves["global_step"] == length
    begun = load_policy(f"{folder}/policy").state_dict()
    assert any(not torch.equal(weight, begun[key[7:]]) for key, weight in whole["state_dict"].items())
    for key, weight in whole["state_dict"].items():
        assert torch.equal(weight, halves["state_dict"][key]), key
    metrics = Path("runs/guess/metrics.csv").read_text()
    assert "train/episodes/turns" in metrics
    assert "episodes/end_turns" in metrics
    for subcommand in ("test", "predict"):
        main([subcommand, *options, "--ckpt_path=last"])
    rows = pq.read_table("runs/guess/predictions.parquet").to_pylist()
    assert len({row["prompt"] for row in rows}) == 4  # Also of the row without a column.
    assert max(row["num_turns"] for row in rows) > 1
    assert sum(row["num_calls"] for row in rows) > 0
