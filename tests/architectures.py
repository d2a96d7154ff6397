"""Tiny random models of the decoders people train."""

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from grail_lightning import Loading, Policy
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.policy.source import load_tokenizer

CAPS = {"final_logit_softcapping": 3.0, "sliding_window": 8, "query_pre_attn_scalar": 8}
ARCHITECTURES = {
    "qwen3": (Qwen3Config, {}),
    "llama": (LlamaConfig, {"attention_bias": True}),
    "mistral": (MistralConfig, {"sliding_window": 8}),
    "gemma2": (Gemma2Config, {**CAPS, "attn_logit_softcapping": 5.0}),
    "gemma3": (Gemma3TextConfig, {**CAPS, "layer_types": ["sliding_attention", "full_attention"] * 2}),
}
SIZES = {
    "vocab_size": 448,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # Large enough for attention to tell tokens apart.
    "attention_dropout": 0.1,
}
SELECTING = {  # Of DeepSeek-V3.2: each token attends to some of the tokens before it, `index_topk` of them.
    "num_key_value_heads": 4,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "first_k_dense_replace": 4,
}


def tiny(name, folder, lora=None, *, checkpointed=False, **changes):
    """A policy with random weights, loaded by the package itself; in float64, but for Gemma 2."""
    kind, extra = ARCHITECTURES[name]
    tokenizer = load_tokenizer("arithmetic")
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    kind(**SIZES | ends | extra | changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    made = load_policy(str(folder), Loading(from_scratch=True, lora=lora, gradient_checkpointing=checkpointed))
    # Gemma 2 caps its attention scores, which SDPA cannot; eager attention masks with the lowest float64 and then takes
    # its softmax in float32: NaN on padding.
    made.to(torch.float32 if name == "gemma2" else torch.float64)
    for parameter_name, parameter in live(made).named_parameters():
        if "norm" in parameter_name and "proj" not in parameter_name:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return made


def per_layer(tokenizer):
    """A Gemma 3n, which has embeddings of the ids for each layer."""
    layers = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 448, "num_kv_shared_layers": 0}
    config = Gemma3nTextConfig(**SIZES | layers, pad_token_id=0, laurel_rank=8, layer_types=["full_attention"] * 4)
    policy = Policy(AutoModelForCausalLM.from_config(config), tokenizer).eval()
    for parameter in policy.parameters():  # Some begin as zero.
        parameter.data += 0.1 * torch.randn_like(parameter)
    return policy


def live(policy):
    """The policy, with adapters that have an effect, in place of those that begin as zero."""
    for name, parameter in policy.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return policy
