"""What every credit method must hold, whatever it computes."""

import copy
from dataclasses import fields, replace

import pytest
import torch

import grail_lightning.credit as credits
from grail_lightning.credit import (
    DGPO,
    GRAIL,
    LESS,
    PRIME,
    RLSD,
    UCAS,
    AdvantageReweighting,
    AttentionRhythm,
    HighEntropy,
    OARGradient,
    OARPerturbation,
    OptimalBaseline,
    Oracle,
    PermutedRewards,
    PrefixWeights,
    Product,
    Resampled,
    TokenCredit,
    TreeAdvantage,
    Uniform,
    WarmUp,
)
from grail_lightning.step.advantages import token_advantages
from tests.credit.rollouts import ByText, context, elsewhere, second_model
from tests.tolerance import roundings

METHODS = {
    "Uniform": Uniform,
    "GRAIL": lambda: GRAIL(gate="all"),
    "GRAIL-mean_one": lambda: GRAIL(gate="all", normalise="mean_one", answer_overwrite="never"),
    "OARGradient": OARGradient,
    "OARPerturbation": OARPerturbation,
    "HighEntropy": HighEntropy,
    "AdvantageReweighting": AdvantageReweighting,
    "LESS": lambda: LESS(min_length=1),
    "UCAS": UCAS,
    "RLSD": RLSD,
    "TreeAdvantage": lambda: TreeAdvantage(outcome="correctness"),
    "TreeAdvantage-left_out": lambda: TreeAdvantage(outcome="correctness", own_row=False, advantage=False),
    "TreeAdvantage-numbers": lambda: TreeAdvantage(outcome="correctness", state="numbers"),
    "PrefixWeights": PrefixWeights,
    "OptimalBaseline": OptimalBaseline,
    "Oracle": lambda: Oracle("balanced"),
    "AttentionRhythm": AttentionRhythm,
    "AttentionRhythm-pre_plan": lambda: AttentionRhythm("pre_plan"),
    "Resampled": lambda: Resampled(borders="lines", search="everywhere", gate="all"),
    "DGPO": lambda: DGPO(temperature=0.05),
    "PermutedRewards": lambda: PermutedRewards(TreeAdvantage(outcome="correctness"), mirrored=True),
    "PRIME": lambda: PRIME(double_forward=True),
    "PRIME-every_group": lambda: PRIME(accuracy=(0.0, 1.0), normalise=False, discount=0.9),
    "WarmUp": lambda: WarmUp(UCAS(), steps=20),
    "Product": lambda: Product(GRAIL(gate="all"), OARGradient()),
}
NEED_A_BOX = ["GRAIL", "GRAIL-mean_one", "OARGradient", "OARPerturbation"]
STEP = 5


@pytest.fixture(scope="module")
def policy(golden_policy):
    """A copy, since these tests write into it; with dropout, which shows whether it ran in training mode."""
    policy = copy.deepcopy(golden_policy)
    for block in policy.blocks:
        block.self_attn.attention_dropout = 0.3
    return policy


@pytest.fixture(scope="module")
def given(golden_policy):
    """A context whose reference is another policy than the one that is trained, and than the reward model's start."""
    frozen = elsewhere(golden_policy)
    return lambda **options: context(
        step=STEP, reference=frozen, continuations=ByText(), second=second_model(golden_policy), **options
    )


@pytest.fixture(scope="module")
def plain(policy, batch, given):
    """Each method's weights of the batch as it is, computed once."""
    found = {}

    def weights(name):
        if name not in found:
            found[name] = METHODS[name]()(policy, batch, given())
        return found[name]

    return weights


def _tensors(weights):
    return [t for t in (weights.values, weights.additive) if t is not None]


def _same(found, expected, mask):
    """Whether both have the same weights (and additive stage) up to rounding, in the same dtype."""
    pairs = list(zip(_tensors(found), _tensors(expected), strict=True))
    assert all(one.dtype == other.dtype and one.shape == other.shape for one, other in pairs)
    return all(
        torch.allclose(one * mask, other * mask, rtol=0, atol=roundings(1000, torch.float32, other.abs().max()))
        for one, other in pairs
    )


def test_the_invariants_cover_every_credit_method():
    exported = [getattr(credits, name) for name in credits.__all__]
    methods = {c.__name__ for c in exported if isinstance(c, type) and issubclass(c, TokenCredit) and c != TokenCredit}
    assert methods == {name.split("-")[0] for name in METHODS}


@pytest.mark.parametrize("name", METHODS)
def test_weights_are_finite_and_stay_within_the_response(name, plain, batch):
    weights, mask = plain(name), batch.response_mask
    assert weights.fallback.shape == (len(batch),)
    assert weights.fallback.dtype == torch.bool
    assert (weights.values >= 0).all()
    for tensor in _tensors(weights):
        assert tensor.shape == mask.shape
        assert tensor.is_floating_point()
        assert tensor.isfinite().all()
        assert not tensor.requires_grad
        assert (tensor[~mask] == 0).all()
    # Golden rows part at once, so that the others of their group say nothing about them.
    if name not in ("Uniform", "TreeAdvantage-left_out"):
        credit = token_advantages(batch.advantages, weights)
        assert credit[0][mask[0]].unique().numel() > 1, "the method does something here"


@pytest.mark.parametrize("name", METHODS)
def test_the_same_seed_gives_the_same_weights(name, plain, policy, batch, given):
    again = METHODS[name]()(policy, batch, given())
    for one, other in zip(_tensors(again), _tensors(plain(name)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", METHODS)
def test_padding_changes_nothing(name, plain, policy, batch, given):
    left, right = 5, 9
    pads = {"input_ids": (left, right), "attention_mask": (left, right)}
    pads |= {"response_ids": (0, right), "response_mask": (0, right)}
    wide = {n: torch.nn.functional.pad(getattr(batch, n), p) for n, p in pads.items()}
    answer = {f.name: torch.nn.functional.pad(getattr(batch.answer, f.name), (0, right)) for f in fields(batch.answer)}
    wider = batch.replace(**wide, answer=replace(batch.answer, **answer))
    found = METHODS[name]()(policy, wider, given())
    for tensor in _tensors(found):
        assert (tensor[:, -right:] == 0).all()
    cut = replace(
        found,
        values=found.values[:, :-right],
        additive=None if found.additive is None else found.additive[:, :-right],
    )
    assert _same(cut, plain(name), batch.response_mask)


@pytest.mark.parametrize("name", METHODS)
def test_the_order_of_rows_changes_nothing(name, plain, policy, batch, given):
    order = torch.tensor([4, 5, 3, 1, 0, 2])
    found = METHODS[name]()(policy, batch.select(order), given())
    back = order.argsort()
    moved = replace(found, values=found.values[back], additive=None if found.additive is None else found.additive[back])
    assert _same(moved, plain(name), batch.response_mask)
    assert torch.equal(found.fallback[back], plain(name).fallback)


@pytest.mark.parametrize("budget", [1, 4000])
@pytest.mark.parametrize("name", METHODS)
def test_the_token_budget_changes_nothing(name, budget, plain, policy, batch, given):
    if name == "OARPerturbation" and budget == 1:
        batch = batch.select(torch.tensor([1]))  # one forward pass a token
        expected = METHODS[name]()(policy, batch, given())
    else:
        expected = plain(name)
    found = METHODS[name]()(policy, batch, given(budget=budget))
    assert _same(found, expected, batch.response_mask)


@pytest.mark.parametrize("name", NEED_A_BOX)
def test_rows_without_a_box_are_uniform_and_counted(name, plain, policy, batch, given):
    weights = plain(name)
    assert weights.fallback.tolist() == [False, False, False, False, True, False]
    assert torch.equal(weights.values[4], batch.response_mask[4].to(weights.values))
    none = replace(batch.answer, **{f.name: torch.zeros_like(batch.response_mask) for f in fields(batch.answer)})
    weights = METHODS[name]()(policy, batch.replace(answer=none), given())
    assert torch.equal(weights.values, batch.response_mask.to(weights.values))
    assert weights.fallback.all()


@pytest.mark.parametrize("name", [n for n in METHODS if n not in NEED_A_BOX and n != "Product"])
def test_methods_that_need_no_box_never_fall_back(name, plain):
    assert not plain(name).fallback.any()


@pytest.mark.parametrize("name", METHODS)
def test_a_batch_without_an_advantage_is_no_trouble(name, policy, batch, given):
    weights = METHODS[name]()(policy, batch.replace(advantages=torch.zeros(6)), given())
    assert weights.values.isfinite().all()
    assert (weights.values[~batch.response_mask] == 0).all()


@pytest.mark.parametrize("name", METHODS)
def test_in_training_mode_weights_are_the_same_and_everything_is_left_as_it_was(name, plain, policy, batch, given):
    expected = plain(name)
    policy.train()
    for parameter in policy.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    values = {n: p.detach().clone() for n, p in policy.named_parameters()}
    held = {f.name: t.clone() for f in fields(batch) if isinstance(t := getattr(batch, f.name), torch.Tensor)}
    told = given()
    streams = torch.get_rng_state(), told.generator.get_state()
    assert _same(METHODS[name]()(policy, batch, told), expected, batch.response_mask)
    assert all((p.grad == 0.25).all() and p.requires_grad for p in policy.parameters())
    assert all(torch.equal(values[n], p) for n, p in policy.named_parameters())
    assert all(module.training for module in policy.modules())
    assert all(torch.equal(t, getattr(batch, n)) for n, t in held.items()), "nothing is written into the batch"
    assert torch.equal(streams[0], torch.get_rng_state())
    assert torch.equal(streams[1], told.generator.get_state())
    policy.zero_grad()
    policy.eval()
