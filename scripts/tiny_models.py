"""Configs of tiny models with random weights, for every architecture of Transformers that decodes text."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# Sizes by the names that configs have for them; each config gets those that it knows.
SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"max_position_embeddings": 128, "initializer_range": 0.2, "rotary_dim": 8, "attn_head_dim": 8, "d_kv": 8},
    **{"embedding_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"ffn_hidden_size": 48, "block_ff_dim": 48, "sliding_window": 64, "attention_window_size": 64},
    # Mixtures of experts.
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_k": 2, "moe_topk": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "top_k": 2},
    **{"n_shared_experts": 1, "num_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    **{"shared_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16, "expert_ffn_hidden_size": 16},
    **{"zero_expert_num": 1, "intermediate_size_mlp": 48, "dense_intermediate_size": 48, "moe_ffn_hidden_size": 16},
    # Latent attention, and attention to selected tokens.
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"qk_head_dim": 16, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 64},
    # State spaces, linear attention and convolutions.
    **{"state_size": 8, "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64},
    **{"mamba_n_groups": 1, "n_groups": 1, "mamba_expand": 2, "expand": 2, "mamba_chunk_size": 8, "chunk_size": 8},
    **{"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "time_step_rank": 4, "mamba_dt_rank": 4},
    **{"n_mamba_heads": 1, "num_heads": 4, "lru_width": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "mamba_ngroups": 1, "mamba_headdim": 16},
    # What Gemma 3n and its successors have for each layer.
    **{
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 448,
        "laurel_rank": 8,
        "num_kv_shared_layers": 0,
    },
    **{"global_head_dim": 8, "num_global_key_value_heads": 2, "query_pre_attn_scalar": 8, "altup_num_inputs": 2},
}
# What some need beside, or instead.
OWN: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1], "num_hidden_layers": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "zaya": {"num_experts_per_tok": 1},
    "minicpm3": {"dim_model_base": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 4},
    "zamba2": {"n_mamba_heads": 4},
    "recurrent_gemma": {"num_hidden_layers": 3},
}
LAYERS = 2


def tiny_config(model_type: str, **sizes: Any) -> PreTrainedConfig:
    """A config of the architecture with a vocabulary and sizes of a few numbers, and one layer of each kind."""
    kind = CONFIG_MAPPING[model_type]
    return _shrunk(kind, kind(), OWN.get(model_type, {}) | sizes)


def _shrunk(kind: type[PreTrainedConfig], default: PreTrainedConfig, own: dict[str, Any]) -> PreTrainedConfig:
    written = default.to_dict()
    given: dict[str, Any] = {name: size for name, size in SIZES.items() if _has(default, written, name)}
    if "kv_lora_rank" in given and "num_key_value_heads" in given:  # Latent attention has keys for every head.
        given["num_key_value_heads"] = given["num_attention_heads"]
    for name in getattr(kind, "sub_configs", None) or {}:
        inner = getattr(default, name, None)
        if isinstance(inner, PreTrainedConfig):
            of_text = "text" in name or "decoder" in name
            given[name] = _shrunk(type(inner), inner, own if of_text else {}).to_dict()
    rope = written.get("rope_parameters")
    if isinstance(rope, dict) and rope.get("rope_theta", 1) is None:
        given["rope_parameters"] = rope | {"rope_theta": 10_000.0}
    depth = written.get("num_hidden_layers")
    if isinstance(depth, int):
        lists = {name: value for name, value in written.items() if isinstance(value, list) and len(value) == depth}
        chosen = _first_of_each(list(zip(*lists.values(), strict=True)), depth)
        given |= {name: [given.get(name, value[k]) for k in chosen] for name, value in lists.items()}
        given["num_hidden_layers"] = len(chosen)
    return kind(**given | own)


def _has(default: PreTrainedConfig, written: dict[str, Any], name: str) -> bool:
    """Whether a config has a size of this name that can be given."""
    kept = getattr(type(default), name, None)
    if isinstance(kept, property) and kept.fset is None:
        return False
    try:  # Sizes that differ by layer cannot be read.
        derived = name in ("num_key_value_heads", "head_dim") and name in written  # By default of other sizes.
        return derived or getattr(default, name, None) is not None
    except Exception:
        return name in written


def _first_of_each(layers: list[tuple[Any, ...]], depth: int) -> list[int]:
    """The numbers of the first layers of each kind, at least two and at most six."""
    chosen = sorted({str(layer): k for k, layer in reversed([*enumerate(layers)])}.values())[:6]
    more = [k for k in range(depth) if k not in chosen]
    return sorted([*chosen, *more[: max(0, min(LAYERS, depth) - len(chosen))]])
