"""All callbacks together: on the real module, on two ranks, and built from the command line's kind of config."""

from pathlib import Path

import lightning.pytorch as pl
import pyarrow.parquet as pq
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from grail_lightning import (
    ArithmeticData,
    CreditPictures,
    Evaluation,
    ExportPolicy,
    LastCheckpoint,
    PredictionWriter,
    Sampling,
    default_callbacks,
)
from grail_lightning.core.policy.source import load_tokenizer
from tests.app.callbacks.scripted import scalars
from tests.processes import run_script
from tests.runs import module

BRIEF = Sampling(max_response_length=6)


_TWO_RANKS = '''
import sys
import torch
from grail_lightning import default_callbacks
from tests.app.callbacks.scripted import Scripted, board, box, loader, prompts, run

torch.set_num_threads(1)


class Shard:
    """Every second prompt of a list of batches: rank 0 the even ones, rank 1 the odd ones, maybe none."""

    def __init__(self, *batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        rank = torch.distributed.get_rank()
        return iter([batch[rank::2] for batch in self.batches])


def say(prompt, k, step):
    if step == 2 and k == 0 and prompt.reference == "4":  # Of the second rank, in the second batch.
        return box("slow")
    return box(prompt.reference if int(prompt.reference) <= 2 + step // 2 else "0")


folder = sys.argv[1]
callbacks = default_callbacks(num_samples=2, pass_at=(2,), keep_rollouts=True)
trainer = run(4, *callbacks, logger=board(folder), enable_checkpointing=True, devices=2, strategy="ddp")
# Dataset "odd" is seen by the second rank alone.
held_out = [Shard(prompts(4, "all"), prompts(1, "all")), Shard([prompts(1, "even")[0], prompts(3, "odd")[2]])]
model = Scripted(say)
trainer.fit(model, Shard(*[prompts(4)] * 3), held_out)
print("RANK", trainer.global_rank, sorted((k, round(float(v), 4)) for k, v in trainer.callback_metrics.items()))
trainer.test(model, held_out, verbose=False)
trainer.predict(model, Shard(prompts(5), prompts(2)), return_predictions=False)
'''


def test_two_ranks_agree_and_write_one_run(tmp_path, monkeypatch):
    script = tmp_path / "two_ranks.py"
    script.write_text(_TWO_RANKS)
    monkeypatch.chdir(tmp_path)
    ranks = run_script(script, tmp_path / "run", ranks=2)
    stdout, stderr = ("".join(said) for said in zip(*ranks, strict=True))
    assert "before the ``update`` method" not in stderr, "a rank without a dataset must take part in it quietly"
    assert "sync_dist" not in stderr
    assert stderr.count("1 of the 8 answers of this batch (12.5%) could not be graded: 1 timed out") == 1
    figures = [line.split(" ", 2)[2] for line in stdout.splitlines() if line.startswith("RANK")]
    assert len(figures) == 2
    assert figures[0] == figures[1]
    found = scalars(tmp_path / "run")
    # "all": problems 1..4 and 1 again; right are those up to 2 + step/2. Step 0: 3 of 5; step 4: 5 of 5.
    # "even" is problem 1: right. "odd" is problem 3: wrong at step 0. Overall 4 of 7, then 7 of 7.
    expected = {"val/accuracy": (4 / 7, 1), "val/all/pass_at_2": (3 / 5, 1), "val/even/accuracy": (1, 1)}
    expected |= {"val/odd/accuracy": (0, 1), "val/verdict/wrong": (3 / 7, 0)}
    for name, values in expected.items():
        assert found[name] == [(0, pytest.approx(values[0])), (4, pytest.approx(values[1]))], name
    assert "held-out accuracy: 0.571 -> 1.000 (7 problems x 2 samples, temperature 1.0)" in stdout
    assert stdout.count("held-out accuracy") == 1
    rows = pq.read_table(tmp_path / "run" / "rollouts").to_pylist()
    # Two batches of 4 prompts with 2 samples, half of them on each rank.
    assert [(r["step"], r["rank"]) for r in rows].count((2, 1)) == 4
    assert len(rows) == 16
    encode = load_tokenizer("arithmetic")
    tokens = sum(r["num_tokens"] + len(encode(r["prompt"])["input_ids"]) for r in rows)
    assert found["speed/num_tokens"][1] == (4, tokens)
    assert "odd" in stdout[stdout.index("problems  ") :], "the table of the test"
    predictions = pq.read_table(tmp_path / "run" / "predictions.parquet").to_pylist()
    # Rank 0 has problems 1, 3, 5 and 1, rank 1 has 2, 4 and 2.
    assert [r["prompt"] for r in predictions] == [f"Compute {k}+1." for k in (0, 2, 4, 0, 1, 3, 1)]
    assert not list((tmp_path / "run").glob(".*"))
    assert {p.name for p in (tmp_path / "run" / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    assert (tmp_path / "run" / "export" / "config.json").exists()


@pytest.mark.parametrize(
    ("callback", "options", "message"),
    [
        (Evaluation, {"num_samples": 0}, r"`num_samples` must lie in \[1, inf\), but got 0"),
        (Evaluation, {"num_samples": 4, "pass_at": (1, 8)}, r"between 1 and `num_samples`, but got \[1, 8\] with 4"),
        (CreditPictures, {"every_n_batches": -1}, r"`every_n_batches` must lie in"),
        (ExportPolicy, {"which": "first"}, "`which` must be one of last, best, but got 'first'"),
        (PredictionWriter, {"file": "x.html"}, r"`predictions\.file` must end with \.parquet, .* but got x\.html"),
    ],
)
def test_an_option_that_cannot_be_is_refused(callback, options, message):
    with pytest.raises(ValueError, match=message):
        callback(**options)


@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.filterwarnings("ignore:Checkpoint directory")  # Of the second fit.
@pytest.mark.filterwarnings("ignore:.*barebones")  # It says which methods of the module then do nothing.
@pytest.mark.parametrize(
    ("flags", "written"),
    [
        ({}, ["best.ckpt", "last.ckpt"]),
        ({"logger": False, "val_check_interval": 1, "check_val_every_n_epoch": None}, ["best.ckpt", "last.ckpt"]),
        ({"limit_val_batches": 0}, ["last.ckpt"]),
        ({"barebones": True}, []),
        ({"fast_dev_run": True}, []),
    ],
    ids=str,
)
def test_the_default_callbacks_go_with_any_flags(flags, written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"max_steps": 1, "max_epochs": -1, "accelerator": "cpu", "callbacks": default_callbacks()} | flags
    trainer, data = pl.Trainer(**options), ArithmeticData(num_train=4, num_val=2, num_test=2, prompts_per_batch=2)
    trained = module(sampling=BRIEF)
    for _ in range(2):
        trainer.fit(trained, data)
    trainer.validate(trained, data, verbose=False)
    trainer.test(trained, data, verbose=False)
    trainer.predict(trained, data, return_predictions=False)
    kinds = [type(callback) for callback in trainer.callbacks]
    saves = not flags.get("barebones")
    assert kinds.count(LastCheckpoint) == saves
    assert kinds.count(ModelCheckpoint) == (saves and flags.get("limit_val_batches", 1))
    files = [*Path().rglob("*.ckpt")]
    assert sorted({file.name for file in files}) == written
    assert len({file.parent for file in files}) == bool(written), "both checkpoints are in the run's folder"
    assert not Path("checkpoints").exists()
