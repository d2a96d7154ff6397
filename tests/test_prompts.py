"""Prompts that are run once for all of their responses."""

from functools import partial

import pytest
import torch
import torch._dynamo as dynamo
from transformers import Lfm2Config, MiniMaxConfig, Qwen3NextConfig

from grail_lightning.objective import Objective, costs_behind_prompts, prompt_blocks, saved_by_sharing
from grail_lightning.policy import Loading, LoRA, load_policy, load_tokenizer
from grail_lightning.policy.prefix import can_share, can_share_prompts
from grail_lightning.rollout import RolloutBatch, lengths_to_mask
from tests.architectures import ARCHITECTURES, SIZES, tiny
from tests.steps import FEWER, gap, steps
from tests.tolerance import near, roundings

PROMPTS = (9, 1, 5, 6)
LENGTHS = (7, 2, 9, 4, 1, 8, 0, 5, 6, 3, 8, 2, 7, 7, 1, 9)  # Four responses to each; one of them is empty.


@pytest.fixture(scope="module")
def batch():
    """16 rows of random tokens in four groups."""
    random = torch.Generator().manual_seed(0)
    width, lengths = max(PROMPTS), torch.tensor(LENGTHS)
    prompts = torch.tensor(PROMPTS).repeat_interleave(4)
    prompt_ids = torch.randint(3, 448, (4, width), generator=random).repeat_interleave(4, 0)
    response_ids = torch.randint(3, 448, (16, max(LENGTHS)), generator=random)
    mask = lengths_to_mask(lengths, max(LENGTHS))
    return RolloutBatch(
        input_ids=torch.cat([prompt_ids, response_ids], 1),
        attention_mask=torch.cat([torch.arange(width) >= width - prompts[:, None], mask], 1),
        response_ids=response_ids,
        response_mask=mask,
        group=torch.arange(4).repeat_interleave(4),
        row=torch.arange(16),
        finished=torch.ones(16, dtype=torch.bool),
        prompts=[None] * 16,
        texts=[""] * 16,
        advantages=torch.randn(16, generator=random),
    )


def _steps(policy, batch, share, reference=None, **options):
    """`steps` without trees, which are in test_trees.py."""
    policy.branches = False
    return steps(policy, batch, share, reference, **options)


@pytest.mark.parametrize("budget", [1000, 60, 12])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_are_those_of_whole_rows(name, budget, batch, tmp_path):
    policy = tiny(name, tmp_path, attention_dropout=0.0)
    apart, whole = _steps(policy, batch, False, token_budget=budget)
    shared, fewer = _steps(policy, batch, True, token_budget=budget)
    assert fewer < whole
    for (ours, metrics), (theirs, expected) in zip(shared, apart, strict=True):
        # Norms run in float32, Gemma 2 altogether.
        number = 4000 if name == "gemma2" else 100
        assert gap(ours, theirs) <= roundings(number, torch.float32)
        assert metrics | FEWER == near(expected | FEWER, number, torch.float32, scale=1.0)


@pytest.mark.parametrize(
    "options",
    [{"mini_batches": 2}, {"kl_coefficient": 0.1}, {"entropy_coefficient": 0.1}, {"level": "sequence"}],
    ids=str,
)
def test_old_and_reference_logprobs_can_share_as_well(options, batch):
    policy, reference = (load_policy("arithmetic").double() for _ in range(2))
    for p in reference.parameters():
        p.data *= 1.01
    reference = reference if "kl_coefficient" in options else None
    apart, _ = _steps(policy, batch, False, reference, token_budget=60, **options)
    shared, _ = _steps(policy, batch, True, reference, token_budget=60, **options)
    assert len(shared) == 2 * options.get("mini_batches", 1)
    for (ours, metrics), (theirs, expected) in zip(shared, apart, strict=True):
        assert gap(ours, theirs) <= roundings(100, torch.float32)
        assert metrics | FEWER == near(expected | FEWER, 100, torch.float32, scale=1.0)


def test_each_prompt_is_run_once(batch):
    policy = load_policy("arithmetic")
    assert can_share_prompts(policy)  # It tries that once.
    found, embedded = _steps(policy, batch, True, token_budget=1000)
    # Two passes; four prompts without their last token, padded to 8; that token and 9 of the response in 15 rows, of
    # which the last predicts nothing.
    assert embedded == 2 * (4 * 8 + 15 * (1 + 9 - 1))
    run, prompts = sum(LENGTHS) + sum(PROMPTS) - 4, [PROMPTS[k // 4] for k, n in enumerate(LENGTHS) if n]
    assert found[0][1]["shared_tokens"] == pytest.approx(1 - run / (sum(LENGTHS) + sum(prompts) - 15))


def test_adapters_above_a_frozen_block_can_share(batch):
    """Keys and values of the first block carry no gradient then, those of the others do."""
    policy = load_policy("arithmetic", Loading(lora=LoRA(rank=2, target_modules=["o_proj"]))).double()
    for name, p in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    (apart, whole), (shared, fewer) = (_steps(policy, batch, share, token_budget=60) for share in (False, True))
    assert fewer < whole
    gaps = [gap(ours, theirs) for (ours, _), (theirs, _) in zip(shared, apart, strict=True)]
    assert max(gaps) <= roundings(100, torch.float32)


def test_gradients_of_many_rows_add_up_in_full_precision(batch):
    """In bfloat16 a running sum over rows would lose what the later ones bring: no more may be lost than without."""
    rows = torch.arange(4).repeat(64)  # One prompt, 256 rows.
    many = batch.select(rows).replace(row=torch.arange(256), advantages=torch.ones(256))
    (exact, _), *_ = _steps(load_policy("arithmetic").double(), many, False, passes=1, token_budget=10**6)[0]
    for budget in (60, 100_000):
        gaps = {}
        for share in (False, True):
            policy = load_policy("arithmetic", Loading(dtype="bfloat16"))
            (found, _), *_ = _steps(policy, many, share, passes=1, token_budget=budget)[0]
            gaps[share] = gap({name: g.double() for name, g in found.items()}, exact)
        assert gaps[True] <= 1.2 * gaps[False]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (Lfm2Config, {"layer_types": ["conv", "full_attention"] * 2}),  # Its cache has convolution states, too.
        (MiniMaxConfig, {"layer_types": ["linear_attention", "full_attention"] * 2}),  # It wants a cache of its own.
        (Qwen3NextConfig, {"layer_types": ["linear_attention", "full_attention"] * 2}),
    ],
)
def test_models_that_keep_more_than_keys_and_values_train_on_whole_rows(kind, changes, batch, tmp_path):
    tokenizer = load_tokenizer("arithmetic")
    small = SIZES | {"attention_dropout": 0.0, "num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    small |= {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "moe_intermediate_size": 16}
    kind(**small | {"pad_token_id": tokenizer.pad_token_id} | changes).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), Loading(from_scratch=True))
    assert not can_share(policy)
    (found, _), *_ = _steps(policy, batch, True, token_budget=60)[0]
    assert all(gradient.isfinite().all() for gradient in found.values())


def test_rows_of_a_group_with_prompts_of_their_own_are_kept_apart(batch):
    """No engine of ours does that."""
    ids = batch.input_ids.clone()
    ids[5, 8] = 4
    assert saved_by_sharing(batch, torch.arange(16)) > 0.1
    assert saved_by_sharing(batch.replace(input_ids=ids), torch.arange(16)) == 0
    mask = batch.attention_mask.clone()
    mask[1, 0] = False
    assert saved_by_sharing(batch.replace(attention_mask=mask), torch.arange(16)) == 0
    padding = batch.input_ids.clone()
    padding[5, 0] = 4
    assert saved_by_sharing(batch.replace(input_ids=padding), torch.arange(16)) > 0.1


def test_copies_of_a_long_prompt_count_towards_the_budget(batch):
    """Prompts of 9, 1, 5 and 6 tokens: a quarter of all but the last, rounded up, beside the response and that one."""
    costs = costs_behind_prompts(batch)
    assert costs[::4].tolist() == [[8, 2], [2, 0], [7, 1], [8, 2]]


@pytest.mark.slow
# Dynamo looks at `.grad` of its inputs; loading it imports what torch has deprecated.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_compiled_blocks_share_with_the_same_graphs_for_all_of_them(batch, monkeypatch):
    dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    plain, policy = (load_policy("arithmetic", Loading(compile=on)).double() for on in (False, True))
    assert can_share_prompts(policy.train())
    before = dynamo.utils.counters["stats"]["unique_graphs"]
    shared, embedded = _steps(policy, batch, True, token_budget=60)
    made = dynamo.utils.counters["stats"]["unique_graphs"] - before
    # With and without a mask, of one row and of several, with leaves and with what they were copied from: not by block.
    assert 1 <= made < 2 * len(policy.blocks)
    apart, whole = _steps(plain, batch, False, token_budget=60)
    assert embedded < whole
    for (ours, metrics), (theirs, expected) in zip(shared, apart, strict=True):
        assert gap(ours, theirs) <= roundings(100, torch.float32)
        assert metrics | FEWER == near(expected | FEWER, 100, torch.float32, scale=1.0)


@pytest.mark.parametrize("option", ["packing", "gradient_checkpointing"])
def test_what_cannot_share_does_not(option, batch):
    policy = load_policy("arithmetic", Loading(**{option: True}))
    assert not can_share_prompts(policy)
    assert can_share_prompts(load_policy("arithmetic"))


def test_dropout_keeps_rows_apart(batch, tmp_path):
    """Each row has its own; in evaluation there is none."""
    policy = tiny("qwen3", tmp_path, attention_dropout=0.1)
    assert not can_share_prompts(policy.train())
    assert can_share_prompts(policy.eval())


def test_what_sharing_saves_is_counted_in_tokens(batch):
    # The first group: 9 prompt tokens in three rows, of which the last token stays with the row: 2 of 3 × 8 saved.
    rows = torch.tensor([0, 1, 2, 4])
    everything = 3 * 9 + (7 + 2 + 9) + 1 + 1
    assert saved_by_sharing(batch, rows) == pytest.approx(2 * 8 / everything)
    assert saved_by_sharing(batch, torch.tensor([0, 5, 8])) == pytest.approx(0)
    assert saved_by_sharing(batch, torch.tensor([], dtype=torch.long)) == 0


def test_prompts_take_half_of_the_budget(batch):
    blocks = list(prompt_blocks(batch, torch.arange(16), Objective(token_budget=26)))
    # Without their last tokens prompts have 8, 0, 4 and 5; the longest first, 13 at a time: 8 | 5, 4 | 0.
    assert [block.tolist() for block, _ in blocks] == [[0, 1, 2, 3], [8, 9, 10, 11, 12, 13, 14, 15], [4, 5, 6, 7]]
    assert [padded for _, padded in blocks] == [8, 10, 0]
