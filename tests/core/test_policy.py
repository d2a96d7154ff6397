import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV32Config,
    Gemma2Config,
    GraniteConfig,
    MistralConfig,
    Phi3Config,
    T5Config,
    TrOCRConfig,
)

from grail_lightning import HFEngine, Loading, LoRA, Policy, Sampling, resolve_policy
from grail_lightning.core.policy.encode import encode_prompt
from grail_lightning.core.policy.layout import padded_layout
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.policy.source import LoadedPolicy, check_dtype, check_policy, check_precision, load_tokenizer
from tests.architectures import SELECTING, SIZES, live, per_layer
from tests.runs import TASK
from tests.tolerance import assert_near

TINY = SIZES | {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
ARCHITECTURES = {
    "mistral": MistralConfig(**TINY, sliding_window=8),
    "gemma 2, soft-capped": Gemma2Config(**TINY, final_logit_softcapping=3.0, sliding_window=8),
    "cohere, scaled": CohereConfig(**TINY, logit_scale=0.25),
    "granite, scaled": GraniteConfig(**TINY, logits_scaling=4.0),
    "deepseek 3.2, sparse": DeepseekV32Config(**TINY | SELECTING, index_topk=4),
}


def _rows():
    ids = torch.randint(3, 60, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, 12, dtype=torch.bool)
    response = torch.ones(3, 7, dtype=torch.bool)
    response[1, 4:] = False
    mask[1, 9:] = False
    return ids, mask, response


def test_log_probabilities_equal_the_golden_tensors(golden, golden_policy, golden_batch):
    mask = golden_batch.response_mask
    with torch.no_grad():
        found = golden_policy(golden_policy.layout(golden_batch))
    assert_near(found[mask].double(), golden["logprobs"][mask].double(), 100, torch.float32)
    assert (found[~mask] == 0).all()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_log_probabilities_equal_the_models_own_logits(name, arithmetic):
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[name]).double().eval()
    ids, mask, response = _rows()
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask.long()).logits[:, -8:-1] / 0.7
        policy = Policy(model, arithmetic.tokenizer)
        found = policy.token_stats(padded_layout(ids, mask, response), temperature=0.7)
    distribution = torch.distributions.Categorical(logits=logits.double())
    expected = distribution.log_prob(ids[:, -7:])
    assert_near(found.logprobs[response].double(), expected[response], 64, torch.float32)
    assert_near(found.entropy[response].double(), distribution.entropy()[response], 64, torch.float32)


def test_embeddings_that_are_given_leave_the_others_that_a_model_has_for_the_ids(arithmetic):
    policy, (ids, mask, _) = per_layer(arithmetic.tokenizer), _rows()
    expected, embeds = policy.hidden(mask, ids), policy.embed(ids)
    assert torch.equal(policy.hidden(mask, ids, embeds=embeds), expected)
    assert (policy.hidden(mask, ids, embeds=2 * embeds) - expected).abs().max() > 1e-2


def test_a_head_that_we_do_not_know_is_an_error(arithmetic):
    model = AutoModelForCausalLM.from_config(ARCHITECTURES["mistral"])
    original = model.forward

    def changed(*args, **kwargs):
        out = original(*args, **kwargs)
        out.logits = out.logits * 2 + 1
        return out

    model.forward = changed
    with pytest.raises(ValueError, match="changes its logits in a way"):
        load_policy(LoadedPolicy(model, arithmetic.tokenizer))


def test_a_model_whose_rows_depend_on_their_padding_is_refused(arithmetic):
    """It numbers columns. DeepSeek-V4 compresses windows of them."""
    sizes = {"vocab_size": 448, "d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(TrOCRConfig(**sizes, decoder_ffn_dim=32, init_std=0.2))
    with pytest.raises(ValueError, match=r"same log-probabilities behind padding, but TrOCRForCausalLM does not \(rel"):
        load_policy(LoadedPolicy(model, arithmetic.tokenizer))


@pytest.mark.parametrize("packing", [False, True])
def test_rows_without_a_response_token_have_no_log_probability_and_gradients_of_zero(packing):
    policy = load_policy("arithmetic", Loading(packing=packing))
    ids, mask, _ = _rows()
    rows = SimpleNamespace(input_ids=ids, attention_mask=mask, response_mask=torch.ones(3, 0, dtype=torch.bool))
    found = policy.token_stats(policy.layout(rows))
    assert found.logprobs.shape == found.entropy.shape == (3, 0)
    found.logprobs.sum().backward()
    assert all((p.grad == 0).all() for p in policy.blocks.parameters())


def test_adapters_alone_are_trainable_and_switched_off_they_are_the_reference(arithmetic):
    policy = load_policy("arithmetic", Loading(lora=LoRA(rank=2))).eval()
    trainable = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert trainable
    assert all("lora_" in name for name in trainable)
    live(policy)
    ids, mask, response = _rows()
    with torch.no_grad():
        base = arithmetic(padded_layout(ids, mask, response))
        assert (policy(padded_layout(ids, mask, response)) - base).abs().max() > 1e-3
        with policy.adapters_off():
            assert_near(policy(padded_layout(ids, mask, response)), base, 64, torch.float32)


def test_random_weights_are_those_of_the_seed_so_that_a_reference_has_the_policys():
    """One name of a layer is a list of one."""
    how = Loading(from_scratch=True, lora=LoRA(rank=2, target_modules="q_proj"))
    one, other = (load_policy("arithmetic", how) for _ in range(2))
    again = dict(other.named_parameters())
    assert all(torch.equal(p, again[name]) for name, p in one.named_parameters() if "lora_" not in name)
    assert {name.split(".")[-4] for name, p in one.named_parameters() if p.requires_grad} == {"q_proj"}


def test_a_saved_policy_loads_anywhere_and_says_the_same(tmp_path):
    """Without its adapters, which are merged."""
    policy = load_policy("arithmetic", Loading(lora=LoRA(rank=2))).eval()
    for parameter in policy.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    policy.save(tmp_path)
    again = load_policy(str(tmp_path)).eval()
    ids, mask, response = _rows()
    with torch.no_grad():
        ours, theirs = (one(padded_layout(ids, mask, response)) for one in (policy, again))
        logits = AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=ids, attention_mask=mask.long()).logits
    expected = logits[:, -8:-1].log_softmax(-1).gather(-1, ids[:, -7:, None]).squeeze(-1)
    assert_near(ours, theirs, 100, torch.float32)
    assert_near(theirs[response], expected[response], 100, torch.float32)
    assert load_tokenizer(str(tmp_path)).decode([5, 6, 7]) == policy.tokenizer.decode([5, 6, 7])


def test_what_a_checkpoint_says_about_sampling_does_not_leak_and_is_exported(tmp_path):
    policy = load_policy("arithmetic")
    policy.model.generation_config = policy.saved_generation_config
    policy.model.generation_config.update(temperature=0.3, top_k=5, do_sample=True)
    wrapped = Policy(policy.model, policy.tokenizer)
    assert wrapped.model.generation_config.top_k is None
    wrapped.save(tmp_path)
    assert load_policy(str(tmp_path)).saved_generation_config.top_k == 5


def test_a_pad_token_without_an_embedding_makes_way_for_one_that_has_one(tmp_path):
    policy = load_policy("arithmetic")
    vocabulary = policy.model.get_input_embeddings().num_embeddings
    policy.model.save_pretrained(tmp_path)
    padded = load_tokenizer("arithmetic")
    padded.add_special_tokens({"pad_token": "<an added one>"})
    padded.save_pretrained(tmp_path)
    assert padded.pad_token_id == vocabulary
    assert load_tokenizer(str(tmp_path)).pad_token_id == policy.tokenizer.eos_token_id
    engine = HFEngine()
    engine.update_weights(load_policy(str(tmp_path)))
    prompts = [TASK.prompt({"problem": text}) for text in ("1+2", "1+2+3+4")]
    assert len(engine.generate(prompts, 2, Sampling(max_response_length=4), seed=1)) == 4


def test_prompts_are_encoded_through_the_chat_template_where_there_is_one(arithmetic):
    tokenizer = load_tokenizer("arithmetic")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1."}]
    assert tokenizer.decode(encode_prompt(tokenizer, messages)) == "Be brief.\n1+1."
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ flavour }}>"
    assert tokenizer.decode(encode_prompt(tokenizer, messages, {"flavour": "x"})) == "[system]Be brief.[user]1+1.x>"
    assert tokenizer.decode(encode_prompt(tokenizer, "1+1.")) == "1+1."
    with pytest.raises(ValueError, match="at least one token, but got none from ''"):
        encode_prompt(tokenizer, "")


@pytest.fixture
def folder(tmp_path):
    """A copy of the packaged policy."""
    shutil.copytree(resolve_policy("arithmetic"), tmp_path / "copy")
    return tmp_path / "copy"


def _remove_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()


def _in_shards(folder):
    """The weights in several files."""
    load_policy(str(folder)).model.save_pretrained(folder / "more", max_shard_size="1MB")
    (folder / "model.safetensors").unlink()
    for file in (folder / "more").glob("model*"):
        file.rename(folder / file.name)
    return sorted(folder.glob("model-*"))


def _as_pickle(folder):
    """The weights as torch writes them."""
    torch.save(load_policy(str(folder)).model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder / "pytorch_model.bin"


def _adapters(folder):
    """Adapters in place of the model."""
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    return (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


AGAIN = r"is damaged or incomplete \(.*\)\. Download or copy it again"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: os.truncate(folder / "model.safetensors", 100_000), "cannot be loaded: .*header"),
        (lambda folder: os.truncate(folder / "model.safetensors", 100_000), f"file model.safetensors {AGAIN}"),
        (lambda folder: os.truncate(folder / "model.safetensors", 0), r"model.safetensors .*\(it is empty\). Download"),
        (lambda folder: (folder / "model.safetensors").write_text("<html>" * 99), f"file model.safetensors {AGAIN}"),
        (
            lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
            "model.safetensors .* a pointer of Git LFS: run `git lfs pull`",
        ),
        (lambda folder: os.truncate(_in_shards(folder)[1], 9000), rf"file model-00002-of-\d+.safetensors {AGAIN}"),
        (
            lambda folder: _in_shards(folder)[1].unlink(),
            r"index.json lists model-00002-of-\d+.safetensors, .*Download or",
        ),
        (lambda folder: os.truncate(_as_pickle(folder), 9000), f"file pytorch_model.bin {AGAIN}"),
        (lambda folder: os.truncate(_as_pickle(folder), 0), f"file pytorch_model.bin {AGAIN}"),
        (lambda folder: os.truncate(_adapters(folder), 9000), f"file adapter_model.safetensors {AGAIN}"),
        (_adapters, r"it holds adapters without their model\. Merge them: `peft"),
        (lambda folder: os.truncate(folder / "config.json", 99), f"file config.json {AGAIN}"),
        (lambda folder: os.truncate(folder / "tokenizer.json", 99), f"file tokenizer.json {AGAIN}"),
        (_remove_tokenizer, r"must have a tokenizer, but its files \(tokenizer\.json, say\) are missing"),
        (lambda folder: T5Config().save_pretrained(folder), "cannot be loaded: Unrecognized configuration class"),
    ],
)
def test_a_folder_that_is_no_whole_policy_is_one_line(damage, message, folder):
    damage(folder)
    with pytest.raises(ValueError, match=rf"`policy` .*{message}|{message}") as raised:
        load_policy(str(folder))
    assert "\n" not in str(raised.value)


def test_a_packaged_policy_is_found_beside_a_folder_of_its_name_that_holds_no_other(folder, monkeypatch):
    packaged = resolve_policy("words")
    monkeypatch.chdir(folder.parent)
    (folder.parent / "words").mkdir()
    assert resolve_policy("words") == packaged
    (folder.parent / "words").rmdir()
    folder.rename("words")
    with pytest.raises(ValueError, match=r"must name one model, .*Write \./words for the folder, or /\S+ for the"):
        resolve_policy("words")
    assert resolve_policy("./words") == "words"
    assert resolve_policy(packaged) == packaged


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_attention_that_was_asked_for_is_the_one_that_runs(attention):
    """In the place of `sdpa` runs one that calls it, and knows prefix trees."""
    assert load_policy("arithmetic", Loading(attention=attention)).model.config._attn_implementation == attention


@pytest.mark.parametrize("dtype", ["float16", "auto"])
def test_half_floats_are_not_trained_but_predict(dtype, tmp_path):
    load_policy("arithmetic", Loading(dtype="float16")).model.save_pretrained(tmp_path)
    loading = Loading(dtype=dtype)
    with pytest.raises(ValueError, match=f"must not be float16 in training.* but got {dtype} for .*Use bfloat16"):
        check_dtype(str(tmp_path), loading)
    check_policy(str(tmp_path), loading)
    check_dtype("arithmetic", Loading(dtype="auto"))


def test_sharded_weights_are_loaded_in_the_precision_and_not_converted():
    said = r"bf16-true would convert weights that are sharded.* `model.loading.dtype: bf"
    with pytest.raises(ValueError, match=said):
        check_precision("bf16-true", ("arithmetic", Loading(dtype="float32")))
    for source in (("arithmetic", Loading(dtype="bfloat16")), None):
        check_precision("bf16-true", source)


def test_of_the_buffers_rotary_frequencies_alone_keep_their_dtype():
    policy = load_policy("arithmetic")
    policy.model.register_buffer("positions", torch.ones(3), persistent=False)  # As XGLM's, which are added to states.
    policy.to(torch.bfloat16)
    kept = {name.rpartition(".")[2] for name, buffer in policy.named_buffers() if buffer.dtype == torch.float32}
    assert kept == {"inv_freq", "original_inv_freq"}
    assert policy.model.positions.dtype == torch.bfloat16


def test_rows_fit_below_the_extension_of_longrope_beyond_which_they_depend_on_their_neighbours(tmp_path):
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10_000.0}
    config = Phi3Config(**TINY, rope_parameters=rope, original_max_position_embeddings=32)
    config.save_pretrained(tmp_path)
    load_tokenizer("arithmetic").save_pretrained(tmp_path)
    check_policy(str(tmp_path), loading := Loading(from_scratch=True), 31)
    with pytest.raises(ValueError, match="must leave room for a prompt in the 32 positions"):
        check_policy(str(tmp_path), loading, 32)
    policy, ids = load_policy(str(tmp_path), loading), torch.arange(3, 3 + 40)[None]
    short, long = torch.arange(40)[None] < 20, torch.arange(40)[None] < 40
    alone, within = policy.hidden(short[:, :20], ids[:, :20]), policy.hidden(torch.cat([short, long]), ids.repeat(2, 1))
    assert (alone - within[:1, :20]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_proj", "q_prj"], r"must name layers .* got \['q_proj', 'q_prj'\]: it has no q_prj. It has .*q_proj, up_"),
        (["q_porj"], r"must name layers .* got \['q_porj'\]: .* It has .*q_proj, up_proj"),
        (["q_proj", "lm_head"], r"must leave out what shares its weights .* but got \['q_proj', 'lm_head'\]: "),
        (".*(embed_tokens|v_proj)", r"must leave out .* but got \.\*\(embed_tokens\|v_proj\): .*Leave them out"),
    ],
)
def test_adapters_on_layers_that_are_not_there_or_tied_are_refused(targets, message):
    with pytest.raises(ValueError, match=message):
        load_policy("arithmetic", Loading(lora=LoRA(target_modules=targets)))


def test_a_release_of_peft_that_transformers_refuses_is_not_called_a_wrong_layer(monkeypatch):
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "999.0")
    with pytest.raises(ValueError, match=r"`loading.lora` cannot be used: .* version >= 999\.0\. If there"):
        load_policy("arithmetic", Loading(lora=LoRA()))
