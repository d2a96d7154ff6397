"""Competition-style problems from files, through the command line; the packaged policy scores about nothing on them."""

import json
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.shell import main

pytestmark = pytest.mark.usefixtures("empty_folder")

ROWS = [
    {"problem": r"Find $\frac{1}{2}+\frac{1}{3}$.", "answer": r"\frac{5}{6}", "level": 1},
    {"problem": "How many primes are below 10?", "answer": "4", "level": 1},
    {"problem": "Solve $x^2=4$ for $x>0$.", "answer": "2", "level": 2},
    {"problem": r"Give the interval of $x$ with $|x|<1$.", "answer": "(-1, 1)", "level": 3},
    {"problem": r"Convert $0.\overline{3}$ to a fraction.", "answer": r"\frac{1}{3}", "level": 5},
]


def _write(name, rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def _options(run, *more):
    return [
        "--config=configs/quickstart.yaml",
        f"--trainer.logger.init_args.name={run}",
        "--trainer.enable_progress_bar=false",
        "--model.sampling.max_response_length=12",
        "--model.execution.group_size=2",
        "--evaluation.sampling.max_response_length=12",
        "--data=MathData",
        *more,
    ]


def test_fit_and_test_run_on_mixed_files_with_a_system_prompt_and_stop_strings(capsys):
    _write("a.jsonl", ROWS)
    _write("b.jsonl", [{"question": f"What is {k}+{k}?", "final_answer": str(2 * k)} for k in range(4)])
    Path("data.yaml").write_text(
        """
data:
  class_path: MathData
  init_args:
    train:
      - {path: a.jsonl, where: {level: [1, 2]}}
      - {path: b.jsonl, problem: question, answer: final_answer, weight: 2.0}
    val: {path: a.jsonl, limit: 3}
    test: [{path: a.jsonl}, {path: b.jsonl, problem: question, answer: final_answer, name: sums}]
    task: {class_path: grail_lightning.tasks.MathTask, init_args: {system_prompt: Be brief.}}
    prompts_per_batch: 2
    eval_prompts_per_batch: 4
"""
    )
    shared = ["--config=data.yaml", "--model.sampling.stop=['\\n\\n']"]
    main(["fit", *_options("text", *shared), "--trainer.max_steps=3", "--trainer.val_check_interval=2"])
    assert "held-out accuracy: 0.000 -> 0.000 (3 problems" in capsys.readouterr().out
    main(["test", *_options("text", *shared), "--ckpt_path=last"])
    table = capsys.readouterr().out
    assert "sums" in table
    tags = set(EventAccumulator("runs/text/test").Reload().Tags()["scalars"])
    assert {"test/a/accuracy", "test/sums/accuracy", "test/verdict/missing"} <= tags


def test_a_batch_larger_than_the_dataset_and_rewards_that_never_differ_end_the_run():
    """Nothing is right, so every group is dead: each batch is one skipped step, and the weights stay."""
    _write("a.jsonl", ROWS[:3])
    options = ["--data.train.path=a.jsonl", "--data.prompts_per_batch=16", "--trainer.max_steps=2"]
    with (
        pytest.warns(UserWarning, match="earned the same reward"),
        pytest.warns(UserWarning, match="`data.prompts_per_batch` is 16, but there are only 3 training prompts"),
    ):
        main(["fit", *_options("dead", *options), "--trainer.val_check_interval=100", "--preflight.patience=1"])
    from grail_lightning.policy import load_policy

    ours, packaged = load_policy("runs/dead/export"), load_policy("arithmetic")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), packaged.parameters(), strict=True))
