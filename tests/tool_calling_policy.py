"""A small policy that calls tools by itself: a table of what follows each token is in its weights.

Its layers are those of Qwen3 with random weights, so that every token changes all later probabilities.
"""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from grail_lightning import Policy

END = "<|end|>"
# A closing tag is two tokens, and "12" one that the policy often writes as two.
MERGED = ("<guess>", "</guess", "<calculator>", "</calculator", "####", "12")
REST = {"####": 0.03, END: 0.003, "<": 0.01, "x": 0.02}
FIRST = {"<guess>": 0.55, "<calculator>": 0.35} | REST
GUESSES, TERMS = {"2": 0.1, "4": 0.1, "6": 0.1, "8": 0.2}, {"1": 0.2, "3": 0.4, "5": 0.3}
FOLLOWS = {
    "?": {"<guess>": 0.1, "<calculator>": 0.8} | REST,
    "<guess>": GUESSES | {"1": 0.05, "12": 0.45},
    "<calculator>": TERMS | {"-": 0.1},
    "####": {"7": 0.5, "12": 0.5},
    "7": {END: 0.9, "x": 0.1},
    "</guess": {">": 0.98, END: 0.02},
    "</calculator": {">": 0.98, "x": 0.02},
    **{key: {"</guess": 0.88, "2": 0.06, "x": 0.03, "\n": 0.02} for key in [*"2468", "12"]},
    **{key: {"</calculator": 0.55, "+": 0.2, "/": 0.1, "2": 0.12, "x": 0.03} for key in "1350"},
    "+": TERMS,
    "/": {"0": 0.5, "3": 0.5},
}


def calling_policy():
    """Bytes and parts of tags as tokens; two layers in float64."""
    vocabulary = {letter: k for k, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for text in MERGED:
        parts = [(text[:k], text[k]) for k in range(1, len(text))] if text != "####" else [("#", "#"), ("##", "##")]
        merges += parts
        for one, other in parts:
            vocabulary.setdefault(one + other, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(dict.fromkeys(merges))))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    size = len(fast)
    table = torch.full((size, size), 1e-7).double()
    for token in range(size):
        text = fast.decode([token])
        for after, share in FOLLOWS.get(text, FIRST).items():
            (number,) = fast(after)["input_ids"]
            table[token, number] = share
    sizes = {"hidden_size": 320, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024}
    config = Qwen3Config(
        vocab_size=size,
        **sizes,
        **heads,
        eos_token_id=fast.eos_token_id,
        tie_word_embeddings=False,
        initializer_range=0.02,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).double().eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size, sizes["hidden_size"]))
        # The norm before the head makes a vector with a single 1 as long as the root of its size.
        head = model.lm_head.weight
        head.copy_(0.01 * torch.randn(head.shape))
        head[:, :size] = table.log().T / sizes["hidden_size"] ** 0.5
    return Policy(model, fast)
