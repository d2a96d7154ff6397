"""What users get wrong on the command line is one line; what is a fault of ours keeps its traceback."""

import configparser
import re
from pathlib import Path

import pytest

from grail_lightning.errors import EXTRAS
from tests.shell import SHORT, fails, main

ROOT = Path(__file__).parents[1]
OVERLONG = "--data.task.init_args.rewards=[{function: overlong, arguments: "


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.sampling.max_response_length=100000"], "must leave room for a prompt in the 4096 positions"),
        (["--model.credit=GRIAL"], "`model.credit` must be one of .*GRAIL, .* but got 'GRIAL'"),
        (["--model.control=Shufled"], "`model.control` must be one of AnswerOnly, Random, Shuffled, .*'Shufled'"),
        (["--data=MthData"], "`data` must be one of ArithmeticData, MathData, .* but got 'MthData'"),
        (["--model.credit.wmin=1"], "Option 'wmin' is not accepted"),
        (["--model.credit.w_min=9"], r"0 ≤ w_min ≤ w_max, but got 9.0 and 5.0"),
        (["--trainer.gradient_clip_val=1"], "set `--model.objective.max_grad_norm` instead"),
        (["--trainer.accumulate_grad_batches=2"], "set `--model.objective.token_budget` instead"),
        (["--trainer.strategy=fdsp"], "invalid strategy name: `strategy='fdsp'`"),
        (["--trainer.gradient_clip_algorithm=value"], "set `--model.objective.max_grad_norm`"),
        (["--trainer.enable_checkpointing=false"], "but got False. .* `--checkpoint.save_top_k=0`"),
        (["--trainer.barebones=true"], "`trainer.barebones` must be left out"),
        (["--trainer.precision=16-mixed"], "Use bf16-mixed, or 32-true"),
        (["--model.loading.dtype=float16"], "`loading.dtype` must not be float16 in training.* Use bfloat16"),
        (["--model.loading.lora.rank=0"], "`loading.lora.rank` must be at least 1, but got 0"),
        (["--model.loading.lora.alpha=.nan"], "`loading.lora.alpha` must be finite and positive, but got nan"),
        (["--model.loading.lora.dropout=1"], r"`loading.lora.dropout` must lie in \[0, 1\), but got 1"),
        (["--model.objective.kl_coefficient=.nan"], "`objective.kl_coefficient` must be finite .* got nan"),
        (["--model.sampling.stop=['']"], "strings of at least one character"),
        (["--model.policy=./nowhere"], "there is no folder './nowhere'"),
        (["--config=nowhere.yaml"], "File does not exist"),
        (["--ckpt_path=last"], "last.ckpt does not exist .*Train first"),
        (["--ckpt_path=nowhere.ckpt"], "nowhere.ckpt does not exist"),
        (["--data=MathData", "--data.train.path=nowhere.jsonl"], "'nowhere.jsonl' does not exist"),
        (["--trainer.accelerator=gpu"], "No supported gpu backend|cuda"),
        (["--model.objective.group_size=1"], "`objective.group_size` must be at least 2, but got 1"),
        (["--model.optimizer=nowhere.Adam"], "`model.optimizer` needs nowhere, which is not installed. Is it"),
        (["--model.sampling.temperature=hot"], "model.sampling.temperature.*Got value: hot"),
        ([f"{OVERLONG}{{limit: 100}}}}]"], "The reward `overlong` must get `arguments` .*missing 1 required"),
        (
            [f"{OVERLONG}{{limit: 100, buffer: 9}}}}]"],
            "`overlong` must begin below .*longest response, .* 44, but",
        ),
        (["--evaluation.pass_at=[8]"], "must lie between 1 and `num_samples`"),
    ],
)
def test_a_mistake_is_one_line_before_a_model_is_loaded(options, message, capsys, monkeypatch):
    monkeypatch.setattr("grail_lightning.module.load_policy", lambda *_, **__: pytest.fail("a model was loaded"))
    assert re.search(message, fails(capsys, "fit", *SHORT, *options))


def test_what_an_extra_would_bring_is_named(capsys, monkeypatch):
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert EXTRAS.items() >= {("torchao", "torchao"), ("peft", "lora")}
    assert set(EXTRAS.values()) <= set(setup["options.extras_require"])
    monkeypatch.setitem(EXTRAS, "nowhere", "torchao")
    said = fails(capsys, "fit", *SHORT, "--model.optimizer=nowhere.AdamW8bit")
    assert (
        "`model.optimizer` needs nowhere, which is not installed. Run: pip install 'grail-lightning[torchao]'." in said
    )


def test_a_wrong_key_in_a_file_is_named(capsys, tmp_path):
    (tmp_path / "wrong.yaml").write_text("model:\n  polcy: arithmetic\n")
    assert "model.polcy" in fails(capsys, "fit", *SHORT, "--config=wrong.yaml")


def test_the_traceback_is_shown_on_request(capsys, monkeypatch):
    monkeypatch.setenv("GRAIL_DEBUG", "1")
    with pytest.raises(SystemExit):
        main(["fit", *SHORT, "--trainer.gradient_clip_val=1"])
    assert "Traceback" in capsys.readouterr().err


def test_an_error_of_ours_inside_a_run_keeps_its_traceback(monkeypatch):
    """A mistake of the user's is one line; a fault of a library's is not hidden."""

    def broken(*_):
        raise RuntimeError("a fault")

    monkeypatch.setattr("grail_lightning.module.GrailModule.share", broken)
    with pytest.raises(RuntimeError, match="a fault"):
        main(["fit", *SHORT])
