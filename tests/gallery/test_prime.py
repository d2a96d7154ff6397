"""PRIME against loops over the model's own logits, and its reward model in real runs."""

import copy
import math
from functools import partial

import pytest
import torch

from grail_lightning import Loading, LoRA, Sampling
from grail_lightning.core.functional.advantages import ranked_pairs
from grail_lightning.core.policy.load import load_policy
from grail_lightning.credit import PRIME
from tests.core.credit.rollouts import context, row_logits, second_model
from tests.runs import Drawing, Watch, batches, module, trained_model, trainer
from tests.shell import SHORT, fails_early
from tests.tolerance import assert_near, near

BETA, LR = 0.3, 0.2


def _ratios(model, reference, batch, row):
    """The log-ratio of each token of a row, as a list."""
    own, other = (row_logits(m, batch, row).log_softmax(-1) for m in (model, reference))
    return [(own[t, token] - other[t, token]).item() for t, token in enumerate(batch.response_ids[row, : len(own)])]


def _stepped(model, reference, batch, rows):
    """A copy of the model after a step of gradient descent on the mean loss of some rows."""
    model = copy.deepcopy(model).requires_grad_(True)
    total = 0.0
    for row in rows:
        ids = batch.input_ids[row][batch.attention_mask[row]]
        length = int(batch.response_mask[row].sum())
        own, other = (m.model(ids[None], use_cache=False).logits[0, -length - 1 : -1] for m in (model, reference))
        chosen = torch.arange(length), ids[-length:]
        logit = BETA * (own.log_softmax(-1)[chosen] - other.detach().log_softmax(-1)[chosen]).sum()
        right = torch.sigmoid(logit)
        total = total - torch.log(right if batch.correct[row] else 1 - right)
    (total / len(rows)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= LR * parameter.grad
    return model, (total / len(rows)).item()


def _advantages(model, reference, batch, rows, weight, discount, normalise):
    """The whitened advantages of some rows, as lists by row."""
    rewards = {row: [BETA * q for q in _ratios(model, reference, batch, row)] for row in rows}

    def returns(values, gamma):
        return [sum(gamma ** (s - t) * values[s] for s in range(t, len(values))) for t in range(len(values))]

    if normalise:
        largest = max(abs(g) for row in rows for g in returns(rewards[row], 1.0)) + 1e-6
        rewards = {row: [r / largest for r in rewards[row]] for row in rows}
    found = {}
    for row in rows:
        others = [j for j in rows if batch.group[j] == batch.group[row] and j != row]
        baseline = sum(sum(rewards[j]) / len(rewards[j]) for j in others) / len(others)
        outcome = float(batch.correct[row]) - sum(float(batch.correct[j]) for j in others) / len(others)
        found[row] = [outcome + weight * g for g in returns([r - baseline for r in rewards[row]], discount)]
    every = [a for row in rows for a in found[row]]
    mean = sum(every) / len(every)
    std = math.sqrt(sum((a - mean) ** 2 for a in every) / (len(every) - 1) + 1e-8)
    return {row: [(a - mean) / std for a in found[row]] for row in rows}


@pytest.mark.parametrize(
    ("double_forward", "accuracy", "rows", "options"),
    [
        (False, (0.2, 0.8), range(6), {"weight": 5.0, "discount": 1.0, "normalise": True}),
        (True, (0.5, 0.8), range(3, 6), {"weight": 0.7, "discount": 0.9, "normalise": False}),
    ],
)
def test_the_step_and_the_advantages_are_those_of_the_formulas(
    double_forward, accuracy, rows, options, golden_policy, reference, batch
):
    """The model begins as another one than the reference, so that its ratios are not 0 before the step either."""
    second = second_model(golden_policy, partial(torch.optim.SGD, lr=LR))
    credit = PRIME(beta=BETA, double_forward=double_forward, accuracy=accuracy, **options)
    made = credit(golden_policy, batch, context(reference=reference, second=second))
    after, loss = _stepped(golden_policy, reference, batch, rows)
    for ours, theirs in zip(second.policy.parameters(), after.parameters(), strict=True):
        assert_near(ours.detach(), theirs.detach(), 100, torch.float32)
    assert any(not torch.equal(p, q) for p, q in zip(after.parameters(), golden_policy.parameters(), strict=True))
    assert made.metrics["reward_model_loss"].total / len(rows) == near(loss, 100, torch.float32, scale=1.0)
    assert made.metrics["filtered"] == (6 - len(rows), 6)
    expected = _advantages(after if double_forward else golden_policy, reference, batch, rows, **options)
    for row in rows:
        assert made.additive[row, : len(expected[row])].tolist() == near(expected[row], 1000, torch.float32, scale=1.0)
        assert max(expected[row]) - min(expected[row]) > 0.05, "the process rewards matter"
    outside = [row for row in range(6) if row not in rows]
    assert (made.additive[outside] == 0).all()
    assert (made.values == 0).all()


def test_a_model_that_is_the_reference_has_no_rewards_before_its_first_step(golden_policy, batch):
    second = second_model(golden_policy)
    made = PRIME()(golden_policy, batch, context(reference=golden_policy, second=second))
    assert made.additive[0].unique().numel() == 2, "one advantage for all tokens, and padding"
    assert made.metrics["reward_model_loss"].total / 6 == pytest.approx(math.log(2))
    assert made.metrics["reward_model_accuracy"].total == made.metrics["reward_model_accuracy"].size / 2 == 2
    assert second.steps == 1
    # All groups are filtered: no step.
    made = PRIME(accuracy=(0.9, 0.95))(golden_policy, batch, context(reference=golden_policy, second=second))
    assert (made.additive == 0).all()
    assert second.steps == 1


def test_pairs_of_equal_scores_count_half_and_only_those_of_a_group_are_ranked():
    scores, correct = torch.tensor([1.0, 2.0, 2.0, 0.0]), torch.tensor([True, False, True, False])
    assert ranked_pairs(scores, correct, torch.tensor([0, 0, 0, 0])) == (2.5, 4)
    assert ranked_pairs(scores, correct, torch.tensor([0, 0, 1, 1])) == (1.0, 2)


def test_its_optimizer_draws_the_random_numbers_of_its_step_whatever_else_draws(golden_policy, batch, reference):
    trained = []
    for _ in range(2):
        second = second_model(golden_policy, partial(Drawing, lr=LR))
        PRIME()(golden_policy, batch, context(reference=reference, second=second))
        trained.append(torch.cat([p.detach().flatten() for p in second.policy.parameters()]))
    assert torch.equal(*trained)


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loading", "precision"),
    [
        (Loading(lora=LoRA(rank=2)), "32-true"),
        (Loading(dtype="bfloat16"), "32-true"),
        pytest.param(Loading(), "bf16-mixed", marks=pytest.mark.slow),
    ],
    ids=["adapters", "half", "autocast"],
)
def test_the_reward_model_trains_in_every_form_of_the_policy(loading, precision):
    watch, short = Watch(), Sampling(max_response_length=24)
    credit = PRIME(optimizer=partial(torch.optim.AdamW, lr=1e-3), accuracy=(0.0, 1.0))
    ours = module(credit=credit, loading=loading, sampling=short)
    trainer(1, watch, precision=precision).fit(ours, batches(1, size=2))
    second = trained_model(ours)
    state = second.state_dict()
    assert all(("lora" in name) == (loading.lora is not None) for name in state["weights"])
    assert {weight.dtype for weight in state["weights"].values()} == {torch.float32}
    assert state["steps"] == 1
    assert second.policy.model.dtype == ours.policy.model.dtype
    assert all(0 < output.metrics["credit/reward_model_grad_norm"] < math.inf for output in watch.outputs)


def _takes(golden_policy, batch, frozen, second, steps):
    """The learning rates of some steps on one batch."""
    given = context(reference=frozen, second=second)
    return [PRIME()(golden_policy, batch, given).metrics["reward_model_learning_rate"] for _ in range(steps)]


def test_a_rate_that_is_set_anew_at_a_resume_holds_from_there_on(golden_policy, reference, batch):
    def made(lr):
        schedule = partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.2)
        return second_model(golden_policy, partial(torch.optim.AdamW, lr=lr), schedule)

    before = made(1e-3)
    assert _takes(golden_policy, batch, reference, before, 2) == pytest.approx([2e-4, 3.6e-4])
    state = copy.deepcopy(before.state_dict())
    for lr in (1e-3, 1e-4):
        resumed = made(lr)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state, "a checkpoint before the first step keeps what was loaded"
        assert _takes(golden_policy, batch, reference, resumed, 2) == pytest.approx([lr * 0.52, lr * 0.68])
    others = made(1e-3)
    others.load_state_dict(state | {"weights": {"another": torch.zeros(1)}})
    with pytest.raises(ValueError, match=r"`ckpt_path` must hold the model that `model\.credit` trains"):
        _takes(golden_policy, batch, reference, others, 1)


def test_a_model_with_other_tokens_is_refused(empty_folder, capsys):
    policy = load_policy("arithmetic")
    policy.tokenizer.add_tokens(["<more>"])
    policy.save(empty_folder / "other")
    said = fails_early(capsys, "fit", *SHORT, "--model.credit=PRIME", "--model.credit.model=./other")
    assert "`model.credit.model` must have the tokens of the policy 'arithmetic', but got './other'" in said
