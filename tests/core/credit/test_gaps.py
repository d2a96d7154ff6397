"""Credit methods on rollouts of several turns: they weigh what the policy sampled, and read all that it was told."""

import pytest
import torch

from grail_lightning.core.credit.base import check_weights, token_advantages
from grail_lightning.core.credit.controls import Random, Shuffled
from grail_lightning.core.credit.measure import gradient_energies
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.step.fused import SaliencyForward
from grail_lightning.credit import (
    GRAIL,
    RLSD,
    AttentionRhythm,
    OARGradient,
    OARPerturbation,
    OptimalBaseline,
    PrefixWeights,
    SampledContinuations,
    TreeAdvantage,
    input_saliency,
)
from grail_lightning.gallery.continuations import Prefix
from tests.core.credit.rollouts import elsewhere, row_perturbation, row_saliency
from tests.core.credit.test_contract import METHODS, given_by, tensors
from tests.steps import FEWER, gap, steps, update_of
from tests.tolerance import assert_near
from tests.turns import alone, trained

CONTINUES = r"`Resampled` continues rollouts from places within them, but got rollouts of several turns"
REFUSED = {
    "TreeAdvantage-numbers": r"`TreeAdvantage` reads states \(`state: numbers`\).*several turns.* Set `state: prefix`",
    "Resampled": CONTINUES,
    "Resampled-everywhere": CONTINUES,
}

# Those that see the rollouts as they are, each with another way to read them.
ONE_TURN = ["GRAIL", "OARGradient", "OARPerturbation", "UCAS", "RLSD", "TreeAdvantage", "OptimalBaseline", "DGPO"]
ONE_TURN += ["AttentionRhythm", "PRIME"]

# Programs of several turns are in test_egca.py.
NAMES = [name for name in METHODS if not name.startswith(("EGCA", "ExecutedMask"))]


@pytest.fixture(scope="module")
def policy():
    return load_policy("arithmetic").double().eval()


@pytest.fixture(scope="module")
def frozen(policy):
    return elsewhere(policy)


@pytest.fixture(scope="module")
def batch(policy):
    return trained(policy)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_finite_and_zero_where_the_policy_sampled_nothing(name, policy, frozen, batch):
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            METHODS[name]()(policy, batch, given_by(policy, frozen))
        return
    method = METHODS[name]()
    weights = method(policy, batch, given_by(policy, frozen))
    check_weights(method, weights, batch)
    if weights.scores is not None:
        assert (weights.scores[~batch.response_mask] == 0).all()
    credit = token_advantages(batch.advantages, weights)
    if name not in ("Uniform", "LESS"):
        assert any(row[mask].unique().numel() > 1 for row, mask in zip(credit, batch.response_mask, strict=True))
    for control in (Random(), Shuffled()):
        check_weights(control, control(weights, batch, given_by(policy, frozen)), batch)


@pytest.mark.parametrize("name", ONE_TURN)
def test_without_an_environment_weights_are_those_of_one_turn(name, policy, frozen, batch):
    """A batch in which every rollout is one turn has the weights of a batch that knows no turns, bit for bit."""
    plain = batch.replace(response_mask=batch.valid_mask, turn=None, episodes=None)
    one = plain.replace(turn=torch.zeros_like(batch.turn), episodes=batch.episodes)
    found, expected = (METHODS[name]()(policy, made, given_by(policy, frozen)) for made in (one, plain))
    assert all(torch.equal(a, b) for a, b in zip(tensors(found), tensors(expected), strict=True))


@pytest.mark.parametrize("read_at", ["predictor", "token"])
def test_saliency_is_that_of_one_row_by_hand(read_at, policy, batch):
    found = input_saliency(policy, batch, batch.answer.whole, read_at=read_at)
    for row in batch.answer.whole.any(1).nonzero().flatten().tolist():
        assert_near(found[row], row_saliency(policy, batch, row, read_at=read_at), 1000, torch.float32)
    assert (found[~batch.response_mask] == 0).all()


def test_saliency_beside_the_update_is_that_of_rows_alone(policy, batch):
    apart, _, expected = steps(policy, batch, False, credit=GRAIL(gate="all"), token_budget=60, limit=40)
    shared, _, weights = steps(policy, batch, True, credit=GRAIL(gate="all"), token_budget=60, limit=40)
    assert isinstance(update_of(policy, batch, credit=GRAIL(gate="all")).forward, SaliencyForward)
    policy.eval()
    assert_near(weights.values, expected.values, 1e4, torch.float32)
    alone_ = GRAIL(gate="all")(policy, batch, given_by(policy, None))
    assert_near(weights.values, alone_.values, 1e4, torch.float32)
    for (ours, metrics), (theirs, wanted) in zip(shared, apart, strict=True):
        assert gap(ours, theirs) <= 1e-4
        assert metrics | FEWER == pytest.approx(wanted | FEWER, rel=1e-3, abs=1e-6)


def test_the_gradient_of_an_answers_distribution_is_that_of_whole_rows(policy, batch):
    """The method cuts rows behind their answers."""
    method, context = OARGradient(distribution="last", read_at="predictor"), given_by(policy, None)
    scores = method(policy, batch, context).scores
    for row in batch.answer.whole.any(1).nonzero().flatten().tolist():
        one = batch.select(torch.tensor([row]))
        (expected,) = method.gradient_scores(policy, one, method.draw_noise(policy, one, context), context)
        assert_near(scores[row, : len(expected)], expected, 1e4, torch.float32)
        assert (expected > 0).sum() > 5


def test_the_last_distribution_of_a_perturbation_is_read_before_the_answer_not_before_the_last_sampled_token(
    policy, batch
):
    """In the rows 3 and 4 the answer begins the last turn: what predicts it is the environment's last token."""
    weights = OARPerturbation(distribution="last")(policy, batch, given_by(policy, None))
    for row in (0, 3, 4):
        answer = int(batch.answer.whole[row].long().argmax())
        assert bool(batch.response_mask[row, answer - 1]) == (row == 0)
        assert (weights.scores[row, answer:] == 0).all()
        tokens = batch.response_mask[row, :answer].nonzero().flatten()[-8:]
        expected = torch.tensor([row_perturbation(policy, batch, row, token, "last") for token in tokens]).double()
        assert_near(weights.scores[row, tokens], expected, 1e4, torch.float32)


def test_values_of_states_follow_the_tree_with_what_environments_answered(policy, batch):
    """The first three rows share tokens, whoever wrote them; a third of them is right, and a quarter of the group."""
    weights = TreeAdvantage()(policy, batch, given_by(policy, None))
    lengths = [[*policy.tokenizer(text)["input_ids"]] for text in ("7+5=", "12\n12-3=9\n\\boxed{17}\n9+8=1", "7")]
    parts = len(lengths[0]) + len(lengths[1])
    assert weights.additive[0].nonzero().flatten().tolist() == [len(lengths[0]), parts]
    assert weights.additive[0][[len(lengths[0]), parts]].tolist() == pytest.approx([1 / 3 - 1 / 4, 1 - 1 / 3])
    # Where the first row was told a token, the third one sampled it: they share its node, but not its weight.
    values = PrefixWeights()(policy, batch, given_by(policy, None)).values
    told = batch.valid_mask[0] & ~batch.response_mask[0]
    assert torch.allclose(values[2][told], torch.tensor(1 / 3, dtype=values.dtype))
    assert (values[0][told] == 0).all()


def test_chance_of_an_environment_is_no_credit(policy, batch):
    """After one call two rows are told different things: the change of value between is nobody's."""
    ids = batch.response_ids.clone()
    told = (batch.valid_mask & ~batch.response_mask)[1].nonzero().flatten()
    ids[1, told] = (ids[1, told] + 1) % 400 + 3
    lucky = batch.replace(response_ids=ids, input_ids=torch.cat([batch.input_ids[:, : batch.prompt_width], ids], 1))
    additive = TreeAdvantage()(policy, lucky, given_by(policy, None)).additive
    behind = torch.arange(ids.shape[1]) > int(told[0])
    assert not (additive[1] * behind).any()
    assert not additive[1][told].any()


def test_the_optimal_baseline_counts_rows_that_are_being_answered(policy, batch):
    found = OptimalBaseline()(policy, batch, given_by(policy, None)).additive
    energy = gradient_energies(policy, batch, given_by(policy, None), torch.arange(8))
    assert (energy[~batch.response_mask] == 0).all()
    for row, t in batch.response_mask.nonzero().tolist():
        group = [j for j in range(8) if batch.group[j] == batch.group[row] and batch.valid_mask[j, t]]
        w = [float(energy[j, : t + 1].sum()) for j in group]
        baseline = sum(a * float(batch.rewards[j]) for a, j in zip(w, group, strict=True)) / sum(w)
        expected = float(batch.rewards[row]) - (baseline if len(group) > 1 else 0)
        assert float(found[row, t]) == pytest.approx(expected, abs=1e-5)


def test_attention_changes_end_with_a_turn_and_no_bonus_is_lost(policy, batch):
    context = given_by(policy, None)
    change = AttentionRhythm("pre_plan", gate="all")(policy, batch, context).scores
    mask = batch.response_mask
    ends = mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1))  # The last token of each turn.
    before = torch.nn.functional.pad(ends[:, 1:], (0, 1))
    assert ends.sum() > len(batch)
    assert not change[ends | before].any()
    assert (change[mask & ~ends & ~before] > 0).all()
    for reach in (3, 50):
        moved, still = (
            AttentionRhythm(rhythm, gate="all", reach=reach, share=0.6)(policy, batch, context).values
            for rhythm in ("coupled", "anchor")
        )
        assert not torch.equal(moved, still)
        assert_near(moved.sum(1), still.sum(1), 100)


def test_a_teacher_reads_what_was_told_and_refuses_prompts_that_an_environment_changed(policy, batch):
    context = given_by(policy, None)
    weights = RLSD(clip=1.0, refresh_steps=1)(policy, batch, context)
    row = 4
    ids, places = alone(policy, batch, row)
    begun = int(batch.prompt_lengths[row])
    prompt = policy.encode(f"{batch.prompts[row].messages} The correct answer is {batch.prompts[row].reference}.")
    shown = torch.cat([torch.tensor([prompt]), ids[:, begun:]], 1)
    with torch.no_grad():
        student, teacher = (policy.model(x, use_cache=False).logits[0].double().log_softmax(1) for x in (ids, shown))
    moved = len(prompt) - begun
    expected = torch.zeros_like(weights.scores[row])
    for place in places:
        expected[place - begun] = teacher[place - 1 + moved, ids[0, place]] - student[place - 1, ids[0, place]]
    assert_near(weights.scores[row], expected, 1000, torch.float32)
    ids = batch.input_ids.clone()
    ids[2, batch.prompt_width - 1] += 1
    with pytest.raises(
        ValueError, match=r"a prompt with the tools or the text of an environment in row 2\. Set another"
    ):
        RLSD()(policy, batch.replace(input_ids=ids), context)


def test_continuations_of_several_turns_are_refused_for_methods_of_users_too(batch):
    with pytest.raises(ValueError, match=r"`SampledContinuations` continues rollouts from places within them, but got"):
        SampledContinuations(lambda: None, lambda: 0).draw(batch, [Prefix(0, 3)], 2, 100)
