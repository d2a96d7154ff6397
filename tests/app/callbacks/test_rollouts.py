"""Training rollouts as text that nothing can break out of, and as Parquet files."""

import html
import re
import warnings
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lightning.pytorch.loggers import CSVLogger

from grail_lightning import CreditPictures, KeepRollouts, Prompt
from grail_lightning.app.callbacks.credit_plots import code_block
from grail_lightning.core.records.columns import OPTIONAL, TRAINING, encodable
from grail_lightning.core.records.task import problem_id
from grail_lightning.core.rollout.rows import prompt_text
from tests.app.callbacks.scripted import TASK, Scripted, board, box, loader, panels, prompts, run
from tests.batches import graded
from tests.runs import module

with warnings.catch_warnings():
    # What turns Markdown into the HTML of TensorBoard's text panel. It imports a deprecated sanitiser.
    warnings.simplefilter("ignore", DeprecationWarning)
    from tensorboard.plugin_util import markdown_to_safe_html


def _half_right(prompt, k, step):
    return box(prompt.reference if k == 0 else "0")


def test_the_panel_shows_a_right_and_a_wrong_rollout_with_its_figures(tmp_path):
    loggers = [board(tmp_path), CSVLogger(tmp_path)]  # The second one takes no text.
    pictures = [CreditPictures(every_n_batches=2), CreditPictures(every_n_batches=0)]
    run(6, *pictures, logger=loggers).fit(Scripted(_half_right), loader(*[prompts(2)] * 3))
    pages = panels(tmp_path)["train/rollouts"]
    # Batches 1 and 3 of two optimiser steps each.
    assert [step for step, _ in pages] == [2, 6]
    shown = markdown_to_safe_html(pages[0][1])
    heads = re.findall(r"<h3>(.*?)</h3>", shown)
    for head, wanted in zip(heads, ("right, reward 1, advantage +0.5", "wrong, reward 0, advantage -0.5"), strict=True):
        assert re.fullmatch(rf"{re.escape(wanted)}, \d+ tokens", head)
    blocks = re.findall(r"<pre><code>(.*?)\n</code></pre>", shown)
    reference = blocks[2]
    prompt = f"Compute {int(reference) - 1}+1."
    assert blocks == [prompt, box(reference), reference, prompt, box("0"), reference]


_HOSTILE = ["<", ">", "<!--", "-->", "<?", "<![CDATA[", "</pre>", "</code>", "<script>", "```", "~~~", "\n", "\n\n"]
_HOSTILE += ["    ", "\t", "|", "---", "# ", "* ", "1. ", "[a]: b", "&lt;", "\x02", "\x03", "\x00", "\r", "\u2028"]
_HOSTILE += ["\x1b[2J", "<div>", "<p ", "\\", "`", "\u202e", "wzxhzdk:0", "\ud800"]


@settings(max_examples=200, deadline=None)
@example("<div>\n\n```\n</code></pre>\n# x")
@example("\x02wzxhzdk:0\x03")
@given(st.lists(st.sampled_from(_HOSTILE) | st.text(max_size=5), max_size=12).map("".join))
def test_no_text_can_break_out_of_its_block(text):
    page = f"### head\n\n{code_block(encodable(text))}\n\n### next\n\n{code_block('after')}"
    shown = markdown_to_safe_html(page.encode("utf-8"))
    blocks = re.findall(r"<pre><code>(.*?)</code></pre>", shown, re.S)
    assert len(blocks) == 2
    assert shown.count("<") == 2 * 2 + 2 * 4, "no tag but those of two heads and two blocks"
    assert blocks[1] == "after\n"
    visible = [c for c in encodable(text) if c.isalnum()]
    if text.strip():
        assert [c for c in html.unescape(blocks[0]) if c.isalnum()] == visible


def test_empty_texts_and_conversations_are_shown():
    assert code_block(" \n ") == "    (empty)"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    assert prompt_text(Prompt(messages=messages, reference="4", task=TASK)) == "system: Be brief.\nuser: 2+2?"


def test_every_training_rollout_is_kept(tmp_path):
    run(3, KeepRollouts(), default_root_dir=tmp_path).fit(Scripted(_half_right), loader(*[prompts(2, "set")] * 9))
    files = sorted(p.name for p in (tmp_path / "rollouts").iterdir())
    assert files == ["step_00000002_rank_00000.parquet", "step_00000003_rank_00000.parquet"]
    rows = pq.read_table(tmp_path / "rollouts").to_pylist()
    assert len(rows) == 8
    tokenizer = Scripted(_half_right).tokenizer
    tokens = [*tokenizer(box("0"))["input_ids"], tokenizer.eos_token_id]
    assert [*rows[3]] == [name for name in TRAINING if name not in OPTIONAL]
    assert rows[3] == {
        "step": 2,
        "rank": 0,
        "dataset": "set",
        "problem": problem_id(prompts(2, "set")[1]),
        "prompt": "Compute 1+1.",
        "reference": "2",
        "response": box("0"),
        "prediction": "0",
        "reward": 0.0,
        "correct": False,
        "status": "wrong",
        "layer": "string",
        "advantage": -0.5,
        "finished": True,
        "num_tokens": len(tokens),
        "group": 1,
        "token_ids": tokens,
        "messages": '"Compute 1+1."',
        "columns": '{"problem": "1+1"}',
    }


def test_a_file_takes_text_that_is_not_unicode_and_batches_without_advantages(tmp_path):
    class Raw(Scripted):
        def rollouts(self, problems, num_samples):
            batch = super().rollouts(problems, num_samples)
            return graded(batch, batch.rewards, verdicts=batch.verdicts, texts=["\ud800 x"] * len(batch))

    run(2, KeepRollouts(), default_root_dir=tmp_path).fit(Raw(_half_right), loader(prompts(2)))
    rows = pq.read_table(tmp_path / "rollouts").to_pylist()
    assert {(row["response"], row["advantage"]) for row in rows} == {("? x", None)}


@pytest.mark.parametrize(("given", "trial", "left"), [(False, 0, [2]), (True, 0, [2, 8]), (True, 1, [2, 4, 8])])
def test_a_run_that_goes_back_to_an_earlier_checkpoint_keeps_no_rollouts_of_the_steps_after_it(
    given, trial, left, tmp_path, monkeypatch
):
    """Of a folder that is given, which others may share, those of the batch alone that `max_steps` cut."""
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for step, rank in ((2, 0), (4, 0), (4, 1), (8, 0)):
        (folder / f"step_{step:08d}_rank_{rank:05d}.parquet").touch()
    resumed = SimpleNamespace(ckpt_path="best.ckpt", is_global_zero=True, global_step=2, fast_dev_run=trial)
    monkeypatch.setattr("grail_lightning.app.callbacks.rollouts.RunFolder", lambda _: SimpleNamespace(path=tmp_path))
    batches_of_four_steps = module({"mini_batches": 4})
    KeepRollouts(folder=str(folder) if given else None).on_train_start(resumed, batches_of_four_steps)
    assert sorted({int(file.name.split("_")[1]) for file in folder.iterdir()}) == left
