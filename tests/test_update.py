"""Gradients of one optimiser step, however it is cut."""

import math

import pytest
import torch

from grail_lightning.functional import group_advantages
from grail_lightning.objective import LossCounts, Objective, advantages, live_rows, loss_mask, split_groups
from grail_lightning.policy import Loading, LoRA, load_policy
from grail_lightning.rollout import Sampling
from grail_lightning.stepping import clip_gradients
from grail_lightning.update import Piece, Update
from tests.runs import problems
from tests.steps import KL
from tests.tolerance import assert_near, near, roundings

LIMIT = 36


@pytest.fixture(scope="module")
def policy():
    return load_policy("arithmetic").double().train()


@pytest.fixture(scope="module")
def batch(policy):
    """24 rollouts in float64, uneven, some truncated, some groups dead."""
    from grail_lightning.engines import HFEngine

    engine = HFEngine()
    engine.update_weights(policy)
    made = engine.generate(problems(6), 4, Sampling(max_response_length=LIMIT), seed=1)
    rewards = torch.randint(2, (24,), generator=torch.Generator().manual_seed(0)).double()
    rewards[4:8] = 1.0
    made = made.replace(rewards=rewards, advantages=group_advantages(rewards, 4))
    assert 0 < (~made.finished).sum() < 24
    return made


def _gradients(policy, batch, objective, weights=None, order=None, reference=None):
    if order is not None:
        batch = batch.select(order)
        weights = None if weights is None else weights[order][:, : batch.response_mask.shape[1]]
    policy.zero_grad(set_to_none=True)
    update = Update(policy, reference, batch, objective, Sampling(max_response_length=LIMIT), seed=0)
    values = batch.response_mask.double() if weights is None else weights
    rows = update.plan(values, None)[0]
    metrics = update.accumulate(rows, lambda loss, last: loss.backward())
    return {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}, metrics


def _gap(ours, theirs):
    """The largest difference of a tensor as a share of its largest entry; RMS norms run in float32."""
    assert ours.keys() == theirs.keys()
    assert ours
    return max(
        (ours[name] - theirs[name]).abs().max().item() / max(theirs[name].abs().max().item(), 1e-12) for name in ours
    )


@pytest.fixture(scope="module")
def token_weights(batch):
    return torch.rand(batch.response_mask.shape, generator=torch.Generator().manual_seed(1)).double() + 0.5


@pytest.fixture(scope="module")
def reference():
    made = load_policy("arithmetic", trainable=False).double()
    for p in made.parameters():
        p.data *= 1.01
    return made


@pytest.mark.parametrize("kl", KL, ids=lambda kl: "-".join(str(v) for v in kl.values()) or "no kl")
@pytest.mark.parametrize("scale", ["none", "group", "batch", "bnpo"])
@pytest.mark.parametrize("how", ["grpo", "dr_grpo", "dapo"])
def test_one_big_batch_equals_micro_batches_and_shuffled_rows(how, scale, kl, policy, reference, batch, token_weights):
    options = {"group_size": 4, "aggregation": how, "scale_rewards": scale, **kl}
    batch, token_weights = batch.select(torch.arange(12)), token_weights[:12]  # Three groups; the second is dead.
    token_weights = token_weights[:, : batch.response_mask.shape[1]]
    batch = batch.replace(advantages=advantages(batch, Objective(**options)))
    big = Objective(token_budget=10**6, **options)
    expected, metrics = _gradients(policy, batch, big, token_weights, reference=reference)
    found, small_metrics = _gradients(
        policy, batch, Objective(token_budget=200, **options), token_weights, reference=reference
    )
    assert _gap(found, expected) <= roundings(64, torch.float32)
    assert small_metrics == near(metrics, 64, torch.float32, scale=0.01)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(2))
    shuffled, _ = _gradients(policy, batch, big, token_weights, order, reference)
    assert _gap(shuffled, expected) <= roundings(64, torch.float32)


@pytest.mark.parametrize(
    "more",
    [
        {"level": "sequence"},
        {"surrogate": "cispo"},
        {"entropy_coefficient": 0.03},
        {"sampler_cap": 1.5},
        {"mask_truncated": False},
    ],
    ids=str,
)
def test_every_way_of_cutting_gives_the_same_gradient(more, policy, reference, batch, token_weights):
    noise = torch.randn(batch.response_mask.shape, generator=torch.Generator().manual_seed(5))
    batch = batch.replace(sampling_logprobs=batch.sampling_logprobs + noise)
    options = {"group_size": 4, "kl_coefficient": 0.1, "share_prompts": False} | more
    big = Objective(token_budget=10**6, **options)
    expected, metrics = _gradients(policy, batch, big, token_weights, reference=reference)
    for budget in (1, 100, 333):
        small = Objective(token_budget=budget, **options)
        found, small_metrics = _gradients(policy, batch, small, token_weights, reference=reference)
        assert _gap(found, expected) <= roundings(64, torch.float32)
        assert small_metrics == near(metrics, 64, torch.float32, scale=0.01)
    plain = Objective(group_size=4, kl_coefficient=0.1, token_budget=10**6, share_prompts=False)
    without, _ = _gradients(policy, batch, plain, token_weights, reference=reference)
    differs = max((without[name] - expected[name]).abs().max().item() for name in expected)
    # At ratio 1 the sequence's ratio is 1, too, and cispo's gradient is that of the clipped surrogate.
    assert (differs > 1e-6) == (more.keys() <= {"entropy_coefficient", "sampler_cap", "mask_truncated"})


@pytest.mark.parametrize("how", ["grpo", "dr_grpo", "dapo"])
def test_entropy_bonus_and_sampler_correction_equal_a_loss_written_by_hand(how, policy, batch, token_weights):
    noise = torch.randn(batch.response_mask.shape, generator=torch.Generator().manual_seed(5)).double()
    batch = batch.replace(sampling_logprobs=batch.sampling_logprobs + noise)
    objective = Objective(group_size=4, aggregation=how, token_budget=150, entropy_coefficient=0.03, sampler_cap=1.5)
    found, _ = _gradients(policy, batch, objective, token_weights)
    policy.zero_grad(set_to_none=True)
    logits = policy.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()).logits
    width = batch.response_mask.shape[1]
    logs = logits[:, -width - 1 : -1].log_softmax(-1)
    lp = logs.gather(-1, batch.response_ids[..., None]).squeeze(-1)
    correction = (lp.detach() - batch.sampling_logprobs).exp().clamp(max=1.5)
    assert (correction == 1.5).any()
    mask = batch.response_mask & batch.finished[:, None]
    token = -lp * batch.advantages[:, None] * token_weights * correction + 0.03 * (logs.exp() * logs).sum(-1)
    token = token.masked_fill(~mask, 0)
    rows = batch.finished.sum()
    {
        "grpo": (token.sum(1) / mask.sum(1).clamp(min=1)).sum() / rows,
        "dr_grpo": token.sum() / (rows * LIMIT),
        "dapo": token.sum() / mask.sum(),
    }[how].backward()
    assert _gap(found, {n: p.grad for n, p in policy.named_parameters()}) <= roundings(64, torch.float32)


def test_the_kl_of_a_later_pass_is_corrected_by_each_tokens_own_ratio_at_either_level(policy, reference, batch):
    """The surrogate may take the sequence's ratio; who drew a token is a matter of the token."""
    moved = load_policy("arithmetic").double().train()
    options = {"group_size": 4, "updates_per_batch": 2, "kl_coefficient": 0.1, "level": "sequence"}
    silent = batch.replace(advantages=torch.zeros_like(batch.advantages))  # The KL term alone.
    update = Update(moved, reference, silent, Objective(**options), Sampling(max_response_length=LIMIT), seed=0)
    first, second = update.plan(batch.response_mask.double(), None)
    update.accumulate(first, lambda loss, last: loss.backward())
    with torch.no_grad():
        for p in moved.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3), dtype=p.dtype))
    moved.zero_grad(set_to_none=True)
    update.accumulate(second, lambda loss, last: loss.backward())
    found = {n: p.grad.clone() for n, p in moved.named_parameters()}
    moved.zero_grad(set_to_none=True)
    inputs = batch.input_ids, batch.attention_mask, batch.response_mask
    with torch.no_grad():
        old, ref = load_policy("arithmetic").double()(*inputs).logprobs, reference(*inputs).logprobs
    lp = moved(*inputs).logprobs
    estimate = (lp - old).exp() * ((ref - lp).exp() - 1 - (ref - lp))
    mask = batch.response_mask & batch.finished[:, None]
    (0.1 * (estimate * mask).sum() / (batch.finished.sum() * LIMIT)).backward()
    assert _gap(found, {n: p.grad for n, p in moved.named_parameters()}) <= roundings(64, torch.float32)


def test_a_sampler_that_reports_no_log_probabilities_cannot_be_corrected(policy, batch):
    with pytest.raises(ValueError, match=r"`objective.sampler_cap` needs the log-probabilities of the sampler"):
        _gradients(policy, batch.replace(sampling_logprobs=None), Objective(group_size=4, sampler_cap=2.0))


@pytest.mark.parametrize("how", ["grpo", "dr_grpo", "dapo"])
def test_gradients_equal_one_loss_over_all_rows_written_by_hand(how, policy, batch, token_weights):
    """No row is left out here, no micro-batch is cut: dead rows, trimming and shared prompts must not change that."""
    found, metrics = _gradients(
        policy, batch, Objective(group_size=4, aggregation=how, token_budget=150), token_weights
    )
    policy.zero_grad(set_to_none=True)
    logits = policy.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()).logits
    width = batch.response_mask.shape[1]
    lp = logits[:, -width - 1 : -1].log_softmax(-1).gather(-1, batch.response_ids[..., None]).squeeze(-1)
    mask = batch.response_mask & batch.finished[:, None]
    token = -(lp - lp.detach()).exp() * batch.advantages[:, None] * token_weights * mask
    rows = batch.finished.sum()
    loss = {
        "grpo": (token.sum(1) / mask.sum(1).clamp(min=1)).sum() / rows,
        "dr_grpo": token.sum() / (rows * LIMIT),
        "dapo": token.sum() / mask.sum(),
    }[how]
    loss.backward()
    assert _gap(found, {n: p.grad for n, p in policy.named_parameters()}) <= roundings(64, torch.float32)
    assert metrics["loss"] == near(loss.item(), 64, torch.float32, scale=0.01)


def test_unmasked_truncated_rollouts_count_in_both_numerator_and_denominator(policy, batch):
    kept = Objective(group_size=4, mask_truncated=False)
    assert torch.equal(loss_mask(batch, kept), batch.response_mask)
    masked = loss_mask(batch, Objective(group_size=4))
    assert torch.equal(masked.any(1), batch.finished)


def test_a_fully_masked_batch_has_loss_zero_and_no_gradient(policy, batch):
    unfinished = batch.replace(finished=torch.zeros(24, dtype=torch.bool))
    grads, metrics = _gradients(policy, unfinished, Objective(group_size=4))
    assert grads == {}
    assert metrics.get("loss", 0.0) == 0.0


def test_dead_rows_are_not_run_unless_something_else_needs_them(batch):
    mask = loss_mask(batch, Objective(group_size=4))
    live = live_rows(batch, mask, Objective(group_size=4), None)
    assert torch.equal(live, (batch.advantages != 0) & batch.finished)
    assert torch.equal(live_rows(batch, mask, Objective(group_size=4, kl_coefficient=0.1), None), batch.finished)
    additive = torch.zeros(batch.response_mask.shape)
    assert torch.equal(live_rows(batch, mask, Objective(group_size=4), additive), batch.finished)


def test_the_first_pass_runs_at_ratio_one_and_later_passes_against_it(policy, batch, token_weights):
    """Three passes with a step between them: pass 1 records what passes 2 and 3 divide by."""
    moving = load_policy("arithmetic").double().train()
    objective = Objective(group_size=4, updates_per_batch=3, token_budget=300)
    update = Update(moving, None, batch, objective, Sampling(max_response_length=LIMIT), seed=0)
    optimizer = torch.optim.SGD(moving.parameters(), lr=0.5)
    steps = update.plan(token_weights, None)
    assert len(steps) == 3
    with torch.no_grad():
        expected = moving(batch.input_ids, batch.attention_mask, batch.response_mask).logprobs
    ratios = []
    for rows in steps:
        optimizer.zero_grad()
        metrics = update.accumulate(rows, lambda loss, last: loss.backward())
        ratios.append(metrics["clip_ratio/region_mean"])
        optimizer.step()
    live = update.live
    assert_near(update.batch.old_logprobs[live].double(), expected[live], 64, torch.float32)
    assert ratios[0] == 0
    assert ratios[-1] > 0


def test_mini_batches_are_whole_groups_and_cover_the_batch(batch):
    objective = Objective(group_size=4, mini_batches=3)
    parts = split_groups(batch, objective, torch.Generator().manual_seed(0))
    assert sorted(torch.cat(parts).tolist()) == list(range(24))
    assert all(len(part) == 8 for part in parts)
    for part in parts:
        assert all((batch.group[part] == g).sum() == 4 for g in batch.group[part].unique())


def test_with_mini_batches_old_log_probabilities_are_those_before_the_first_step(batch, token_weights):
    moving = load_policy("arithmetic").double().train()
    objective = Objective(group_size=4, mini_batches=2)
    update = Update(moving, None, batch, objective, Sampling(max_response_length=LIMIT), seed=0)
    with torch.no_grad():
        expected = moving(batch.input_ids, batch.attention_mask, batch.response_mask).logprobs
    optimizer = torch.optim.SGD(moving.parameters(), lr=0.05)
    for rows in update.plan(token_weights, None):
        update.accumulate(rows, lambda loss, last: loss.backward())
        optimizer.step()
    assert_near(update.batch.old_logprobs[update.live].double(), expected[update.live], 64, torch.float32)


def test_a_rank_without_rows_keeps_in_step_on_a_row_that_has_a_response(policy, batch):
    """Its first row is empty; the forward pass must not fail, and its gradient is zero."""
    mask = batch.response_mask.clone()
    mask[0] = False
    update = Update(
        policy, None, batch.replace(response_mask=mask), Objective(group_size=4), Sampling(max_response_length=LIMIT), 0
    )
    piece, stats = update._forward(policy, Piece(), None)
    assert piece.row.tolist() == [1]
    assert stats.logprobs.shape == piece.response_mask.shape
    assert update._loss(Piece(), LossCounts(num_rollouts=1, num_tokens=1), torch.zeros(mask.shape))[0] == 0


@pytest.mark.parametrize("cuts", [{"updates_per_batch": 2}, {"mini_batches": 2}], ids=str)
def test_with_dropout_old_log_probabilities_are_all_of_the_policy_that_sampled(cuts, batch):
    dropping = load_policy("arithmetic", Loading(lora=LoRA(rank=4, dropout=0.3))).double()
    for name, parameter in dropping.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    with torch.no_grad():
        expected = dropping.eval()(batch.input_ids, batch.attention_mask, batch.response_mask).logprobs
    objective = Objective(group_size=4, **cuts)
    update = Update(dropping.train(), None, batch, objective, Sampling(max_response_length=LIMIT), seed=0)
    for rows in update.plan(batch.response_mask.double(), None):
        update.accumulate(rows, lambda loss, last: loss.backward())
        found = update.batch.old_logprobs[update.live].double()
        assert_near(found, expected[update.live], 64, torch.float32)
    assert dropping.training


def test_gradients_are_scaled_down_to_the_norm_and_the_norm_before_is_told(policy, batch):
    _gradients(policy, batch, Objective(group_size=4))
    norm = torch.cat([p.grad.flatten() for p in policy.parameters()]).norm().item()
    assert clip_gradients(policy, None) == pytest.approx(norm)
    assert clip_gradients(policy, norm / 2) == pytest.approx(norm)
    assert torch.cat([p.grad.flatten() for p in policy.parameters()]).norm().item() == pytest.approx(norm / 2, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 1}, "`objective.group_size` must be at least 2, but got 1"),
        ({"token_budget": 0}, "`objective.token_budget` must be at least 1, but got 0"),
        ({"kl_coefficient": -1.0}, "must be finite and ≥ 0, but got -1.0"),
        ({"max_grad_norm": 0.0}, "must be finite and positive, but got 0.0. Use null"),
        ({"clip_low": 2.0}, "`clip_low` must lie in"),
    ],
)
def test_a_bad_objective_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        Objective(**options)


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize(
    "option",
    ["kl_coefficient", "entropy_coefficient", "max_grad_norm", "clip_low", "clip_high", "ratio_cap", "sampler_cap"],
)
def test_options_are_finite_numbers_but_for_the_upper_clip_range(option, number):
    if option == "clip_high" and number == math.inf:
        Objective(clip_high=number)
        return
    with pytest.raises(ValueError, match=f"`(objective\\.)?{option}` .* but got .*{number}"):
        Objective(**{option: number})


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_entropies_of_the_rows_that_came_by_are_kept(mini_batches, policy, batch):
    objective = Objective(group_size=4, mini_batches=mini_batches, updates_per_batch=2, token_budget=200)
    update = Update(policy, None, batch, objective, Sampling(max_response_length=LIMIT), seed=0)
    for rows in update.plan(batch.response_mask.double(), None):
        update.accumulate(rows, lambda loss, last: None)
    logits = policy.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()).logits
    width = batch.response_mask.shape[1]
    expected = torch.distributions.Categorical(logits=logits[:, -width - 1 : -1]).entropy() * batch.response_mask
    assert_near(update.entropies[update.live].double(), expected[update.live], 64, torch.float32)
    assert (update.entropies[~update.live] == 0).all()
