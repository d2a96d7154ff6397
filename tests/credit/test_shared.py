"""Saliency beside the update's own forward pass: the same weights and gradients as on its own."""

from dataclasses import replace

import pytest
import torch

from grail_lightning.credit import GRAIL, CreditContext, SaliencyOptions, TokenCredit, WarmUp
from grail_lightning.credit.shared import share_forward
from grail_lightning.engines import HFEngine
from grail_lightning.functional import group_advantages
from grail_lightning.locate import align_rows, answer_masks
from grail_lightning.objective import Objective, loss_mask
from grail_lightning.policy import Loading, load_policy
from grail_lightning.policy.options import LoRA
from grail_lightning.rollout import Sampling
from grail_lightning.update import Update
from tests.runs import Watch, batches, module, problems, trainer
from tests.tolerance import assert_near, near

SAMPLING = Sampling(max_response_length=40)


@pytest.fixture(scope="module")
def batch():
    """24 rollouts; most rewards are what they are not, so that gates have rows on either side."""
    policy, engine = load_policy("arithmetic"), HFEngine()
    engine.update_weights(policy)
    made = engine.generate(problems(6), 4, SAMPLING, seed=3)
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0] * 5 + [1.0] * 4)
    made = made.replace(answer=answer_masks(made, align_rows(made, policy.tokenizer)))
    assert 0 < (~made.finished).sum() < 12
    return made.replace(rewards=rewards, advantages=group_advantages(rewards, 4))


@pytest.fixture
def policy():
    return load_policy("arithmetic").double().train()


def _context(**changes):
    return CreditContext(step=3, generator=torch.Generator().manual_seed(0), token_budget=400, **changes)


def _run(policy, batch, credit, objective, share):
    """The gradients of each optimiser step, and the token weights that were used."""
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
    trained = loss_mask(batch, objective).any(1)
    shared = share_forward(credit, policy, batch, _context(), trained) if share else None
    assert (shared is None) != share
    weights = credit(policy, batch, _context()) if shared is None else shared.weights(policy)
    update = Update(policy, None, batch, objective, SAMPLING, seed=0, shared=shared)
    gradients = []
    for rows in update.plan(weights.values, weights.additive):
        optimizer.zero_grad()
        update.accumulate(rows, lambda loss, last: loss.backward())
        gradients.append({n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None})
        optimizer.step()
    return gradients, weights if shared is None else shared.weights(policy)


@pytest.mark.parametrize(("mini_batches", "updates_per_batch"), [(1, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("leaf", ["embeddings", "middle"])
@pytest.mark.parametrize("alignment", ["predictor", "token"])
def test_weights_and_gradients_are_those_of_a_separate_pass(batch, leaf, alignment, mini_batches, updates_per_batch):
    objective = Objective(
        group_size=4, token_budget=400, mini_batches=mini_batches, updates_per_batch=updates_per_batch
    )
    credit = WarmUp(GRAIL(saliency=SaliencyOptions(leaf=leaf, alignment=alignment)), steps=6)
    apart, expected = _run(load_policy("arithmetic").double().train(), batch, credit, objective, share=False)
    beside, found = _run(load_policy("arithmetic").double().train(), batch, credit, objective, share=True)
    assert_near(found.scores, expected.scores, 64, torch.float32)
    assert_near(found.values, expected.values, 64, torch.float32)
    assert found.metrics == expected.metrics
    assert len(beside) == len(apart) == mini_batches * updates_per_batch
    for ours, theirs in zip(beside, apart, strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert_near(ours[name], theirs[name], 64, torch.float32)


def test_the_weights_matter_to_the_gradients(batch, policy):
    credit, objective = GRAIL(), Objective(group_size=4)
    ((weighed,), _) = _run(policy, batch, credit, objective, share=True)
    ((plain,), _) = _run(load_policy("arithmetic").double().train(), batch, GRAIL(std=0.0), objective, share=True)
    name = "model.model.layers.0.mlp.up_proj.weight"
    assert (weighed[name] - plain[name]).norm() > 0.01 * plain[name].norm()


def test_adapters_over_frozen_embeddings_can_share(batch):
    loading = Loading(lora=LoRA(rank=4, target_modules=("q_proj", "v_proj")))
    made = [load_policy("arithmetic", loading).double().train() for _ in range(2)]
    objective = Objective(group_size=4)
    for policy in made:
        torch.manual_seed(1)
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    (apart, expected), (beside, found) = (
        _run(policy, batch, GRAIL(), objective, share=share) for policy, share in zip(made, (False, True), strict=True)
    )
    assert_near(found.values, expected.values, 64, torch.float32)
    assert len(beside[0]) == len(apart[0]) > 0
    for name in apart[0]:
        assert_near(beside[0][name], apart[0][name], 64, torch.float32)


class Remapped(GRAIL):
    """Maps scores otherwise, by what may lie beyond a micro-batch."""

    def map(self, scores, mask, eligible):
        raise AssertionError("not asked here")


class Renamed(GRAIL):
    """Other defaults, nothing else."""

    def __init__(self, std: float = 0.1) -> None:
        super().__init__(std=std)


class Doubled(GRAIL):
    """Makes other weights than GRAIL, but inherits what GRAIL explains."""

    def __call__(self, policy, batch, context):
        raise AssertionError("not asked here")


@pytest.mark.parametrize(
    "credit", [GRAIL(saliency=SaliencyOptions(refresh="update")), GRAIL(saliency=SaliencyOptions(share_forward=False))]
)
def test_a_method_that_wants_its_own_pass_gets_it(credit, batch, policy):
    assert share_forward(credit, policy, batch, _context(), torch.ones(24, dtype=torch.bool)) is None


def test_what_a_subclass_makes_of_the_saliency_is_not_known_and_so_not_shared(batch, policy):
    everything = torch.ones(24, dtype=torch.bool)
    assert share_forward(Doubled(), policy, batch, _context(), everything) is None
    assert share_forward(Remapped(), policy, batch, _context(), everything) is None
    assert share_forward(Renamed(), policy, batch, _context(), everything) is not None


class Added(TokenCredit):
    """GRAIL and an additive stage that depends on the row alone."""

    def explains(self, policy, batch):
        return GRAIL().explains(policy, batch)

    def __call__(self, policy, batch, context):
        weights = GRAIL()(policy, batch, context)
        return replace(weights, additive=0.3 * (weights.scores > 0.05).float())


def test_an_additive_stage_reaches_the_loss_of_shared_rows(batch):
    objective = Objective(group_size=4, token_budget=400)
    apart, beside = (
        _run(load_policy("arithmetic").double().train(), batch, Added(), objective, share=share)[0][0]
        for share in (False, True)
    )
    for name in apart:
        assert_near(beside[name], apart[name], 64, torch.float32)


def test_a_rate_of_dropout_that_a_block_keeps_as_a_number_is_seen(batch):
    policy = load_policy("arithmetic").train()
    policy.blocks[0].residual_dropout = 0.1
    assert share_forward(GRAIL(), policy, batch, _context(), torch.ones(24, dtype=torch.bool)) is None


def test_dropout_and_checkpointed_blocks_are_not_shared(batch):
    everything = torch.ones(24, dtype=torch.bool)
    checkpointed = load_policy("arithmetic", Loading(gradient_checkpointing=True)).train()
    assert share_forward(GRAIL(), checkpointed, batch, _context(), everything) is None
    dropping = load_policy("arithmetic").train()
    assert share_forward(GRAIL(), dropping, batch, _context(), everything) is not None
    for block in dropping.blocks:
        block.self_attn.attention_dropout = 0.1
    assert share_forward(GRAIL(), dropping, batch, _context(), everything) is None


def test_a_training_step_gives_the_same_sharing_or_not():
    runs = []
    for share in (False, True):
        watch = Watch()
        credit = GRAIL(saliency=SaliencyOptions(share_forward=share))
        made = module(credit=credit, objective={"mini_batches": 2})
        trainer(2, watch).fit(made, batches(1))
        runs.append((watch.outputs[0], made))
    (apart, one), (beside, other) = runs
    assert apart.batch.texts == beside.batch.texts
    assert (apart.weights.scores != 0).any()
    assert_near(beside.weights.values, apart.weights.values, 1000, torch.float32)
    timing = {name for name in apart.metrics if name.startswith("time/")}
    assert beside.metrics.keys() == apart.metrics.keys()
    assert beside.metrics["time/credit"] > 0
    for name in apart.metrics.keys() - timing:
        assert beside.metrics[name] == near(apart.metrics[name], 10**5, torch.float32, scale=0.01), name
    for p, q in zip(one.policy.parameters(), other.policy.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=3e-4)
