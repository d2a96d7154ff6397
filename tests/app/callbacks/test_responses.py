"""Graded responses of the first batch are shown on the terminal, whatever a model has written, and what they lack."""

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar

import grail_lightning
from grail_lightning import CodeTask, EnvironmentTask, Evaluation, Prompt, ShowResponses
from grail_lightning.app.callbacks.progress import BatchProgressBar
from grail_lightning.app.callbacks.responses import (
    few_are_right,
    first_rows,
    remark_on,
    response_lines,
    what_it_knows,
)
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.records.picture import with_pictures
from tests import runs
from tests.app.callbacks.scripted import TASK, Scripted, box, loader, prompts, run
from tests.batches import graded, in_turns
from tests.shell import EVALUATED, SHORT, main


def _mixed(prompt, k, step):
    return f"I add.\n{box(prompt.reference if k else '0')}"


RIGHT = [
    "prompt    Compute 0+1.",
    "response  I add.",
    "          \\boxed{0}",
    "answer    0 (reference 1)",
]


def _blocks(printed):
    """The responses that were shown: the lines of each, and then what follows them."""
    return [part.splitlines() for part in printed.split("\n\n") if part.startswith("prompt  ")]


@pytest.mark.parametrize("validated", [True, False])
def test_a_fit_shows_three_responses_of_its_first_batch_and_no_more(validated, capsys):
    module, held_out = Scripted(_mixed), [loader(prompts(5))] * validated
    run(4, Evaluation(), ShowResponses()).fit(module, loader(*[prompts(4)] * 2), *held_out)
    printed = capsys.readouterr().out
    first, second, third = _blocks(printed)
    assert first[:4] == RIGHT
    tokens = len(module.tokenizer(f"I add.\n{box(0)}")["input_ids"]) + 1
    assert first[4:] == [f"verdict   wrong, reward 0, {tokens} tokens"]
    assert (second[0], third[0]) == ("prompt    Compute 1+1.", "prompt    Compute 2+1.")
    assert f"3 of the first {5 if validated else 8} responses (`responses.number: 0` shows none)" in printed
    assert ("held-out accuracy" in printed.splitlines()[-1]) == validated


@pytest.mark.parametrize("bar", [BatchProgressBar, RichProgressBar])
def test_responses_are_shown_beside_progress_bars(bar, capsys):
    shown = ShowResponses(1), Evaluation(), bar()
    trainer = run(2, *shown, enable_progress_bar=True)
    trainer.fit(Scripted(_mixed), loader(prompts(2)), loader(prompts(2)))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    start = next(k for k, line in enumerate(lines) if line == RIGHT[0])
    assert lines[start : start + 4] == RIGHT


def test_none_are_shown_if_none_are_asked_for_and_none_of_a_test(capsys):
    run(2, ShowResponses(0)).fit(Scripted(_mixed), loader(prompts(2)))
    run(1, ShowResponses()).test(Scripted(_mixed), loader(prompts(2)), verbose=False)
    run(1, ShowResponses()).predict(Scripted(_mixed), loader(prompts(2)), return_predictions=False)
    assert capsys.readouterr().out == ""


@pytest.fixture(scope="module")
def policy():
    return load_policy("arithmetic")


def _batch(texts, references=None, finished=True, **changes):
    """Rows of one prompt with these texts, whatever their ids are."""
    module = Scripted(lambda prompt, k, step: box(0))
    made = module.rollouts(prompts(1), len(texts))
    verdicts = [module.verdict(text, prompt) for text, prompt in zip(texts, made.prompts, strict=True)]
    ends = torch.full((len(texts),), finished)
    correct = torch.tensor([verdict.correct for verdict in verdicts])
    changed = {"texts": texts, "verdicts": verdicts, "finished": ends, "correct": correct, "rewards": correct.float()}
    return made.replace(**changed | changes)


HOSTILE = "\x1b[2J\x1b]0;title\x07red\u202edne\r\nprompt    forged\x00\ud800\u2028\x9b31m"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_no_text_of_a_model_reaches_the_terminal_with_control_characters(encoding, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    monkeypatch.setattr(sys, "stdout", terminal)
    module = Scripted(_mixed)
    made = module.rollouts(prompts(1), 2)
    verdicts = [replace(verdict, prediction=HOSTILE, status="wrong") for verdict in made.verdicts]
    hostile = [replace(prompt, messages=f"{HOSTILE} é …", reference=HOSTILE) for prompt in made.prompts]
    made = made.replace(texts=[HOSTILE] * 2, verdicts=verdicts, prompts=hostile)
    monkeypatch.setattr(module, "rollouts", lambda *_: made)
    run(2, ShowResponses()).fit(module, loader(prompts(1)))
    terminal.flush()
    printed = terminal.buffer.getvalue().decode(encoding)
    assert all(character.isprintable() or character == "\n" for character in printed)
    assert "\\x1b[2J" in printed
    assert "\\u202edne" in printed
    forged = [line for line in printed.splitlines() if "forged" in line and line.startswith("prompt")]
    assert not forged, "lines of a model are indented"


def test_long_texts_are_shortened_to_their_ends_and_prompts_to_their_last_part():
    batch = _batch(["a" * 5000 + "z", "line\n" * 300])
    batch.prompts[0] = replace(batch.prompts[0], messages="x" * 9000 + " What?")
    lines = response_lines(batch, 0)
    assert lines[0].startswith("prompt    … (8,706 characters) … xxx")
    assert lines[0].endswith(" What?")
    assert lines[1].startswith("response  aaa")
    assert " … (4,301 characters) … aaa" in lines[1]
    assert lines[1].endswith("az")
    assert max(map(len, lines)) < 800
    many = response_lines(batch, 1)
    assert len(many) < 20
    assert any(line.endswith(" lines) …") for line in many)


def test_what_became_of_a_response_is_said():
    batch = _batch(["no answer", box(1), box(7)], finished=False)
    batch = batch.replace(rewards=torch.tensor([-0.25, 1.5, torch.nan]))
    verdicts = [response_lines(batch, row)[-2:] for row in range(3)]
    assert verdicts[0][0] == "answer    none (reference 1)"
    assert verdicts[0][1].startswith("verdict   missing, reward -0.25, ")
    assert verdicts[0][1].endswith(" tokens, cut at its limit")
    assert verdicts[1][1].startswith("verdict   right, reward 1.5, ")
    assert verdicts[2][1].startswith("verdict   wrong, no score, ")


def test_turns_and_pictures_are_shown_as_text(policy):
    prompt = TASK.prompt({"problem": "1+1"})
    from PIL import Image

    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]}]
    asked = with_pictures(asked, [Image.new("RGB", (4, 4))], "row 1")
    made = in_turns(policy, [prompt], [["7+5=", "12", "1+1=2"], ["1+2=3"]], group_size=2)
    batch = graded(made).replace(prompts=[replace(prompt, messages=asked)] * 2)
    lines = response_lines(batch, 0)
    assert lines[0] == "prompt    user: <image>How many?"
    assert lines[1] == "response  [turn 1, score 0.25]"
    assert "              7+5=" in lines
    assert "          [done call of 'find']" in lines
    assert "          [turn 2, score 0.25]" in lines


def test_the_rows_shown_are_of_different_problems_first():
    batch = _batch([""] * 6).replace(group=torch.tensor([0, 0, 1, 1, 2, 2]))
    assert first_rows(batch, 3) == [0, 2, 4]
    assert first_rows(batch, 4) == [0, 2, 4, 1]
    assert first_rows(batch, 9) == [0, 2, 4, 1, 3, 5]


REWARDED = {"rewards": torch.tensor([0.0, 0.5])}


@pytest.mark.parametrize(
    ("texts", "changes", "said"),
    [
        (["no box", box(0)], {"finished": False}, "All 2 responses were cut at 24 tokens. Raise `sampling.max_resp"),
        (["no box", "nor here"], {}, "None of 2 responses has an answer in the form .* `data.task.answer`"),
        (["no box", box(0)], {}, "None of 2 responses is right. .* easier problems"),
        (["no box", box(1)], {}, None),
        (["no box", "nor here"], REWARDED, None),
        (["no box", box(0)], {"rewards": torch.tensor([torch.nan, 0.5])}, "None of 2 responses is right"),
    ],
)
def test_what_all_responses_lack_is_one_line_with_what_to_look_at(texts, changes, said):
    remark = remark_on(_batch(texts, **changes), "sampling.max_response_length", 24)
    assert "\n" not in remark
    if said is None:
        assert remark == ""
    else:
        start, *rest = said.split(" .* ")
        assert remark.startswith(start)
        assert all(part in remark for part in rest)


@pytest.mark.parametrize(
    ("statuses", "named"),
    [
        (("unevaluated",), "`data.task.answer.evaluated"),
        (("unknown_tokens",), "tokenizer"),
        (("timeout",), "machine"),
        (("crashed",), "machine"),
        (("unscored",), "None for all"),
        (("capped",), "`data.task.compare`"),
        (("wrong", "timeout"), "`data.task.compare`"),
    ],
)
def test_the_remark_names_what_the_status_of_all_responses_points_to(statuses, named):
    batch = _batch([box(0)] * 2)
    each = zip(batch.verdicts, statuses * (2 // len(statuses)), strict=True)
    batch = batch.replace(verdicts=[replace(verdict, status=status) for verdict, status in each])
    remark = remark_on(batch, "limit", 24)
    assert named in remark
    assert ("`data.task.compare`" in remark) == (named == "`data.task.compare`")


class Asks:
    """An environment that pays nothing."""

    def reset(self, **row):
        """Begin."""

    def look(self) -> str:
        """Look around."""
        return "nothing"

    def get_reward(self):
        """None at all."""
        return 0.25


def test_a_rollout_that_a_reward_judges_has_no_answer_to_compare():
    """A reward is no answer, and a program is not compared with its reference."""
    task = EnvironmentTask(Asks)
    prompt = task.prompt({"problem": "Go.", "answer": None})
    batch = _batch(["One.", "Two."])
    paid = [replace(prompt, columns=prompt.columns | {"environment_reward": reward}) for reward in (0.25, None)]
    batch = batch.replace(prompts=paid, verdicts=[task.verdict(own) for own in paid])
    for row, status in enumerate(("wrong", "unscored")):
        lines = response_lines(batch, row)
        assert not [line for line in lines if line.startswith("answer")]
        assert lines[-1].startswith(f"verdict   {status}, ")
    assert "`data.task.solved_at`" in remark_on(batch, "limit", 24)
    code = CodeTask()
    program = replace(prompt, task=code)
    batch = _batch([box(0)] * 2).replace(prompts=[program] * 2)
    assert "`data.task.compare`" not in remark_on(batch, "limit", 24)


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_a_share_of_right_responses_from_which_hardly_a_group_can_learn_is_told(right):
    batch = _batch([box(1)] * right + [box(0)] * (40 - right))
    remark = few_are_right(batch, 8)
    # Of groups of 8 with 1 right response in 40, 1 - 0.975^8 = 0.183 have a right one.
    assert ("Only 1 of 40 responses is right" in remark and "at most 18% of the groups of 8" in remark) == (right == 1)
    assert (remark == "") == (right >= 2)
    shaped = batch.rewards.clone()
    shaped[-1] = 0.5
    assert few_are_right(batch.replace(rewards=shaped), 8) == "", "wrong responses differ in their reward"


def test_the_remark_says_what_a_packaged_policy_knows(capsys):
    assets = Path(grail_lightning.__file__).parent / "worlds" / "assets"
    for name in sorted(folder.name for folder in assets.iterdir() if (folder / "config.json").is_file()):
        assert f"`{name}` knows " in what_it_knows(name)
    assert what_it_knows("Qwen/Qwen3-0.6B") == what_it_knows(object()) == ""
    run(2, ShowResponses()).fit(Scripted(lambda *_: box("none")), loader(prompts(2)))
    last = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert last.startswith("None of 4 responses is right")
    assert last.endswith("five numbers from 1 to 9, as `Compute 7+5-3+8-9.`, and nothing else.")


def test_the_remark_is_the_last_line_below_the_responses(capsys):
    run(2, ShowResponses()).fit(Scripted(lambda *_: "no box"), loader(prompts(2)))
    printed = capsys.readouterr().out
    assert printed.rstrip().splitlines()[-1].startswith("None of 4 responses has an answer in the form")


def test_the_command_line_shows_them_by_default_and_not_if_it_is_told(capsys, tmp_path, monkeypatch):
    (tmp_path / "configs").symlink_to(runs.__file__.replace("tests/runs.py", "configs"))
    monkeypatch.chdir(tmp_path)
    one = [option for option in SHORT if "max_steps" not in option]
    main(["fit", *one, "--trainer.max_steps=1"])
    said = capsys.readouterr().out
    assert said.count("\nverdict   ") == 3
    assert said.splitlines()[-1].startswith("held-out accuracy: ")
    main(["validate", *EVALUATED])
    assert capsys.readouterr().out.count("\nverdict   ") == 3
    main(["validate", *EVALUATED, "--responses.number=0"])
    assert "verdict   " not in capsys.readouterr().out


def test_a_prompt_without_a_reference_names_none():
    batch = _batch([box(1)])
    batch.prompts[0] = Prompt(messages="Say 1.", reference="", task=TASK)
    assert response_lines(batch, 0)[-2] == "answer    1"
