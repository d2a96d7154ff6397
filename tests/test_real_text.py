"""Competition-style problems from files, through the command line; the packaged policy scores about nothing on them."""

import json
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grail_lightning.core.policy.load import load_policy
from tests.shell import main

ROWS = [
    {"problem": r"Find $\frac{1}{2}+\frac{1}{3}$.", "answer": r"\frac{5}{6}", "level": 1},
    {"problem": "Solve $x^2=4$ for $x>0$.", "answer": "2", "level": 2},
    {"problem": r"Give the interval of $x$ with $|x|<1$.", "answer": "(-1, 1)", "level": 3},
]
DATA = """
data:
  class_path: MathData
  init_args:
    train:
      - {path: a.jsonl, where: {level: [1, 2]}}
      - {path: b.jsonl, problem: question, answer: final_answer, weight: 2.0}
    val: {path: a.jsonl, limit: 2}
    test: [{path: a.jsonl}, {path: b.jsonl, problem: question, answer: final_answer, name: sums}]
    task: {class_path: grail_lightning.MathTask, init_args: {system_prompt: Be brief.}}
    prompts_per_batch: 16
"""


@pytest.mark.filterwarnings("ignore:.*validation problems are training problems")
def test_fit_and_test_run_on_mixed_files_and_batches_without_a_right_answer_change_nothing(empty_folder, capsys):
    """Every group is dead, so that each batch, which is larger than the dataset, is one skipped step."""
    sums = [{"question": f"What is {k}+{k}?", "final_answer": str(2 * k)} for k in range(4)]
    for name, rows in (("a.jsonl", ROWS), ("b.jsonl", sums)):
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("data.yaml").write_text(DATA)
    options = ["--config=configs/quickstart.yaml", "--config=data.yaml", "--trainer.enable_progress_bar=false"]
    options += ["--model.sampling.max_response_length=12", "--evaluation.sampling.max_response_length=12"]
    options += ["--model.execution.group_size=2", "--model.sampling.stop=['\\n\\n']"]
    with (
        pytest.warns(UserWarning, match="earned the same reward"),
        pytest.warns(UserWarning, match="`data.prompts_per_batch` is 16, but there are only 6 training prompts"),
    ):
        main(["fit", *options, "--trainer.max_steps=2", "--trainer.val_check_interval=100", "--preflight.patience=1"])
    assert "held-out accuracy: 0.000 -> 0.000 (2 problems" in capsys.readouterr().out
    ours, packaged = load_policy("runs/quickstart/export"), load_policy("arithmetic")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), packaged.parameters(), strict=True))
    main(["test", *options, "--ckpt_path=last"])
    assert "sums" in capsys.readouterr().out
    tags = set(EventAccumulator("runs/quickstart/test").Reload().Tags()["scalars"])
    assert {"test/a/accuracy", "test/sums/accuracy", "test/verdict/missing"} <= tags
