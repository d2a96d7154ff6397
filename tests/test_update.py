"""Gradients of one optimiser step, however it is cut."""

import pytest
import torch

from grail_lightning import Execution, Loading, LoRA
from grail_lightning.core.policy.layout import padded_layout
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.policy.micro_batch import MicroBatch, dummy_micro_batch
from grail_lightning.core.step.forward import Forward
from grail_lightning.core.step.update import split_rows
from tests.architectures import live
from tests.runs import uneven
from tests.steps import backward, context_for, largest_gap, token_weights, update_of, whole_logs
from tests.tolerance import assert_near, near, roundings

LIMIT = 36


@pytest.fixture(scope="module")
def policy():
    return load_policy("arithmetic").double().train()


@pytest.fixture(scope="module")
def batch(policy):
    """24 rollouts in float64, uneven, some truncated, a group dead, of which one row has finished and counts."""
    made = uneven(policy, 6, LIMIT)
    finished = made.finished.clone()
    finished[4] = True
    assert made.advantages[4] == 0
    assert 0 < (~finished).sum() < 24
    return made.replace(finished=finished)


def _update(policy, batch, weights=None, **options):
    return update_of(policy, batch, weights, limit=LIMIT, **options)


def _gradients(policy, batch, weights=None, order=None, reference=None, **options):
    if order is not None:
        batch = batch.select(order)
        weights = None if weights is None else weights[order][:, : batch.response_mask.shape[1]]
    policy.zero_grad(set_to_none=True)
    metrics = _update(policy, batch, weights, reference=reference, **options).accumulate(0, backward).figures()
    return {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}, metrics


def _whole(batch):
    """All rows, padded."""
    return padded_layout(batch.input_ids, batch.attention_mask, batch.response_mask)


def _old_logprobs(update):
    """The old log-probabilities of the rows that are run; 0 of those that are not known."""
    rows = update.live.nonzero().flatten()
    unknown = torch.zeros(len(rows), update.mask.shape[1])
    return update.old_logprobs.of(MicroBatch(rows=rows), unknown).double()


@pytest.fixture(scope="module")
def given(batch):
    """Token weights."""
    return torch.rand(batch.response_mask.shape, generator=torch.Generator().manual_seed(1)).double() + 0.5


@pytest.fixture(scope="module")
def reference():
    made = load_policy("arithmetic", trainable=False).double()
    for p in made.parameters():
        p.data *= 1.01
    return made


@pytest.mark.parametrize(
    "more",
    [
        {"level": "sequence", "kl_estimator": "k1", "sampler_cap": 1.5},
        {"surrogate": "cispo", "kl_estimator": "k2", "mask_truncated": False},
        {"entropy_coefficient": 0.03},
    ],
    ids=str,
)
def test_every_way_of_cutting_gives_the_same_gradient(more, policy, reference, batch, given):
    """Three groups, of which the second is dead: at once, and row by row in another order."""
    batch = batch.select(torch.arange(12))
    given = given[:12, : batch.response_mask.shape[1]]
    noise = torch.randn(batch.response_mask.shape, generator=torch.Generator().manual_seed(5))
    batch = batch.replace(sampling_logprobs=batch.sampling_logprobs + noise)
    more = {"kl_coefficient": 0.1, "share_prefixes": False, "reference": reference} | more
    expected, metrics = _gradients(policy, batch, given, token_budget=10**6, **more)
    shuffled = torch.randperm(12, generator=torch.Generator().manual_seed(2))
    found, small_metrics = _gradients(policy, batch, given, shuffled, token_budget=1, **more)
    assert largest_gap(found, expected) <= roundings(64, torch.float32)
    assert small_metrics == near(metrics, 64, torch.float32, scale=0.01)


def test_the_kl_of_a_later_pass_is_corrected_by_each_tokens_own_ratio_at_either_level(policy, reference, batch):
    """The surrogate may take the sequence's ratio; who drew a token is a matter of the token."""
    moved = load_policy("arithmetic").double().train()
    options = {"num_iterations": 2, "kl_coefficient": 0.1, "level": "sequence"}
    silent = batch.replace(advantages=torch.zeros_like(batch.advantages))  # The KL term alone.
    update = _update(moved, silent, reference=reference, **options)
    update.accumulate(0, backward)
    with torch.no_grad():
        for p in moved.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3), dtype=p.dtype))
    moved.zero_grad(set_to_none=True)
    update.accumulate(1, backward)
    found = {n: p.grad.clone() for n, p in moved.named_parameters()}
    moved.zero_grad(set_to_none=True)
    rows = _whole(batch)
    with torch.no_grad():
        old, ref = load_policy("arithmetic").double()(rows), reference(rows)
    lp = moved(rows)
    estimate = (lp - old).exp() * ((ref - lp).exp() - 1 - (ref - lp))
    mask = batch.response_mask & batch.finished[:, None]
    (0.1 * (estimate * mask).sum() / (batch.finished.sum() * LIMIT)).backward()
    assert largest_gap(found, {n: p.grad for n, p in moved.named_parameters()}) <= roundings(64, torch.float32)


BOTH = {"entropy_coefficient": 0.03, "sampler_cap": 1.5}


@pytest.mark.parametrize(("how", "more"), [("grpo", BOTH), ("dr_grpo", {}), ("dapo", BOTH)])
def test_gradients_equal_one_loss_over_all_rows_written_by_hand(how, more, policy, batch, given):
    """No row is left out here, no micro-batch is cut: dead rows, trimming and shared prompts must not change that."""
    noise = torch.randn(batch.response_mask.shape, generator=torch.Generator().manual_seed(5)).double()
    sampled = batch.sampling_logprobs + noise
    live = (batch.finished & (batch.advantages != 0)).nonzero()[0, 0]
    sampled[live, 2] = torch.nan  # The sampler reported none: the ratio is 1 there.
    batch = batch.replace(sampling_logprobs=sampled)
    found, metrics = _gradients(policy, batch, given, aggregation=how, token_budget=150, **more)
    policy.zero_grad(set_to_none=True)
    logs = whole_logs(policy, batch)
    lp = logs.gather(-1, batch.response_ids[..., None]).squeeze(-1)
    correction = (lp.detach() - sampled).exp().clamp(max=1.5).nan_to_num(1.0) if more else 1
    mask, rows = batch.response_mask & batch.finished[:, None], batch.finished.sum()
    token = -(lp - lp.detach()).exp() * batch.advantages[:, None] * given * correction
    token = token + (0.03 * (logs.exp() * logs).sum(-1) if more else 0)
    token = token.masked_fill(~mask, 0)
    loss = {
        "grpo": (token.sum(1) / mask.sum(1).clamp(min=1)).sum() / rows,
        "dr_grpo": token.sum() / (rows * LIMIT),
        "dapo": token.sum() / mask.sum(),
    }[how]
    loss.backward()
    assert largest_gap(found, {n: p.grad for n, p in policy.named_parameters()}) <= roundings(64, torch.float32)
    assert metrics["loss"] == near(loss.item(), 64, torch.float32, scale=0.01)


def test_an_additive_stage_is_added_to_the_product_of_advantage_and_weight(policy, batch, given):
    """Where there is an advantage, a larger weight is the same."""
    advantages = batch.advantages[:, None]
    added = torch.where(advantages != 0, 0.1 + given.flip(0), 0) * batch.response_mask
    found, _ = _gradients(policy, batch, token_weights(batch, given, added))
    larger = given + torch.where(advantages != 0, added / advantages, 0)
    assert largest_gap(found, _gradients(policy, batch, larger)[0]) <= 1e-9
    assert largest_gap(found, _gradients(policy, batch, given)[0]) > 0.01


def test_dead_rows_are_not_run_unless_something_else_needs_them(policy, batch):
    live = _update(policy, batch).live
    assert torch.equal(live, (batch.advantages != 0) & batch.finished)
    assert live.sum() < batch.finished.sum()
    for more in ({"kl_coefficient": 0.1, "reference": policy}, {"entropy_coefficient": 0.1}):
        assert torch.equal(_update(policy, batch, **more).live, batch.finished)
    added = torch.zeros(batch.response_mask.shape)
    for additive, refreshed, everything in ((added, False, False), (added, True, True), (None, True, False)):
        found = _update(policy, batch, token_weights(batch, additive=additive), refreshes=refreshed).live
        assert torch.equal(found, batch.finished if everything else live), "refreshed weights may add to any row later"
    added[4, 0] = -0.1
    expected = live.clone()
    expected[4] = True
    assert torch.equal(_update(policy, batch, token_weights(batch, additive=added)).live, expected)


@pytest.mark.parametrize("cuts", [{"num_iterations": 3}, {"mini_batches": 2}], ids=str)
def test_old_log_probabilities_are_those_before_the_first_step(cuts, batch, given):
    """Pass 1 records what passes 2 and 3 divide by; rows of a later mini-batch are scored before."""
    moving = load_policy("arithmetic").double().train()
    update = _update(moving, batch, given, token_budget=300, **cuts)
    optimizer = torch.optim.SGD(moving.parameters(), lr=0.5)
    with torch.no_grad():
        expected = moving(_whole(batch))
    ratios = []
    for number in range(len(update.steps)):
        optimizer.zero_grad()
        ratios.append(update.accumulate(number, backward).figures()["clip_ratio/region_mean"])
        optimizer.step()
    assert_near(_old_logprobs(update), expected[update.live].double(), 64, torch.float32)
    assert len(ratios) == next(iter(cuts.values()))
    assert ratios[0] == 0 < ratios[-1]


def _deal(batch, mini_batches, seed=0, **options):
    return split_rows(batch, Execution(mini_batches=mini_batches, **options), torch.Generator().manual_seed(seed))


def test_mini_batches_are_whole_groups_in_the_order_of_the_seed(batch):
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
    pairs = [order[2 * k : 2 * k + 2] for k in range(3)]
    expected = [[row for row in range(24) if row // 4 in pair] for pair in pairs]
    assert [part.tolist() for part in _deal(batch, 3)] == expected


def test_split_groups_deal_each_row_once_into_equal_parts_and_prompts_apart_as_chance_has_it(batch):
    for number, sizes in ((5, {4, 5}), (30, {0, 1})):
        parts = _deal(batch, number, split_groups=True)
        assert sorted(torch.cat(parts).tolist()) == list(range(24))
        assert {len(part) for part in parts} == sizes
        assert all(part.tolist() == sorted(part.tolist()) for part in parts)
    together = 0
    for seed in range(400):
        for part in _deal(batch, 3, seed, split_groups=True):
            sizes = torch.bincount(batch.group[part])
            together += int((sizes * (sizes - 1)).sum())
    # Each of 24 rows has 3 others of its prompt, and 7 of 23 rows beside it in its mini-batch.
    assert together / (400 * 24 * 3) == pytest.approx(7 / 23, abs=0.02)


class WithoutRows(Forward):
    """What a rank with fewer rows than another has to run."""

    def cut(self, rows):
        return [dummy_micro_batch(self.batch)]


def test_a_rank_without_rows_keeps_in_step_on_a_row_that_has_a_response(policy, batch):
    """Its first row is empty; the forward pass must not fail, and its gradient is zero."""
    mask = batch.response_mask.clone()
    mask[0] = False
    ones = torch.ones(len(mask))
    without = batch.replace(response_mask=mask, finished=ones.bool(), advantages=ones)
    micro = dummy_micro_batch(without)
    assert micro.rows.tolist() == [1]
    forward = WithoutRows(policy, without, context_for(policy))
    assert forward(micro).stats.logprobs.shape == without.select(micro.rows).response_mask.shape
    policy.zero_grad(set_to_none=True)
    update = _update(policy, without, forward_of=WithoutRows)
    assert update.accumulate(0, backward).figures()["loss"] == 0
    assert all((p.grad == 0).all() for p in policy.parameters())


@pytest.mark.parametrize("cuts", [{"num_iterations": 2}, {"mini_batches": 2, "split_groups": True}], ids=str)
def test_with_dropout_old_log_probabilities_are_all_of_the_policy_that_sampled(cuts, batch):
    dropping = live(load_policy("arithmetic", Loading(lora=LoRA(rank=4, dropout=0.3))).double())
    with torch.no_grad():
        expected = dropping.eval()(_whole(batch))
    update = _update(dropping.train(), batch, **cuts)
    for number in range(len(update.steps)):
        update.accumulate(number, backward)
        assert_near(_old_logprobs(update), expected[update.live].double(), 64, torch.float32)
    assert dropping.training
