"""What every credit method must hold, whatever it computes, on one rank and on two."""

import copy
from dataclasses import fields, replace
from datetime import timedelta

import pytest
import torch

import grail_lightning.credit as credits
from grail_lightning.batch.rows import cut_responses
from grail_lightning.credit import CreditControl, TokenCredit, TokenWeights
from grail_lightning.credit.base import check_weights, token_advantages
from grail_lightning.environments.episode import Episode, Turn
from grail_lightning.step.assign import run_credit
from grail_lightning.step.report import Tally, add_credit
from tests.credit.rollouts import ByText, context, elsewhere, no_pass, second_model
from tests.programs.traced import Trusted
from tests.tolerance import assert_near, roundings


class Longest(TokenCredit):
    """Of a user's: a figure of its own is the mean over this rank's rows."""

    def __call__(self, policy, batch, context):
        values = batch.response_mask * (1 + batch.response_lengths[:, None] % 2).double()
        values[:, 0] *= 2
        metrics = {"length": batch.response_lengths.double().mean().item()}
        return TokenWeights(values=values, metrics=metrics)


class InTurns(TokenCredit):
    """A method that sees a rollout as one to three turns of 9 tokens, by the row's identity; the last has the rest."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, policy, batch, context):
        most, columns = (batch.row[:, None] + 2) % 3, torch.arange(batch.response_mask.shape[1])
        return self.inner(
            policy,
            batch.replace(
                turn=torch.minimum(columns // 9, most), episodes=[_episode(row) for row in batch.row.tolist()]
            ),
            context,
        )


def _episode(row):
    turns = [Turn(text="", state=k * (1 + row // 3), score=(row + k) % 2) for k in range((row + 2) % 3 + 1)]
    return Episode(turns=tuple(turns), end="answered")


class EarlyAnswer(TokenCredit):
    """A method that sees the answers of rows with a box near the beginning, so that few tokens are perturbed."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, policy, batch, context):
        columns, boxed = torch.arange(batch.response_mask.shape[1]), batch.answer.whole.any(1, keepdim=True)
        whole = batch.response_mask & (columns >= 10) & (columns < 14) & boxed
        return self.inner(policy, batch.replace(answer=replace(batch.answer, whole=whole)), context)


class InPrograms(TokenCredit):
    """A method that sees rollouts as programs, by the row's identity, each as long as the row."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, policy, batch, context):
        ids, blank = batch.response_ids.clone(), policy.tokenizer("\n")["input_ids"]
        for row, mask in enumerate(batch.response_mask):
            text = f"```\ndef f(a):\n if a: return a{PARTS[(batch.row[row] + 1) % 3]}\n return 1\n```"
            own = policy.tokenizer(text)["input_ids"] + blank * len(mask)
            ids[row, mask] = torch.tensor(own[: mask.sum()]).to(ids)
        tests = [[[2], 2], [[1], 1]]
        prompt = Trusted().prompt({"problem": "", "entry": "f", "tests": tests, "reference": REFERENCE})
        return self.inner(policy, batch.replace(response_ids=ids, prompts=[prompt] * len(batch)), context)


PARTS = ["", "*2", "+b"]
REFERENCE = "def f(a):\n if a: return a\n return 1"
METHODS = {
    "Uniform": credits.Uniform,
    "GRAIL": lambda: credits.GRAIL(gate="all"),
    "GRAIL-mean_one": lambda: credits.GRAIL(gate="all", normalise="mean_one", answer_overwrite="never"),
    "OARGradient": credits.OARGradient,
    "OARPerturbation": lambda: EarlyAnswer(credits.OARPerturbation()),
    "HighEntropy": credits.HighEntropy,
    "AdvantageReweighting": credits.AdvantageReweighting,
    "LESS": lambda: credits.LESS(min_length=1),
    "UCAS": credits.UCAS,
    "RLSD": credits.RLSD,
    "TreeAdvantage": lambda: credits.TreeAdvantage(),
    "TreeAdvantage-left_out": lambda: credits.TreeAdvantage(own_row=False, advantage=False),
    "TreeAdvantage-numbers": lambda: credits.TreeAdvantage(state="numbers"),
    "TreeAdvantage-turns": lambda: InTurns(credits.TreeAdvantage(state="turns")),
    "PrefixWeights": credits.PrefixWeights,
    "RandomSubset": credits.RandomSubset,
    "OptimalBaseline": credits.OptimalBaseline,
    "OptimalBaseline-turn": lambda: InTurns(credits.OptimalBaseline(unit="turn")),
    "GiGPO": lambda: InTurns(credits.GiGPO(scores=True)),
    "TurnRewards": lambda: InTurns(credits.TurnRewards()),
    "IGPO": lambda: InTurns(credits.IGPO()),
    "CriticSearch": lambda: InTurns(credits.CriticSearch()),
    "CriticSearch-random": lambda: InTurns(credits.CriticSearch(labels="random")),
    "CriticSearch-permuted": lambda: InTurns(credits.CriticSearch(labels="permuted")),
    "SpanScores": lambda: InTurns(credits.SpanScores()),
    "SpanScores-permuted": lambda: InTurns(credits.SpanScores(scores="permuted")),
    "SpanScores-random": lambda: InTurns(credits.SpanScores(scores="random")),
    "EGCA": lambda: InPrograms(credits.EGCA("balanced")),
    "EGCA-permuted": lambda: InPrograms(credits.EGCA("balanced", blamed="permuted")),
    "EGCA-random": lambda: InPrograms(credits.EGCA("balanced", blamed="random")),
    "ExecutedMask": lambda: InPrograms(credits.ExecutedMask()),
    "Oracle": lambda: credits.Oracle("balanced"),
    "AttentionRhythm": credits.AttentionRhythm,
    "AttentionRhythm-pre_plan": lambda: credits.AttentionRhythm("pre_plan"),
    "Resampled": lambda: credits.Resampled(gate="all"),
    "Resampled-everywhere": lambda: credits.Resampled(search="everywhere", gate="all"),
    "DGPO": lambda: credits.DGPO(temperature=0.05),
    "PermutedRewards": lambda: credits.PermutedRewards(credits.TreeAdvantage(), mirrored=True),
    "PRIME": lambda: credits.PRIME(double_forward=True),
    "PRIME-every_group": lambda: credits.PRIME(accuracy=(0.0, 1.0), normalise=False, discount=0.9),
    "WarmUp": lambda: credits.WarmUp(credits.Product(credits.GRAIL(), credits.UCAS()), steps=20),
    "Product": lambda: credits.Product(credits.GRAIL(gate="all"), credits.OARGradient()),
    "Longest": Longest,
}
CONTROLS = [credits.AnswerOnly, credits.Balanced, credits.Random, credits.SameMagnitude, credits.Shuffled]
NEED_A_BOX = ["GRAIL", "GRAIL-mean_one", "OARGradient", "OARPerturbation"]
# Those whose weights of a rollout that they treat have the mean 1.
MEAN_ONE = ["Uniform", "GRAIL-mean_one", "OARGradient", "OARPerturbation", "DGPO", "Oracle", "EGCA"]
# Those that look at every rollout, whatever its advantage.
RUN_EVERYTHING = ["HighEntropy", "UCAS", "PRIME", "PRIME-every_group", "WarmUp"]
RUN_EVERYTHING += ["GiGPO", "TurnRewards", "IGPO", "CriticSearch", "CriticSearch-random", "CriticSearch-permuted"]
STEP = 5
# The rows of each rank: one group of two rows, and two groups; then all rows, and none.
SHARES = [[0, 1], [2, 3, 4, 5]], [[0, 1, 2, 3, 4, 5], []]
FIGURES = {"eligible", "self_certainty", "length", "entropy_threshold", "in_tree"}
FIGURES |= {"reference_distance", "attention_lookback", "continued_tokens", "divided", "filtered"}
FIGURES |= {"reward_model_loss", "reward_model_accuracy", "reward_model_grad_norm"}
FIGURES |= {"shared_states", "scored_turns", "turn_score", "information_gain", "good_turns", "clipped", "span_tokens"}
FIGURES |= {"syntax", "constraint", "correct", "logic", "not_executed"}


@pytest.fixture(scope="module")
def policy(golden_policy):
    """A copy, since these tests write into it; with dropout, which shows whether it ran in training mode."""
    policy = copy.deepcopy(golden_policy)
    for block in policy.blocks:
        block.self_attn.attention_dropout = 0.3
    return policy


def given_by(policy, frozen, **options):
    """A context with all that a method may ask for."""
    return context(step=STEP, reference=frozen, continuations=ByText(), second=second_model(policy), **options)


@pytest.fixture(scope="module")
def given(golden_policy):
    """A context whose reference is another policy than the one that is trained, and than the reward model's start."""
    frozen = elsewhere(golden_policy)
    return lambda **options: given_by(golden_policy, frozen, **options)


@pytest.fixture(scope="module")
def plain(policy, batch, given):
    """Each method's weights of the batch as it is, computed once."""
    computed = {}

    def weights(name):
        if name not in computed:
            computed[name] = METHODS[name]()(policy, batch, given())
        return computed[name]

    return weights


def tensors(weights):
    return [t for t in (weights.values, weights.additive) if t is not None]


def _same(weights, expected, mask):
    """Whether both have the same weights (and additive stage) up to rounding, in the same dtype."""
    pairs = list(zip(tensors(weights), tensors(expected), strict=True))
    assert all(one.dtype == other.dtype and one.shape == other.shape for one, other in pairs)
    return all(
        torch.allclose(one * mask, other * mask, rtol=0, atol=roundings(1000, torch.float32, other.abs().max()))
        for one, other in pairs
    )


def test_the_contract_covers_every_credit_method():
    exported = [getattr(credits, name) for name in credits.__all__]
    methods = {c.__name__ for c in exported if isinstance(c, type) and issubclass(c, TokenCredit) and c != TokenCredit}
    assert methods | {"Longest"} == {name.split("-")[0] for name in METHODS}
    controls = {c for c in exported if isinstance(c, type) and issubclass(c, CreditControl) and c != CreditControl}
    assert controls == {*CONTROLS}


@pytest.mark.parametrize("name", METHODS)
def test_weights_are_finite_and_stay_within_the_response(name, plain, batch):
    weights, mask = plain(name), batch.response_mask
    check_weights(METHODS[name](), weights, batch)
    # Golden rows part at once, so that the others of their group say nothing about them.
    if name not in ("Uniform", "TreeAdvantage-left_out"):
        credit = token_advantages(batch.advantages, weights)
        assert credit[0][mask[0]].unique().numel() > 1, "the method does something here"
    if name not in (*NEED_A_BOX, "Product"):
        assert not weights.fallback.any()


@pytest.mark.parametrize("name", METHODS)
def test_padding_the_order_of_rows_and_the_token_budget_change_nothing(name, plain, policy, batch, given):
    """Every row is run alone."""
    left, right = 5, 9
    pads = {"input_ids": (left, right), "attention_mask": (left, right)}
    pads |= {"response_ids": (0, right), "response_mask": (0, right)}
    order = torch.tensor([4, 5, 3, 1, 0, 2])
    moved = batch.select(order)
    wide = {n: torch.nn.functional.pad(getattr(moved, n), p) for n, p in pads.items()}
    answer = {f.name: torch.nn.functional.pad(getattr(moved.answer, f.name), (0, right)) for f in fields(moved.answer)}
    moved = moved.replace(**wide, answer=replace(moved.answer, **answer))
    found = METHODS[name]()(policy, moved, given(budget=1))
    assert all((tensor[:, -right:] == 0).all() for tensor in tensors(found))
    found = found.changed(lambda tensor: tensor[order.argsort(), :-right])
    assert _same(found, plain(name), batch.response_mask)
    assert torch.equal(found.fallback[order.argsort()], plain(name).fallback)


@pytest.mark.parametrize("name", NEED_A_BOX)
def test_rows_without_a_box_are_uniform_and_counted(name, plain, policy, batch, given):
    weights = plain(name)
    assert weights.fallback.tolist() == [False, False, False, False, True, False]
    assert torch.equal(weights.values[4], batch.response_mask[4].to(weights.values))
    none = replace(batch.answer, **{f.name: torch.zeros_like(batch.response_mask) for f in fields(batch.answer)})
    weights = METHODS[name]()(policy, batch.replace(answer=none), given())
    assert torch.equal(weights.values, batch.response_mask.to(weights.values))
    assert weights.fallback.all()


@pytest.mark.parametrize("name", METHODS)
def test_a_batch_without_an_advantage_costs_no_forward_pass_and_is_uniform(name, policy, batch, given):
    """All groups are right, or all wrong."""

    flags = torch.tensor([True, True, True, False, False, False])
    silent = batch.replace(advantages=torch.zeros(6), correct=flags, rewards=flags.float())
    with no_pass(policy, allowed=name in RUN_EVERYTHING):
        weights = METHODS[name]()(policy, silent, given())
    check_weights(METHODS[name](), weights, silent)
    if name not in RUN_EVERYTHING:
        assert (token_advantages(silent.advantages, weights) == 0).all()
    # An overwrite of the answer has no effect here, and neither have weights that follow from the texts alone.
    if name not in (*RUN_EVERYTHING, "GRAIL", "Product", "PrefixWeights", "Longest"):
        assert weights.values.unique().numel() <= 2, "one weight, and padding"


@pytest.mark.parametrize("name", MEAN_ONE)
def test_the_weights_of_a_rollout_have_the_mean_one(name, plain, batch):
    assert_near(plain(name).values.double().sum(1), batch.response_lengths.double(), 100, torch.float32)


@pytest.mark.parametrize("name", METHODS)
def test_rows_of_one_token_and_of_none_get_weights(name, policy, batch, given):
    """Some rows end at once; one has no token, as the row with which a rank without rollouts joins the others."""
    short = cut_responses(batch, torch.tensor([1, 1, 20, 1, 0, 20]))
    short = short.replace(answer=replace(batch.answer, whole=short.response_mask & (batch.advantages != 0)[:, None]))
    weights = METHODS[name]()(policy, short, given())
    check_weights(METHODS[name](), weights, short)
    assert (weights.values[4] == 0).all()


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
    found = METHODS[name]()(policy, batch, told)
    assert all(torch.equal(one, other) for one, other in zip(tensors(found), tensors(expected), strict=True))
    assert all((p.grad == 0.25).all() and p.requires_grad for p in policy.parameters())
    assert all(torch.equal(values[n], p) for n, p in policy.named_parameters())
    assert all(module.training for module in policy.modules())
    assert all(torch.equal(t, getattr(batch, n)) for n, t in held.items()), "nothing is written into the batch"
    assert torch.equal(streams[0], torch.get_rng_state())
    assert torch.equal(streams[1], told.generator.get_state())
    policy.zero_grad()
    policy.eval()


# --- ranks ------------------------------------------------------------------------------------------------------------


def _pairs():
    """Every method, and every control of a method, by name."""
    return {name: (make(), None) for name, make in METHODS.items()} | {
        control.__name__: (credits.GRAIL(gate="all"), control()) for control in CONTROLS
    }


def _figures(batch, weights):
    """What is logged of the weights, over all ranks."""
    tally = Tally()
    add_credit(tally, batch, weights)
    return tally.compute()


def _one_rank(rank, folder, policy, frozen, batch):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    results = []
    for shares in SHARES:
        mine = batch.select(torch.tensor(shares[rank], dtype=torch.long))
        budget = 300 if rank else 5000  # Ranks differ in their number of micro-batches.
        for pair in _pairs().values():
            weights = run_credit(*pair, policy, mine, given_by(policy, frozen, budget=budget))
            results.append((weights.values, weights.additive, _figures(mine, weights) if len(shares[1]) else {}))
    torch.save(results, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_ranks_of_different_size_or_one_without_rows_give_the_weights_of_one(golden_policy, batch, tmp_path):
    """A rank without rollouts, as the last batch of `predict` may leave it, joins the collectives of the other."""
    batch = batch.replace(group=torch.tensor([0, 0, 1, 1, 2, 2]))
    frozen = elsewhere(golden_policy)
    torch.multiprocessing.start_processes(  # Forked: the policy is already there.
        _one_rank, args=(tmp_path, golden_policy, frozen, batch), nprocs=2, start_method="fork"
    )
    results = [iter(torch.load(tmp_path / f"{rank}.pt")) for rank in (0, 1)]
    alone = {
        name: run_credit(*pair, golden_policy, batch, given_by(golden_policy, frozen))
        for name, pair in _pairs().items()
    }
    logged_alone = {name: _figures(batch, whole) for name, whole in alone.items()}
    for shares in SHARES:
        for name, whole in alone.items():
            figures = logged_alone[name]
            for rank, rows in enumerate(shares):
                values, additive, logged = next(results[rank])
                assert logged == (pytest.approx(figures, rel=1e-6) if shares[1] else {}), name
                width = int(batch.response_lengths[rows].max()) if rows else 0
                for tensor, expected in ((values, whole.values), (additive, whole.additive)):
                    assert not rows or (tensor is None) == (expected is None), name
                    if tensor is not None and rows:
                        assert_near(tensor, expected[rows, :width], 64, torch.float32)
                assert rows or values.shape == (0, 0)
    named = {figure.removeprefix("credit/") for figures in logged_alone.values() for figure in figures}
    assert named >= FIGURES
