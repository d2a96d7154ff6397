"""A small policy that reads and writes any text, and an engine whose turns are written by hand."""

from contextlib import contextmanager

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from grail_lightning.engines import HFEngine
from grail_lightning.engines.turns import SampledTurn, TurnSampler
from grail_lightning.policy import Policy

END = "<|end|>"


def talking_policy():
    """Bytes as tokens, and an end token; two layers with random weights in float64."""
    vocabulary = {letter: k for k, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024}
    config = Qwen3Config(vocab_size=len(fast), **sizes, **heads, eos_token_id=fast.eos_token_id)
    torch.manual_seed(0)
    return Policy(Qwen3ForCausalLM(config).double().eval(), fast)


class WrittenTurns(TurnSampler):
    """Turns by row and number; a text without an end token or a closing tag at its end is cut off by the limit."""

    def __init__(self, tokenizer, texts, stop):
        self.tokenizer, self.texts, self.stop, self.requests = tokenizer, texts, (END, *stop), []

    def sample(self, requests):
        """See `TurnSampler.sample`."""
        self.requests.append(requests)
        turns = []
        for request in requests:
            text = self.texts[request.row].pop(0)
            ids = self.tokenizer(text)["input_ids"]
            whole = text.endswith(self.stop) and len(ids) <= request.limit
            turns.append(SampledTurn(ids[: request.limit], [-0.5] * min(len(ids), request.limit), whole))
        return turns


class WritingEngine(HFEngine):
    """An engine of such turns: `texts` are those of each row."""

    def __init__(self, texts):
        super().__init__()
        self.texts = [list(own) for own in texts]

    @contextmanager
    def turns(self, sampling):
        """See `RolloutEngine.turns`."""
        self.sampler = WrittenTurns(self._policy.tokenizer, self.texts, sampling.stop)
        yield self.sampler
