"""Numbers of parameters and the optimiser's state, beside those of real models and of real steps."""

import json
from functools import partial

import pytest
import torch
from transformers import AutoConfig

from grail_lightning.distributed.master_weights import MasterWeights
from grail_lightning.plan.published import CONFIGS
from grail_lightning.plan.shapes import build, count, model_config, optimizer_bytes
from grail_lightning.policy import Loading, LoRA, load_policy
from grail_lightning.policy.options import read_config
from tests.plan.plans import settings

# From the models' cards, and summed by hand over their layers.
PUBLISHED = {
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "OctoThinker/OctoThinker-3B-Short-Base": 3_212_749_824,
    "OctoThinker/OctoThinker-8B-Short-Base": 8_030_261_248,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": 8_030_261_248,
}
LOADINGS = [Loading(), Loading(dtype="bfloat16"), Loading(lora=LoRA(rank=4)), Loading(dtype="bfloat16", lora=LoRA())]


@pytest.mark.parametrize("loading", LOADINGS, ids=str)
def test_parameters_are_those_of_the_loaded_policy(loading):
    real = load_policy("arithmetic", loading)
    found = count(build(read_config("arithmetic"), settings(loading=loading)))
    assert found == count(real)
    assert found.parameters == sum(p.numel() for p in real.parameters())
    assert found.trainable == sum(p.numel() for p in real.parameters() if p.requires_grad)
    assert found.weight_bytes == sum(p.nbytes for p in real.parameters())
    assert found.blocks * found.block_bytes < found.weight_bytes


def test_the_published_models_have_the_sizes_of_their_cards():
    assert CONFIGS.keys() == PUBLISHED.keys()
    for name, number in PUBLISHED.items():
        config, source = model_config(settings(policy=name))
        assert source == "built in"
        shapes = count(build(config, settings(policy=name)))
        assert shapes.parameters == number
        assert shapes.tied == (name in ("Qwen/Qwen3-4B", "OctoThinker/OctoThinker-3B-Short-Base"))


def test_the_parameters_of_a_llama_by_hand():
    # Two layers, width 8, 2 heads of 4 and 1 of keys and values, gate, up and down of 16, vocabulary 10, head apart.
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    widths = {"hidden_size": 8, "intermediate_size": 16, "vocab_size": 10}
    config = AutoConfig.for_model("llama", num_hidden_layers=2, tie_word_embeddings=False, **heads, **widths)
    found = count(build(config, settings()))
    block = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16 + 2 * 8
    assert found.parameters == 2 * block + 2 * 10 * 8 + 8
    assert found.linear == 2 * (block - 16) + 80
    assert (found.block_bytes, found.largest, found.heads) == (4 * block, 128, 8)


OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
    "fused AdamW": partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "AMSGrad": partial(torch.optim.AdamW, lr=1e-3, amsgrad=True),
    "SGD": partial(torch.optim.SGD, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "Adafactor": partial(torch.optim.Adafactor, lr=1e-3),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("loading", [Loading(), Loading(dtype="bfloat16"), Loading(lora=LoRA())], ids=str)
def test_the_optimizers_state_is_that_of_a_real_step(name, loading):
    """With master weights the state is in float32, whatever the dtype of the weights."""
    chosen = settings(loading=loading, optimizer=OPTIMIZERS[name], optimizer_name=f"torch.optim.{name}")
    planned, _ = optimizer_bytes(build(read_config("arithmetic"), chosen), chosen)
    trained = {n: p for n, p in load_policy("arithmetic", loading).named_parameters() if p.requires_grad}
    weights = MasterWeights(trained, {}).parameters
    optimizer = OPTIMIZERS[name](weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    entries = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    assert planned == sum(value.nbytes for value in entries if value.dim())


def test_what_a_step_allocates_besides_depends_on_the_implementation():
    """A step over all tensors at once, the default on GPUs, needs a copy of the second moments; a fused one nothing."""
    policy = build(read_config("arithmetic"), settings())
    several = optimizer_bytes(policy, settings(device="cuda"))[1]
    one = optimizer_bytes(policy, settings())[1]
    fused = settings(optimizer=OPTIMIZERS["fused AdamW"])
    assert several >= 4 * count(policy).trainable > one > 0
    assert optimizer_bytes(policy, fused)[1] == 0


def test_the_state_of_8_bit_optimizers_is_known():
    chosen = settings(optimizer_name="torchao.optim.AdamW8bit")
    state, _ = optimizer_bytes(build(read_config("arithmetic"), chosen), chosen)
    assert state == round(2.1 * count(build(read_config("arithmetic"), chosen)).trainable)


def test_an_optimizer_that_needs_data_is_refused():
    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("no data")

    chosen = settings(optimizer=partial(Odd, lr=1.0), optimizer_name="own.Odd")
    with pytest.raises(ValueError, match=r"`model.optimizer` own\.Odd cannot be planned.*no data"):
        optimizer_bytes(build(read_config("arithmetic"), chosen), chosen)


def test_a_config_is_read_from_a_file_or_a_folder(tmp_path):
    values = {"model_type": "llama", "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(values))
    for given in (tmp_path, tmp_path / "config.json"):
        config, source = model_config(settings(policy="some/model"), str(given))
        assert (config.num_hidden_layers, source) == (3, str(tmp_path / "config.json"))


@pytest.mark.parametrize("content", ["{", "[]", '{"num_hidden_layers": 3}', '{"model_type": "nonesuch"}', None])
def test_a_config_that_cannot_be_read_is_one_line(content, tmp_path):
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=r"`--model_config` must be a model's config\.json") as error:
        model_config(settings(policy="some/model"), str(file))
    assert "\n" not in str(error.value)


def test_a_model_whose_config_is_not_here_says_what_to_give():
    with pytest.raises(ValueError, match=r"'some/model' cannot be loaded: .* by `--model_config`") as error:
        model_config(settings(policy="some/model"))
    assert "\n" not in str(error.value)
