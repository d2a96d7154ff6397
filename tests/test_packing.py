"""Padding-free rows give what padded rows give: forward, backward, saliency and everything built on them."""

from itertools import pairwise

import pytest
import torch
import transformers.modeling_flash_attention_utils as flash
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Lfm2Config,
    MistralConfig,
    Qwen3Config,
)

from grail_lightning import Loading, LoRA, Policy, Sampling
from grail_lightning.core.distributed.sharding import gathered, shard
from grail_lightning.core.policy.capabilities import check_packing
from grail_lightning.core.policy.layout import packed_layout
from grail_lightning.core.policy.load import load_policy
from grail_lightning.credit import input_saliency
from tests.architectures import SIZES, live
from tests.runs import beside_the_update, one_in_four
from tests.tolerance import assert_near

PACKED = Loading(packing=True)
SAMPLING = Sampling(max_response_length=40)
ENDS = {"pad_token_id": 0, "eos_token_id": 1}
GEMMA = {"sliding_window": 4, "query_pre_attn_scalar": 8}
ARCHITECTURES = {
    "qwen3": Qwen3Config(**SIZES, **ENDS),
    "mistral, sliding": MistralConfig(**SIZES, **ENDS, sliding_window=4),
    "gemma 2, sliding": Gemma2Config(**SIZES, **ENDS, **GEMMA, attn_logit_softcapping=5.0),
    "gemma 3, sliding": Gemma3TextConfig(
        **SIZES, **ENDS, **GEMMA, layer_types=["sliding_attention", "full_attention"] * 2
    ),
}


def _rows():
    """Four uneven rows, one of a single token, with padding on both sides."""
    random = torch.Generator().manual_seed(0)
    mask = torch.zeros(4, 14, dtype=torch.bool)
    for row, (first, stop) in enumerate([(2, 14), (0, 9), (5, 6), (4, 13)]):
        mask[row, first:stop] = True
    return torch.randint(2, 64, (4, 14), generator=random) * mask, mask


@pytest.fixture(scope="module")
def batch():
    """12 rollouts of uneven lengths."""
    made = one_in_four(3, SAMPLING)
    assert not made.attention_mask.all()
    return made


def _pair(**options):
    """The same policy padded and packed, in float64."""
    plain, packed = (load_policy("arithmetic", Loading(packing=on, **options)).double().train() for on in (False, True))
    for policy in (plain, packed):
        torch.manual_seed(1)
        live(policy)
    return plain, packed


def test_packing_concatenates_rows_and_unpacking_restores_them():
    """The last column of padded rows predicts nothing."""
    ids = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 0]])
    mask = torch.tensor([[False, True, True, True], [True, True, True, False]])
    layout = packed_layout(ids, mask, mask[:, 2:], flash=False)
    assert layout.ids.tolist() == [[1, 2, 4, 5, 6]]
    assert layout.positions.tolist() == [[0, 1, 0, 1, 2]]
    assert layout.num_tokens == 4, "nor does the last token of any row"
    assert not layout.shares
    assert layout.targets.tolist() == [2, 3, 6]
    values = torch.tensor([[10.0, 20.0, 40.0, 50.0, 60.0]])
    assert layout.read(values, "predictor").tolist() == [[10, 20], [50, 0]]
    assert layout.read(values, "token").tolist() == [[20, 0], [60, 0]]
    assert layout.to_rows(torch.tensor([1.0, 2.0, 3.0])).tolist() == [[1, 2], [3, 0]]
    assert layout.from_rows(torch.tensor([[1, 2], [3, 0]])).tolist() == [1, 2, 3]


@pytest.mark.parametrize(  # Gemma 2 caps attention scores, which SDPA cannot.
    ("name", "attention"),
    [("qwen3", "sdpa"), ("mistral, sliding", "sdpa"), ("gemma 2, sliding", "eager"), ("gemma 3, sliding", "sdpa")],
)
def test_states_and_gradients_are_those_of_each_row_alone(name, attention, arithmetic):
    torch.manual_seed(0)
    config = ARCHITECTURES[name]
    config._attn_implementation = attention
    policy = Policy(AutoModelForCausalLM.from_config(config), arithmetic.tokenizer, PACKED).eval()
    check_packing(policy)
    ids, mask = _rows()
    widths = []
    policy.blocks[0].register_forward_pre_hook(lambda _module, args: widths.append(tuple(args[0].shape[:2])))
    mask[:, -1] = False  # The last column predicts nothing, and is not run.
    layout = packed_layout(ids, mask, torch.ones(4, 0, dtype=torch.bool), flash=False)
    embeds = policy.embed(layout.ids).detach().requires_grad_()
    states = policy.decode(layout, embeds)
    assert widths == [(1, 30)]  # 11 + 9 + 1 + 9 valid tokens.
    torch.testing.assert_close(policy.decode(layout), states)
    factor = torch.randn(states.shape)
    (found,) = torch.autograd.grad((states * factor).sum(), embeds)
    begin = 0
    for row, kept in enumerate(mask):
        part = slice(begin, begin := begin + int(kept.sum()))
        alone = policy.embed(ids[row, kept][None]).detach().requires_grad_()
        out = policy.decoder(inputs_embeds=alone, use_cache=False).last_hidden_state
        assert_near(states[:, part], out, 100, torch.float32)
        (expected,) = torch.autograd.grad((out * factor[:, part]).sum(), alone)
        assert_near(found[:, part], expected, 1000, torch.float32)


def test_an_architecture_whose_rows_see_each_other_is_an_error(arithmetic):
    """LFM2 mixes neighbouring tokens by convolutions that know nothing of rows."""
    torch.manual_seed(0)
    config = Lfm2Config(**SIZES, **ENDS, layer_types=["conv", "full_attention"] * 2, conv_L_cache=3)
    policy = Policy(AutoModelForCausalLM.from_config(config), arithmetic.tokenizer, PACKED)
    with pytest.raises(ValueError, match=r"rows that do not attend to each other, but in Lfm2ForCausalLM they do"):
        check_packing(policy)


@pytest.mark.parametrize(
    ("options", "leaf", "read_at"),
    [
        ({"gradient_checkpointing": True}, "embeddings", "predictor"),
        ({"lora": LoRA(rank=2), "attention": "eager"}, "middle", "token"),
        ({}, "last", "predictor"),
    ],
    ids=str,
)
def test_log_probabilities_gradients_and_saliency_are_those_of_padded_rows(options, leaf, read_at, batch):
    saliency, grads, found = [], [], []
    for policy in _pair(**options):
        saliency.append(input_saliency(policy, batch, batch.answer.content, leaf=leaf, read_at=read_at))
        stats = policy.token_stats(policy.layout(batch), entropy_gradient=True)
        (stats.logprobs.sum() + 0.1 * stats.entropy.sum()).backward()
        found.append(stats)
        grads.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    assert (saliency[0] != 0).any()
    assert_near(saliency[1], saliency[0], 64, torch.float32)
    assert_near(found[1].logprobs, found[0].logprobs, 64, torch.float32)
    assert_near(found[1].entropy, found[0].entropy, 64, torch.float32)
    assert grads[1].keys() == grads[0].keys() != set()
    for name in grads[0]:
        assert_near(grads[1][name], grads[0][name], 256, torch.float32)


def test_credit_beside_the_update_gives_the_gradients_of_padded_rows(batch):
    (plain, expected), (packed, found) = (beside_the_update(p, batch, "middle", SAMPLING, 400) for p in _pair())
    assert_near(found.values, expected.values, 64, torch.float32)
    for name in plain:
        assert_near(packed[name], plain[name], 64, torch.float32)


def test_sharded_policies_can_be_packed(batch, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        plain, packed = _pair()
        shard(packed, init_device_mesh("cpu", (1,)))
        for policy in (plain, packed):
            policy(policy.layout(batch)).sum().backward()
        theirs = dict(plain.named_parameters())
        for name, parameter in packed.named_parameters():
            assert_near(parameter.grad.full_tensor(), theirs[name].grad, 64, torch.float32)
        with gathered(packed):
            found = input_saliency(packed, batch, batch.answer.content, leaf="middle")
        expected = input_saliency(plain, batch, batch.answer.content, leaf="middle")
        assert_near(found, expected, 64, torch.float32)
    finally:
        torch.distributed.destroy_process_group()


def _attend(queries, keys, values, scale):
    """``[n, heads, width]`` each, causal."""
    keys, values = (t.repeat_interleave(queries.shape[1] // t.shape[1], 1).float() for t in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.float(), keys) * scale
    scores = scores.masked_fill(~torch.ones_like(scores[0]).tril().bool(), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(queries.dtype)


def test_variable_length_kernels_are_told_once_where_rows_begin(batch, monkeypatch):
    """flash-attn's kernels need CUDA; here another stands behind Transformers' code and looks at what it is given."""
    calls = []

    def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False, **_):
        calls.append((cu_seqlens_q, max_seqlen_q))
        assert causal
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert type(max_seqlen_q) is type(max_seqlen_k) is int  # Read back from the device once, not in each layer.
        assert max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max()
        bounds = cu_seqlens_q.tolist()
        assert bounds[-1] == len(q)
        rows = (slice(*ends) for ends in pairwise(bounds))
        return torch.cat([_attend(q[row], k[row], v[row], softmax_scale) for row in rows])

    monkeypatch.setattr(
        flash, "_lazy_imports", lambda *_, **__: (None, varlen, None, flash._pad_input, flash._unpad_input)
    )
    for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_process_flash_kwargs_fn"):
        monkeypatch.setattr(flash, name, None)
    grads = []
    # SDPA in float32: with bfloat16, torch 2.13 stops on CPUs with AMX under `ATEN_CPU_CAPABILITY=default`.
    for implementation, dtype in (
        ("sdpa", "float32"),
        ("flash_attention_2", "bfloat16"),
        ("flash_attention_3", "bfloat16"),
    ):
        policy = load_policy("arithmetic", Loading(packing=True, dtype=dtype, attention="sdpa")).train()
        policy.model.config._attn_implementation = implementation
        for part in (torch.arange(5), torch.arange(5, 9)):
            piece = batch.select(part)
            policy(policy.layout(piece)).sum().backward()
        grads.append(torch.cat([p.grad.float().flatten() for p in policy.parameters()]))
    assert len(calls) == 2 * 2 * len(policy.blocks)
    assert len({id(bounds) for bounds, _ in calls}) == 2 * 2
    for packed in grads[1:]:
        assert (grads[0] - packed).norm() < 0.05 * grads[0].norm()  # bfloat16
