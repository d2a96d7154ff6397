"""`python -m grail_lightning.plan`: closed forms of memory, as a user meets them."""

import json
import re

import pytest

from grail_lightning.app.plan.main import main
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
    assert "model.credit" in refusal(capsys, main, *QUICK, "--model.credit=NoSuchMethod")
    assert "no_such_model" in refusal(capsys, main, *QUICK, "--model.policy=./no_such_model")


def of_24_gib(capsys, *arguments):
    """What the plan for one GPU of 24 GiB says behind its table: the answer, each change with what it saves, a set."""
    main([*arguments, "--gpus", "1", "--gpu_memory_gib", "24"])
    _, _, said = capsys.readouterr().out.partition("\n\n")
    answer, *lines = said.splitlines()
    alone = {}
    for line in lines:
        if figures := re.match(r"((?: +-?[\d.]+)+)  .*?(--.*)$", line):
            alone[figures[2]] = sum(map(float, figures[1].split()))
    return answer, alone, [line.strip() for line in lines if line.startswith("  --")], lines


def test_what_does_not_fit_is_answered_with_options_of_which_the_plan_holds(qwen, capsys):
    small = "--model.sampling.max_response_length=1024", "--trainer.strategy=auto", "--model.loading.lora.rank=16"
    answer, alone, together, lines = of_24_gib(capsys, *qwen, *small)
    assert answer.startswith("It does not fit 24 GiB on 1 device: it needs ")
    assert [*alone.values()] == sorted(alone.values(), reverse=True), "the largest effect first"
    assert len(alone) > 2
    assert min(alone.values()) > 0
    assert together
    after, *_ = of_24_gib(capsys, *qwen, *small, *(word for change in together for word in change.split()))
    needed = float(after.split("it needs ")[1].split()[0])
    assert after.startswith("It fits 24 GiB on 1 device")
    assert lines[-1].startswith(f"and then needs {needed} GiB (")
    # None of them is superfluous.
    for change in together:
        others = [word for other in together if other != change for word in other.split()]
        assert of_24_gib(capsys, *qwen, *small, *others)[0].startswith("It does not fit")


# Sizes as in the config.json of each model.
QWEN2 = {"model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864}
QWEN2 |= {"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}
SMALL = QWEN | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
HYBRID = {"model_type": "qwen3_5_text", "vocab_size": 248_320, "hidden_size": 1024, "intermediate_size": 3584}
HYBRID |= {"num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256}
HYBRID |= {"linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128}
HYBRID |= {"linear_value_head_dim": 128, "tie_word_embeddings": True}
HYBRID |= {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6}


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ("configs/gsm8k.yaml", QWEN2),
        ("configs/gsm8k.yaml", SMALL),
        ("configs/gsm8k.yaml", HYBRID),
        ("configs/gsm8k_lora.yaml", QWEN),
        ("docs/examples/first_run.yaml", SMALL),
    ],
    ids=["Qwen2.5-0.5B", "Qwen3-0.6B", "Qwen3.5-0.8B", "Qwen3-4B, adapters", "first run, Qwen3-0.6B"],
)
def test_the_configs_for_one_gpu_fit_24_gib(config, sizes, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    answer, *_ = of_24_gib(capsys, f"--config={config}", f"--model_config={tmp_path / 'config.json'}")
    assert answer.startswith("It fits 24 GiB on 1 device: it needs ")


def test_what_cannot_fit_is_said(qwen, capsys):
    main([*qwen, "--gpus", "1", "--gpu_memory_gib", "4"])
    assert capsys.readouterr().out.endswith("All together are not enough: take more devices, or a smaller model.\n")
    main([*qwen, "--gpus", "1", "4", "--gpu_memory_gib", "80"])
    assert "It fits 80 GiB on 4 devices: it needs " in capsys.readouterr().out, "those of the run"


def test_layers_with_linear_attention_have_a_state_and_no_cache(tmp_path, capsys):
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": "qwen3_5_text", "vocab_size": 448, "num_hidden_layers": 4, "layer_types": kinds} | sizes
    config |= {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config | {"linear_key_head_dim": 8, "linear_value_head_dim": 16}))
    (plan,) = plans(capsys, *QUICK, f"--model_config={tmp_path / 'config.json'}", "--gpus", "1")
    rows, tokens = 16 * 8, 11 + 64
    assert plan["sampling"]["KV cache"] == pytest.approx(1.03 * rows * tokens * 2 * 16 * 8)
    assert plan["sampling"]["recurrent states"] == rows * 3 * 4 * 8 * 16 * 4
