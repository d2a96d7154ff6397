"""`python -m grail_lightning.plan`: closed forms of memory, as a user meets them."""

import json
import re

import pytest

from grail_lightning.app.plan import main
from tests.shell import refusal

QUICK = ["--config=configs/quickstart.yaml", "--prompt_tokens=11"]
# Qwen3-4B, as its hub states it.
QWEN = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "tie_word_embeddings": True,
}
PARAMETERS = 4_022_468_096


@pytest.fixture
def qwen(tmp_path):
    """The arguments for the published run of Qwen3-4B."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return ["--config=configs/qwen3_4b_grail.yaml", f"--model_config={tmp_path / 'config.json'}"]


def plans(capsys, *arguments):
    main([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def total(plan, phase):
    return sum(plan[phase].values())


def test_the_quickstart_is_planned_as_a_user_does_it(capsys):
    main([*QUICK, "--gpus", "1", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "arithmetic: 845,184 parameters, 845,184 trained"
    assert lines[1].split() == ["GiB", "of", "each", "device", "1", "2"]
    for name in ("sampling: KV cache", "peak of update", "fits", "a checkpoint on disk"):
        assert any(line.strip().startswith(name) for line in lines), name
    assert all(len(line) <= 120 for line in lines)


def test_weights_gradients_and_moments_take_sixteen_bytes_a_parameter_and_fsdp2_divides_them(qwen, capsys):
    one, eight = plans(capsys, *qwen, "--gpus", "1", "8")
    kept = ("weights", "optimizer state", "gradients")
    assert sum(one["update"][name] for name in kept) == pytest.approx(16 * PARAMETERS)
    assert sum(eight["update"][name] for name in kept) == pytest.approx(2 * PARAMETERS)
    assert one["sampling"]["gathered weights"] == 0 < eight["sampling"]["gathered weights"]
    assert one["checkpoint"] == eight["checkpoint"] == 12 * PARAMETERS
    # One row's keys in float32 and values in bfloat16: 36 blocks of 8 heads of 128.
    row = (1024 + 4096) * 36 * 1024 * 6
    assert one["sampling"]["KV cache"] == pytest.approx(25 * row, rel=0.05)


def test_a_gpu_copies_grouped_keys_and_an_unfused_optimiser_a_temporary(qwen, capsys):
    (plan,) = plans(capsys, *qwen, "--gpus", "1")
    # 25 rows of 1,024 + 4,096 tokens in one block: keys in float32 and values in bfloat16 for each of 32 heads of 128.
    assert plan["sampling"]["grouped keys and values"] == 25 * (1024 + 4096) * 32 * 128 * 6
    assert plan["step"]["temporary of the optimizer"] == 0, "it is fused"
    unfused = "--model.optimizer.fused=null", "--model.optimizer.foreach=true"
    one, two = plans(capsys, *qwen, *unfused, "--trainer.strategy=ModelParallelStrategy", "--gpus", "1", "2")
    assert one["step"]["temporary of the optimizer"] == 4 * PARAMETERS
    assert two["step"]["temporary of the optimizer"] == 2 * PARAMETERS
    (on_cpu,) = plans(capsys, *qwen, *unfused, "--trainer.accelerator=cpu", "--gpus", "1")
    assert on_cpu["step"]["temporary of the optimizer"] == on_cpu["sampling"]["grouped keys and values"] == 0


@pytest.mark.slow
def test_each_option_that_saves_memory_saves_it(qwen, capsys):
    (before,) = plans(capsys, *qwen, "--gpus", "1")
    for phase, option in (
        ("sampling", "--model.engine=HFEngine --model.engine.cache_tokens=32768"),
        ("update", "--model.execution.token_budget=8192"),
        ("update", "--model.loading.lora.rank=16"),
        ("update", "--model.optimizer=torch.optim.SGD --model.optimizer.lr=0.1"),
        ("update", "--model.loading.dtype=bfloat16 --trainer.precision=bf16-true --model.loading.master_weights=false"),
    ):
        (after,) = plans(capsys, *qwen, "--gpus", "1", *option.split())
        assert total(after, phase) < total(before, phase), option
    (without,) = plans(capsys, *qwen, "--gpus", "1", "--model.loading.gradient_checkpointing=false")
    assert total(without, "update") > 2 * total(before, "update")
    (with_kl,) = plans(capsys, *qwen, "--gpus", "1", "--model.objective.kl_coefficient=0.1")
    assert total(with_kl, "update") - total(before, "update") == pytest.approx(4 * PARAMETERS), "a second copy"


def test_the_state_of_an_optimiser_follows_its_options(capsys):
    for name, option, state in (
        ("SGD", "weight_decay=0.1", 0),
        ("SGD", "momentum=0.9", 4),
        ("AdamW", "amsgrad=true", 12),
        ("Adagrad", "eps=0.1", 4),
    ):
        made = [f"--model.optimizer=torch.optim.{name}", "--model.optimizer.lr=0.1", f"--model.optimizer.{option}"]
        (plan,) = plans(capsys, *QUICK, "--gpus", "1", *made)
        assert plan["update"]["optimizer state"] == state * 845_184, option
        assert plan["checkpoint"] == (4 + state) * 845_184


def test_the_models_that_a_credit_method_needs_are_planned(capsys):
    permuted = "PermutedRewards --model.credit.inner=DGPO"
    for credit, second in (("DGPO", 0), (permuted, 0), ("PRIME", 16)):
        name, *more = credit.split()
        (plan,) = plans(capsys, *QUICK, "--gpus", "1", f"--model.credit={name}", *more)
        assert plan["update"]["reference"] == 4 * 845_184
        assert plan["update"]["model of the credit method"] == second * 845_184
        assert plan["checkpoint"] == (12 + (12 if second else 0)) * 845_184


def test_ranks_on_a_machine_without_gpus_share_its_memory(qwen, capsys, monkeypatch):
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 2**10, "SC_PHYS_PAGES": 2**20 * 300}.get)
    main([*qwen, "--trainer.accelerator=cpu", "--gpus", "1", "8"])
    (fits,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fits 300 GiB")]
    assert fits.split()[-2:] == ["yes", "NO"]


def test_a_mistake_is_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    on_the_hub = refusal(capsys, main, *QUICK, "--model.policy=owner/of_no_model")
    assert "'owner/of_no_model' cannot be loaded" in on_the_hub
    assert "For a plan its config.json is enough: --model_config FILE." in on_the_hub
    pictures = refusal(capsys, main, "--config=configs/quickstart_charts.yaml")
    assert "models of text alone, but got Idefics3Config" in pictures
    (tmp_path / "empty.json").write_text("{}")
    for file in ("nowhere.json", "empty.json"):
        said = refusal(capsys, main, *QUICK, f"--model_config={tmp_path / file}")
        assert re.search(rf"`--model_config` must be the config.json of a model, but got \S+{file}: \S", said)
    assert "model.credit" in refusal(capsys, main, *QUICK, "--model.credit=Nothing")
    assert "no_such_model" in refusal(capsys, main, *QUICK, "--model.policy=./no_such_model")
