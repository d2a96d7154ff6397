"""Configs of the models of the published runs, as their hubs state them: what sizes depend on, and nothing else.

A plan of these models thus needs no network. OctoThinker's models have the sizes of Llama-3.2-3B and Llama-3.1-8B, from
which they were trained.
"""

from __future__ import annotations

from typing import Any

_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "dtype": "bfloat16",
}
_LLAMA = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "dtype": "bfloat16",
}
_LLAMA_3B = _LLAMA | {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "tie_word_embeddings": True,
}
_LLAMA_8B = _LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-4B": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "Qwen/Qwen3-8B": _QWEN3 | {"hidden_size": 4096, "intermediate_size": 12_288, "tie_word_embeddings": False},
    "OctoThinker/OctoThinker-3B-Short-Base": _LLAMA_3B,
    "OctoThinker/OctoThinker-8B-Short-Base": _LLAMA_8B,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": _LLAMA_8B,
}
