"""Two CPU processes decode in step: one forward pass each, whoever has finished."""

from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from transformers import AutoModelForCausalLM, Qwen3Config

from grail_lightning.batch import Sampling
from grail_lightning.engines import HFEngine
from grail_lightning.policy import Policy, load_tokenizer
from grail_lightning.tasks import ArithmeticTask
from grail_lightning.tasks.base import Prompt

LIMIT = 9


def _rank(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        Qwen3Config(
            vocab_size=448,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
        )
    )
    policy = Policy(model, load_tokenizer("arithmetic"))
    # Rank 0 ends every response with its first token, rank 1 none.
    head = model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(448))
    head.bias.data[policy.end_token_ids[0]] = 1e4 if rank == 0 else -1e4
    sizes = []
    model.register_forward_pre_hook(lambda _, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True)
    engine = HFEngine()
    engine.update_weights(policy)
    prompts = [Prompt(messages=f"Compute {k}+1.", reference="", task=ArithmeticTask()) for k in range(3)]
    lengths = []
    for own in (prompts, prompts if rank else []):  # The second time rank 0 has no problem left.
        batch = engine.generate(own, 4, Sampling(max_response_length=LIMIT), seed=0)
        lengths.append(batch.response_lengths.tolist())
    torch.save((sizes, lengths), f"{folder}/{rank}")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_a_finished_rank_keeps_decoding_one_row(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))  # What is spawned imports this file by its name.
    torch.multiprocessing.spawn(_rank, args=(str(tmp_path),), nprocs=2)
    (sizes, lengths), (other_sizes, other_lengths) = (torch.load(tmp_path / str(rank)) for rank in range(2))
    assert lengths == [[1] * 12, []]
    assert other_lengths == [[LIMIT] * 12] * 2
    # Three prompts are read, or the one that is thrown away; then one row a step beside the twelve that go on.
    assert sizes == [3] + [1] * (LIMIT - 1) + [1] * LIMIT
    assert other_sizes == ([3] + [12] * (LIMIT - 1)) * 2
