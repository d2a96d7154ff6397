"""`python -m grail_lightning.plan` as a user meets it."""

import json
import subprocess
import sys

import pytest

from grail_lightning.plan.command import main
from tests.plan.test_shapes import PUBLISHED
from tests.shell import refusal
from tests.test_published import METHODS, MODELS

QUICK = "--config=configs/quickstart.yaml"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def _plan(capsys, *arguments):
    main([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def _fails(capsys, *arguments):
    return refusal(capsys, main, *arguments)


def test_the_quickstart_is_planned_as_a_user_does_it():
    command = [sys.executable, "-m", "grail_lightning.plan", QUICK, "--gpus", "1", "2", "--prompt_tokens", "11"]
    done = subprocess.run([*command, "--rates", "h100"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("arithmetic (config: ")
    assert "845184 parameters, all trained" in lines[0]
    (head,) = (line for line in lines if line.startswith("MiB of each process"))
    assert head.split()[4:] == ["1", "2", "DDP"]
    for name in ("weights", "sampling: KV cache", "update: gradients", "peak of update", "seconds of sampling"):
        assert any(line.strip().startswith(name) for line in lines), name
    assert all(len(line) <= 120 for line in lines)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", MODELS)
def test_each_published_run_is_planned(model, method, capsys):
    files = [f"--config=configs/published/{name}.yaml" for name in (model, method)]
    found = _plan(capsys, *files, "--gpus", "1", "4", "8")
    assert found["policy"] == MODELS[model]
    assert found["shapes"]["parameters"] == PUBLISHED[MODELS[model]]
    one, four, eight = found["plans"]
    assert (one["strategy"], eight["strategy"]) == ("single", "fsdp2")
    assert four["fits"], "the configs ask for four GPUs"
    phases = one["phases"]
    # Weights, gradients and two moments in float32 on one device; an eighth of them on each of eight.
    assert phases["optimizer step"]["total"] == pytest.approx(16 * PUBLISHED[MODELS[model]], rel=0.01)
    assert eight["phases"]["optimizer step"]["total"] == pytest.approx(2 * PUBLISHED[MODELS[model]], rel=0.01)
    assert ("credit" in phases) == (method == "oar_g"), "GRAIL's saliency comes with the update's forward pass"
    assert all(phase["total"] == sum(phase["parts"].values()) for phase in phases.values())
    assert one["fits"] == (max(p["total"] for p in phases.values()) <= 0.92 * 80 * 2**30)
    assert one["seconds"]["update"] > eight["seconds"]["update"] > 0
    assert (one["seconds"]["credit"] > 0) == (method != "grpo")


def test_the_old_names_are_the_same_runs(capsys):
    assert _plan(capsys, "--config=configs/qwen3_4b_grail.yaml", "--gpus=4") == _plan(
        capsys, "--config=configs/published/qwen3_4b.yaml", "--config=configs/published/grail.yaml", "--gpus=4"
    )


def test_overrides_are_those_of_fit(capsys):
    base = _plan(capsys, QUICK, "--gpus=1", "--rates=h100")["plans"][0]["phases"]
    options = ["--model.loading.lora.rank=4", "--model.execution.token_budget=256", "--model.credit=Uniform"]
    found = _plan(capsys, QUICK, *options, "--gpus=1", "--rates=h100")
    assert found["shapes"]["trainable"] < 0.2 * found["shapes"]["parameters"]
    phases = found["plans"][0]["phases"]
    assert phases["update"]["parts"]["activations"] < base["update"]["parts"]["activations"]
    assert phases["optimizer step"]["parts"]["optimizer state"] == 8 * found["shapes"]["trainable"]


def test_any_architecture_is_planned_from_its_config(capsys, tmp_path):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    more = {"vocab_size": 500, "intermediate_size": 96, "head_dim": 16, "sliding_window": 32}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma2", **sizes, **more}))
    options = ["--model.policy=some/gemma", f"--model_config={tmp_path}", "--rates=a100", "--gpus=1"]
    found = _plan(capsys, QUICK, *options)
    assert found["config"].endswith("config.json")
    assert found["shapes"]["blocks"] == 3


@pytest.mark.parametrize("kind", ["mamba", "qwen3_moe"])
def test_an_architecture_that_cannot_be_planned_is_one_line(kind, capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "hidden_size": 64, "num_hidden_layers": 2}))
    line = _fails(capsys, QUICK, "--model.policy=some/model", f"--model_config={tmp_path}", "--gpus=1", "--rates=h100")
    assert f"must be a decoder of attention and dense layers to be planned, but {kind} is not" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "0"], "`--gpus` must lie between 1 and the 16 prompts of a batch"),
        (["--gpus", "32"], "Raise `data.prompts_per_batch`"),
        (["--gpus", "many"], "invalid int value: 'many'"),
        (["--gpu_memory_gib", "0"], "`--gpu_memory_gib` must be positive"),
        (["--reserve", "1"], r"`--reserve` must lie in [0, 1)"),
        (["--rates", "b200"], "`--rates` must be a100, h100, h200, measured"),
        (["--response_tokens", "65"], "`--response_tokens` must lie between 1 and the limit of 64"),
        (["--prompt_tokens", "-1"], "`--prompt_tokens` must be at least 1"),
        (["--model.policy=some/model"], "cannot be loaded"),
        (["--model.policy=some/model", "--model_config=nowhere"], "must be a model's config.json"),
        (["--model.credit=GRIAL"], "Did you mean GRAIL?"),
        (["--model.execution.token_budget=0"], "`execution.token_budget` must be at least 1"),
        (["--trainer.strategy=deepspeed"], "`trainer.strategy` must be auto, ddp or ModelParallelStrategy"),
        (["--modle.policy=x"], "no option"),
        (["--trainer.precision=16-mixed"], "needs loss scaling"),
    ],
)
def test_a_mistake_is_one_line(options, message, capsys):
    assert message in _fails(capsys, QUICK, *options)


def test_a_method_without_a_model_is_one_line(capsys):
    assert "`model.policy` must be given" in _fails(capsys, "--config=configs/published/grail.yaml")
