"""What every credit method must hold, whatever it computes, on one rank and on several."""

import copy
from dataclasses import fields, replace
from datetime import timedelta
from inspect import isabstract

import pytest
import torch

import grail_lightning.credit as credits
from grail_lightning.core.credit.base import check_weights, token_advantages
from grail_lightning.core.records.episode import Episode, Turn
from grail_lightning.core.rollout.batch import cut_responses
from grail_lightning.core.step.assign import weigh_batch
from grail_lightning.core.step.figures import Tally, add_credit
from grail_lightning.credit import CreditControl, TokenCredit, TokenWeights
from tests.core.credit.rollouts import ByText, context, elsewhere, no_pass, second_model
from tests.tolerance import assert_near, roundings
from tests.worlds.programs.traced import Trusted


class Longest(TokenCredit):
    """Of a user's: a figure of its own is the mean over this rank's rows."""

    def __call__(self, policy, batch, context):
        values = batch.response_mask * (1 + batch.response_lengths[:, None] % 2).double()
        values[:, 0] *= 2
        metrics = {"length": batch.response_lengths.double().mean().item()}
        return TokenWeights(values=values, metrics=metrics)


class Seen(TokenCredit):
    """A method that sees another batch than the one that it weighs."""

    def __init__(self, inner, change):
        self.inner, self.change = inner, change

    def __call__(self, policy, batch, context):
        return self.inner(policy, self.change(policy, batch), context)


def in_turns(policy, batch):
    """One to three turns of 9 tokens, by the row's identity; the last has the rest."""
    most, columns = (batch.row[:, None] + 2) % 3, torch.arange(batch.response_mask.shape[1])
    episodes = [_episode(row) for row in batch.row.tolist()]
    return batch.replace(turn=torch.minimum(columns // 9, most), episodes=episodes)


def _episode(row):
    turns = [Turn(text="", state=k * (1 + row // 3), score=(row + k) % 2) for k in range((row + 2) % 3 + 1)]
    return Episode(turns=tuple(turns), end="answered")


def early(policy, batch):
    """Answers near the beginning, in rows with a box, so that few tokens are perturbed."""
    columns, boxed = torch.arange(batch.response_mask.shape[1]), batch.answer.whole.any(1, keepdim=True)
    whole = batch.response_mask & (columns >= 10) & (columns < 14) & boxed
    return batch.replace(answer=replace(batch.answer, whole=whole))


def programs(policy, batch):
    """Programs, by the row's identity, each as long as the row."""
    ids, blank = batch.response_ids.clone(), policy.tokenizer("\n")["input_ids"]
    for row, mask in enumerate(batch.response_mask):
        text = f"```\ndef f(a):\n if a: return a{PARTS[(batch.row[row] + 1) % 3]}\n return 1\n```"
        own = policy.tokenizer(text)["input_ids"] + blank * len(mask)
        ids[row, mask] = torch.tensor(own[: mask.sum()]).to(ids)
    tests = [[[2], 2], [[1], 1]]
    prompt = Trusted().prompt({"problem": "", "entry": "f", "tests": tests, "reference": REFERENCE})
    return batch.replace(response_ids=ids, prompts=[prompt] * len(batch))


PARTS = ["", "*2", "+b"]
REFERENCE = "def f(a):\n if a: return a\n return 1"
METHODS = {
    "Uniform": credits.Uniform,
    "GRAIL": lambda: credits.GRAIL(gate="all"),
    "GRAIL-mean_one": lambda: credits.GRAIL(gate="all", normalise="mean_one", answer_overwrite="never"),
    "OARGradient": credits.OARGradient,
    "OARPerturbation": lambda: Seen(credits.OARPerturbation(), early),
    "HighEntropy": credits.HighEntropy,
    "AdvantageReweighting": credits.AdvantageReweighting,
    "LESS": lambda: credits.LESS(min_length=1),
    "UCAS": credits.UCAS,
    "RLSD": credits.RLSD,
    "TreeAdvantage": credits.TreeAdvantage,
    "TreeAdvantage-numbers": lambda: credits.TreeAdvantage(state="numbers"),
    "TreeAdvantage-turns": lambda: Seen(credits.TreeAdvantage(state="turns"), in_turns),
    "PrefixWeights": credits.PrefixWeights,
    "RandomSubset": credits.RandomSubset,
    "OptimalBaseline": credits.OptimalBaseline,
    "OptimalBaseline-turn": lambda: Seen(credits.OptimalBaseline(unit="turn"), in_turns),
    "GiGPO": lambda: Seen(credits.GiGPO(scores=True), in_turns),
    "TurnRewards": lambda: Seen(credits.TurnRewards(), in_turns),
    "IGPO": lambda: Seen(credits.IGPO(), in_turns),
    "CriticSearch": lambda: Seen(credits.CriticSearch(), in_turns),
    "CriticSearch-random": lambda: Seen(credits.CriticSearch(labels="random"), in_turns),
    "CriticSearch-permuted": lambda: Seen(credits.CriticSearch(labels="permuted"), in_turns),
    "SpanScores": lambda: Seen(credits.SpanScores(), in_turns),
    "SpanScores-permuted": lambda: Seen(credits.SpanScores(scores="permuted"), in_turns),
    "SpanScores-random": lambda: Seen(credits.SpanScores(scores="random"), in_turns),
    "EGCA": lambda: Seen(credits.EGCA("balanced"), programs),
    "EGCA-permuted": lambda: Seen(credits.EGCA("balanced", blamed="permuted"), programs),
    "ExecutedMask": lambda: Seen(credits.ExecutedMask(), programs),
    "Oracle": lambda: credits.Oracle("balanced"),
    "AttentionRhythm": credits.AttentionRhythm,
    "Resampled": lambda: credits.Resampled(gate="all"),
    "DGPO": lambda: credits.DGPO(temperature=0.05),
    "PermutedRewards": lambda: credits.PermutedRewards(credits.TreeAdvantage(), mirrored=True),
    "PRIME": lambda: credits.PRIME(double_forward=True),
    "Longest": Longest,
}
CONTROLS = [credits.AnswerOnly, credits.Balanced, credits.Random, credits.SameMagnitude, credits.Shuffled]
NEED_A_BOX = ["GRAIL", "GRAIL-mean_one", "OARGradient", "OARPerturbation"]
# Those whose weights of a rollout that they treat have the mean 1.
MEAN_ONE = ["Uniform", "GRAIL-mean_one", "OARGradient", "OARPerturbation", "DGPO", "Oracle", "EGCA"]
# Those that look at every rollout, whatever its advantage.
RUN_EVERYTHING = ["HighEntropy", "UCAS", "PRIME", "GiGPO", "TurnRewards", "IGPO"]
RUN_EVERYTHING += ["CriticSearch", "CriticSearch-random", "CriticSearch-permuted"]
STEP = 5
SHARES = [0, 1], [2, 3, 4, 5], []  # The rows of each rank: one group, two groups, and none.
FIGURES = {"eligible", "self_certainty", "length", "entropy_threshold", "in_tree"}
FIGURES |= {"reference_distance", "attention_lookback", "continued_tokens", "divided", "filtered"}
FIGURES |= {"reward_model_loss", "reward_model_accuracy", "reward_model_grad_norm"}
FIGURES |= {"shared_states", "scored_turns", "turn_score", "information_gain", "good_turns", "clipped", "span_tokens"}
FIGURES |= {"syntax", "constraint", "correct", "logic", "trace_cut", "not_executed"}


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
    methods = {c.__name__ for c in exported if isinstance(c, type) and issubclass(c, TokenCredit) and not isabstract(c)}
    assert methods | {"Longest"} == {name.split("-")[0] for name in METHODS}
    controls = {c for c in exported if isinstance(c, type) and issubclass(c, CreditControl) and c != CreditControl}
    assert controls == {*CONTROLS}


@pytest.mark.parametrize("name", METHODS)
def test_weights_are_finite_and_stay_within_the_response(name, plain, batch):
    weights, mask = plain(name), batch.response_mask
    check_weights(METHODS[name](), weights, batch)
    if name != "Uniform":
        credit = token_advantages(batch.advantages, weights)
        assert credit[0][mask[0]].unique().numel() > 1, "the method does something here"
    if name in MEAN_ONE:
        assert_near(weights.values.double().sum(1), batch.response_lengths.double(), 100, torch.float32)
    if name in NEED_A_BOX:
        assert weights.fallback.tolist() == [False, False, False, False, True, False]
        assert torch.equal(weights.values[4], mask[4].to(weights.values))
    else:
        assert not weights.fallback.any()


@pytest.mark.parametrize("name", METHODS)
def test_a_method_says_whether_it_runs_the_model_and_reads_verdicts_and_references(name, policy, batch, given):
    """Trainers that are not ours refuse by it, and weights that are sharded are not gathered."""
    method = METHODS[name]()
    says = method.inner if isinstance(method, Seen) else method
    with no_pass(policy, allowed=says.runs_policy):
        weights = method(policy, batch, given())
    others = batch.replace(correct=~batch.correct)
    unnamed = batch.replace(prompts=[replace(prompt, reference="another") for prompt in batch.prompts])
    for flag, changed in ((says.reads_correct, others), (says.reads_reference, unnamed)):
        again = METHODS[name]()(policy, changed, given())
        if not flag:
            assert _same(again, weights, batch.response_mask)


def _moved(batch, order, left=5, right=9):
    """The batch with its rows in another order, and wider."""
    moved = batch.select(order)
    pads = {"input_ids": (left, right), "attention_mask": (left, right)}
    pads |= {"response_ids": (0, right), "response_mask": (0, right)}
    wide = {n: torch.nn.functional.pad(getattr(moved, n), p) for n, p in pads.items()}
    answer = {f.name: torch.nn.functional.pad(getattr(moved.answer, f.name), (0, right)) for f in fields(moved.answer)}
    return moved.replace(**wide, answer=replace(moved.answer, **answer)), right


@pytest.mark.parametrize("name", METHODS)
def test_padding_order_budget_and_training_mode_change_no_weight_and_everything_is_left_as_it_was(
    name, plain, policy, batch, given
):
    """Every row is run alone."""
    expected, order = plain(name), torch.tensor([4, 5, 3, 1, 0, 2])
    moved, right = _moved(batch, order)
    policy.train()
    for parameter in policy.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    values = {n: p.detach().clone() for n, p in policy.named_parameters()}
    held = {f.name: t.clone() for f in fields(moved) if isinstance(t := getattr(moved, f.name), torch.Tensor)}
    told = given(budget=1)
    streams = torch.get_rng_state(), told.generator.get_state()
    found = METHODS[name]()(policy, moved, told)
    assert all((p.grad == 0.25).all() and p.requires_grad for p in policy.parameters())
    assert all(torch.equal(values[n], p) for n, p in policy.named_parameters())
    assert all(module.training for module in policy.modules())
    assert all(torch.equal(t, getattr(moved, n)) for n, t in held.items()), "nothing is written into the batch"
    assert torch.equal(streams[0], torch.get_rng_state())
    assert torch.equal(streams[1], told.generator.get_state())
    policy.zero_grad()
    policy.eval()
    assert all((tensor[:, -right:] == 0).all() for tensor in tensors(found))
    found = found.changed(lambda tensor: tensor[order.argsort(), :-right])
    assert _same(found, expected, batch.response_mask)
    assert torch.equal(found.fallback[order.argsort()], expected.fallback)


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
    if name not in (*RUN_EVERYTHING, "GRAIL", "PrefixWeights", "Longest"):
        assert weights.values.unique().numel() <= 2, "one weight, and padding"


@pytest.mark.parametrize("name", METHODS)
def test_rows_without_a_reward_change_no_weight_of_others_and_have_weight_one(name, golden_policy, batch, given):
    """Two of six, one in each group, whatever is said of them; the others are weighed as if they were alone."""
    scored = torch.tensor([True, False, True, True, True, False])
    others = scored.nonzero().flatten()
    rewards, advantages = batch.rewards.double(), batch.advantages.masked_fill(~scored, 0)
    alone = batch.replace(rewards=rewards, advantages=advantages).select(others)
    expected = METHODS[name]()(golden_policy, alone, given())
    mixed = {"rewards": rewards.masked_fill(~scored, torch.nan), "advantages": advantages}
    for correct in (batch.correct, batch.correct ^ ~scored):
        found = weigh_batch(METHODS[name](), None, golden_policy, batch.replace(correct=correct, **mixed), given())
        part = found.changed(lambda tensor: tensor[others, : alone.response_mask.shape[1]])
        assert _same(part, expected, alone.response_mask)
        assert torch.equal(found.values[~scored], batch.response_mask[~scored].to(found.values))
        assert found.additive is None or (found.additive[~scored] == 0).all()
        assert torch.equal(found.fallback[scored], expected.fallback)
        assert not found.fallback[~scored].any()


@pytest.mark.parametrize("name", METHODS)
def test_rows_of_one_token_and_of_none_get_weights(name, policy, batch, given):
    """Some rows end at once; one has no token, as the row with which a rank without rollouts joins the others."""
    short = cut_responses(batch, torch.tensor([1, 1, 20, 1, 0, 20]))
    short = short.replace(answer=replace(batch.answer, whole=short.response_mask & (batch.advantages != 0)[:, None]))
    weights = METHODS[name]()(policy, short, given())
    check_weights(METHODS[name](), weights, short)
    assert (weights.values[4] == 0).all()


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
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=3, timeout=timedelta(seconds=60)
    )
    results = []
    mine = batch.select(torch.tensor(SHARES[rank], dtype=torch.long))
    budget = 300 if rank else 5000  # Ranks differ in their number of micro-batches.
    for pair in _pairs().values():
        weights = weigh_batch(*pair, policy, mine, given_by(policy, frozen, budget=budget))
        results.append((weights.values, weights.additive, _figures(mine, weights)))
    torch.save(results, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_ranks_of_different_size_and_one_without_rows_give_the_weights_of_one(golden_policy, batch, tmp_path):
    """A rank without rollouts, as the last batch of `predict` may leave it, joins the collectives of the others."""
    batch = batch.replace(group=torch.tensor([0, 0, 1, 1, 2, 2]))
    frozen, named = elsewhere(golden_policy), set()
    torch.multiprocessing.start_processes(  # Forked: the policy is already there.
        _one_rank, args=(tmp_path, golden_policy, frozen, batch), nprocs=3, start_method="fork"
    )
    results = [iter(torch.load(tmp_path / f"{rank}.pt")) for rank in range(3)]
    for name, pair in _pairs().items():
        whole = weigh_batch(*pair, golden_policy, batch, given_by(golden_policy, frozen))
        figures = _figures(batch, whole)
        named |= {figure.removeprefix("credit/") for figure in figures}
        for rank, rows in enumerate(SHARES):
            values, additive, logged = next(results[rank])
            assert logged == pytest.approx(figures, rel=1e-6), name
            if not rows:
                assert values.shape == (0, 0)
                continue
            width = int(batch.response_lengths[rows].max())
            assert_near(values, whole.values[rows, :width], 64, torch.float32)
            assert (additive is None) == (whole.additive is None), name
            if additive is not None:
                assert_near(additive, whole.additive[rows, :width], 64, torch.float32)
    assert named >= FIGURES
