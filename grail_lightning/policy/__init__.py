"""The policy: any Hugging Face causal language model, its tokenizer, and log-probabilities without full logits."""

from grail_lightning.policy.encode import encode_prompt
from grail_lightning.policy.load import load_policy
from grail_lightning.policy.model import Policy
from grail_lightning.policy.source import Loading, LoRA, check_policy, load_tokenizer, resolve_policy

__all__ = [
    "LoRA",
    "Loading",
    "Policy",
    "check_policy",
    "encode_prompt",
    "load_policy",
    "load_tokenizer",
    "resolve_policy",
]
