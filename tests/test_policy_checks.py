"""What can be known of a policy before its weights are read."""

import json
import shutil

import pytest
import torch
from transformers import BertConfig, T5Config

from grail_lightning.policy import Loading, LoRA, check_policy, load_policy, load_tokenizer, resolve_policy
from grail_lightning.policy.checks import blueprint, check_weights
from tests.architectures import ARCHITECTURES, tiny


@pytest.fixture
def folder(tmp_path):
    """A copy of the packaged policy."""
    shutil.copytree(resolve_policy("arithmetic"), tmp_path / "copy")
    return tmp_path / "copy"


def _shapes(model):
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "loading", [Loading(), Loading(lora=LoRA(rank=2)), Loading(lora=LoRA(target_modules=["q_proj"]))]
)
def test_a_blueprint_has_the_weights_of_the_policy_without_their_values(loading):
    state = torch.get_rng_state()
    model = blueprint("arithmetic", loading)
    assert torch.equal(torch.get_rng_state(), state), "no random number is drawn"
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
    assert _shapes(model) == _shapes(load_policy("arithmetic", loading).model)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_blueprint_is_right_for_other_architectures(name, tmp_path):
    lora = LoRA(rank=2)
    model = tiny(name, tmp_path, lora).model
    assert _shapes(blueprint(str(tmp_path), Loading(lora=lora))) == _shapes(model)


@pytest.mark.parametrize("config", [T5Config, BertConfig])
def test_a_model_that_is_no_causal_language_model_is_named_before_its_weights_are_read(config, tmp_path):
    config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"`policy` must be a causal language model.* but got .*Give another model"):
        check_policy(str(tmp_path), Loading(from_scratch=True))


@pytest.mark.parametrize("size", [4, 100_000])
def test_a_file_of_weights_that_was_cut_off_is_named(size, folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(
        ValueError, match=r"cannot be loaded: .*model\.safetensors is damaged .*Copy or download it again"
    ):
        check_policy(str(folder), Loading())
    check_policy(str(folder), Loading(from_scratch=True))


def test_weights_that_are_not_all_there_are_named(folder):
    index = {"weight_map": {"model.norm.weight": "part-1.safetensors", "lm_head.weight": "part-2.safetensors"}}
    (folder / "model.safetensors").rename(folder / "part-1.safetensors")
    with pytest.raises(
        ValueError, match=r"must have its weights in model\.safetensors, .* but got part-1\.safetensors"
    ):
        check_policy(str(folder), Loading())
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"but part-2\.safetensors is missing, which model\.safetensors\.index\.json"):
        check_policy(str(folder), Loading())
    shutil.copy(folder / "part-1.safetensors", folder / "part-2.safetensors")
    check_policy(str(folder), Loading())


def test_weights_of_another_shape_are_one_sentence(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": config["intermediate_size"] * 2}))
    with pytest.raises(ValueError, match=r"its weights have other shapes than its config\.json says"):
        load_policy(str(folder))


def test_a_policy_without_the_files_of_its_tokenizer_is_named(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"must have a tokenizer, but its files \(tokenizer\.json, say\) are missing"):
        load_tokenizer(str(folder))
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"The tokenizer of `policy` .* cannot be loaded: Expecting property name"):
        load_tokenizer(str(folder))


def test_weights_of_a_checkpoint_are_compared_by_name_and_shape():
    state = {f"policy.model.{name}": value for name, value in load_policy("arithmetic").model.state_dict().items()}
    check_weights("arithmetic", Loading(), state | {"credit.own": torch.zeros(3)})
    name = "policy.model.model.norm.weight"
    for other in (
        {k: v for k, v in state.items() if k != name},
        state | {name: torch.zeros(3)},
        state | {"policy.model.more": torch.zeros(3)},
    ):
        with pytest.raises(ValueError, match=r"but 1 of its weights have other names or shapes, such as policy\.model"):
            check_weights("arithmetic", Loading(), other)
    with pytest.raises(ValueError, match=r"Give the `model.policy` and `model.loading.lora` that it was trained with"):
        check_weights("arithmetic", Loading(lora=LoRA()), state)


def test_a_packaged_policy_is_found_beside_a_folder_of_data_of_its_name(tmp_path, monkeypatch):
    packaged = resolve_policy("words")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words").mkdir()
    assert resolve_policy("words") == packaged
    with pytest.raises(ValueError, match=r"folder with a `config\.json`, but words has none"):
        resolve_policy("./words")


def test_a_name_with_two_meanings_is_refused(folder, monkeypatch):
    packaged = resolve_policy("words")
    monkeypatch.chdir(folder.parent)
    folder.rename("words")
    with pytest.raises(ValueError, match=r"must name one model, .*Write \./words for the folder, or /\S+ for the"):
        resolve_policy("words")
    assert resolve_policy("./words") == "words"
    assert resolve_policy(packaged) == packaged
