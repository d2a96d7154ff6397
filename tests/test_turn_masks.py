"""Rollouts of several turns: sampled tokens have gaps, and all tokens behind the prompt are run."""

import dataclasses

import pytest
import torch

from grail_lightning import Loading, Sampling
from grail_lightning.core.engines.checks import check_rollouts
from grail_lightning.core.functional.advantages import discounted_returns, process_advantages
from grail_lightning.core.policy.layout import group_nodes, packed_layout, padded_layout, right_padded_layout
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.policy.micro_batch import cut_rows
from grail_lightning.core.records.episode import Episode, Turn
from grail_lightning.core.records.task import REWARD
from grail_lightning.core.rollout.batch import cut_responses, join
from grail_lightning.core.rollout.grading import align_rows, labelled_steps, located_steps, step_masks
from grail_lightning.core.step.collect import _options, _record, _restore
from grail_lightning.core.step.figures import Tally, add_rollouts
from grail_lightning.core.step.sampler import Sampler
from tests.batches import graded
from tests.core.engines.test_base import Canned
from tests.runs import TASK
from tests.steps import backward, gap, update_of
from tests.tolerance import assert_near
from tests.turns import PROBLEMS, played, trained
from tests.turns import alone as row_alone

LIMIT = 40


@pytest.fixture(scope="module")
def policy():
    return load_policy("arithmetic").double().train()


@pytest.fixture(scope="module")
def batch(policy):
    made = trained(policy)
    assert made.correct.tolist() == [True, False, False, False, True, False, False, False]
    assert (made.response_mask != made.valid_mask).any(1).sum() == 6
    return made


@pytest.fixture(scope="module")
def weights(batch):
    """Token weights."""
    return torch.rand(batch.response_mask.shape, generator=torch.Generator().manual_seed(1)).double() + 0.5


@pytest.fixture(scope="module")
def alone(policy, batch, weights):
    """Each row run by itself: log-probabilities of sampled tokens, and the gradients of their weighted sums."""
    found, gradients = torch.zeros(batch.response_mask.shape, dtype=torch.float64), []
    for row, mask in enumerate(batch.response_mask):
        ids, places = row_alone(policy, batch, row)
        logprobs = policy.model(ids, use_cache=False).logits[0].double().log_softmax(1)
        chosen = torch.stack([logprobs[place - 1, ids[0, place]] for place in places])
        found[row, mask] = chosen.detach()
        policy.zero_grad(set_to_none=True)
        (chosen * weights[row][mask]).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in policy.named_parameters()})
    policy.zero_grad(set_to_none=True)
    return found, gradients


@pytest.fixture(scope="module")
def packing():
    return load_policy("arithmetic", Loading(packing=True)).double().train()


def _layouts(policy, packing, batch):
    """Every layout of all rows: the policy that runs it, the rows in its order, and the layout."""
    tensors = batch.input_ids, batch.attention_mask, batch.response_mask
    every = torch.arange(len(batch))
    yield policy, every, padded_layout(*tensors)
    yield policy, every, right_padded_layout(*tensors)
    yield packing, every, packed_layout(*tensors, flash=False)
    for share in (True, False):
        for micro in cut_rows(policy, batch, every, 10_000, share_responses=share):
            yield policy, micro.rows, policy.layout(batch.select(micro.rows), micro.starts, share_responses=share)


def test_every_layout_has_the_log_probabilities_of_rows_that_are_run_alone(policy, packing, batch, alone):
    shared = []
    for by, rows, layout in _layouts(policy, packing, batch):
        with torch.no_grad():
            found = by(layout)
        expected = alone[0][rows][:, : layout.response_mask.shape[1]]
        assert_near(found, expected, 100, torch.float32)  # Norms run in float32.
        assert torch.equal(found != 0, layout.response_mask)
        flat = torch.arange(int(layout.response_mask.sum()))
        first = [int(flat[layout.prediction_of == k].min()) for k in range(len(layout.targets))]
        assert layout.source_of.tolist() == first
        shared.append(layout.shares)
    assert shared == [False, False, False, True, False]


@pytest.mark.parametrize(
    ("how", "packed", "options"),
    [
        ("grpo", False, {"share_prefixes": False, "token_budget": 100}),
        ("dr_grpo", False, {"share_prefixes": True, "token_budget": 10_000}),
        ("dapo", False, {"share_prefixes": True, "token_budget": 60}),
        ("grpo", True, {"share_prefixes": True, "token_budget": 100}),
    ],
    ids=["padded in parts", "trees", "trees in parts", "packed in parts"],
)
def test_loss_and_gradients_are_those_of_rows_that_are_run_alone(
    how, packed, options, policy, packing, batch, weights, alone
):
    by = packing if packed else policy
    by.zero_grad(set_to_none=True)
    step = update_of(by, batch, weights, limit=LIMIT, aggregation=how, **options)
    metrics = step.accumulate(0, backward).figures()
    gradients = {name: p.grad.clone() for name, p in by.named_parameters()}
    counted, lengths, number = batch.finished, batch.response_mask.sum(1).double(), 7.0
    denominators = {
        "grpo": number * lengths,
        "dr_grpo": torch.full_like(lengths, number * LIMIT),
        "dapo": lengths[counted].sum().expand_as(lengths),
    }[how]
    shares = torch.where(counted, -batch.advantages.double() / denominators, 0)
    expected = {name: sum(share * own[name] for share, own in zip(shares, alone[1], strict=True)) for name in gradients}
    assert gap(gradients, expected) <= 1e-5
    # The ratio is 1, so the loss of a token is minus its advantage.
    sums = (weights * batch.response_mask).sum(1)
    assert metrics["loss"] == pytest.approx(float((shares * sums).sum()), rel=1e-9)


# ---- batches


def test_texts_answers_and_steps_are_those_of_the_last_turn(policy, batch):
    assert batch.texts[:4] == [
        "9+8=17\n\\boxed{17}",
        "9+8=16\n\\boxed{16}",
        "".join(PROBLEMS["7+5-3+8"][2]),
        "\\boxed{7}",
    ]
    for row, aligned in enumerate(align_rows(batch, policy.tokenizer)):
        last = (batch.turn[row] == batch.turn[row][batch.valid_mask[row]].max()) & batch.valid_mask[row]
        assert aligned.text == batch.texts[row]
        assert len(aligned.starts) == batch.valid_lengths[row]
        carried = [k for k in range(len(aligned.starts)) if aligned.starts[k] < aligned.stops[k]]
        ends = int(batch.finished[row])  # The end token carries no character.
        assert carried == last.nonzero().flatten().tolist()[: len(carried)]
        assert len(carried) == last.sum() - ends
    located = [
        policy.tokenizer.decode(ids[own]) for ids, own in zip(batch.response_ids, batch.answer.content, strict=True)
    ]
    assert located == ["17", "16", "16", "7", "15", "", "5", ""]
    steps, masks = located_steps(batch, policy.tokenizer), step_masks(batch, policy.tokenizer)
    assert masks is not None
    assert not torch.stack([*masks.values()])[:, ~batch.response_mask].any()
    for row in range(len(batch)):
        labels = [
            step.result or (step.start, step.stop) for step in labelled_steps(batch.texts[row], batch.prompts[row])
        ]
        found = [policy.tokenizer.decode(batch.response_ids[row][step.tokens]) for step in steps[row]]
        assert found == [batch.texts[row][start:stop] for start, stop in labels]
    assert sum(map(len, steps)) > 8


def test_figures_count_sampled_tokens(batch):
    tally = Tally()
    reported = torch.where(batch.response_mask, -0.5, -9.0)
    reported[0, 0] = torch.nan
    add_rollouts(tally, batch.replace(sampling_logprobs=reported))
    figures = tally.compute()
    assert batch.response_mask[0, 0]
    assert figures["sampling/missing_logprobs"] == pytest.approx(1 / batch.response_mask.sum().item())
    assert figures["completions/mean_length"] == pytest.approx(batch.response_mask.sum(1).double().mean().item())
    assert figures["entropy_sampled"] == pytest.approx(0.5)


def test_rows_that_are_chosen_cut_and_joined_keep_what_an_environment_answered(arithmetic, batch):
    some = batch.select(torch.tensor([3, 5]))
    assert some.response_ids.shape[1] == batch.valid_lengths[[3, 5]].max()
    assert torch.equal(some.lengths, batch.lengths[[3, 5]])
    assert some.episodes == [batch.episodes[3], batch.episodes[5]]
    ends = torch.tensor([9, 3, 0, 99, 12, 8, 1, 2])
    cut = cut_responses(batch, ends)
    inside = torch.arange(batch.response_ids.shape[1]) < ends[:, None]
    assert torch.equal(cut.valid_mask, batch.valid_mask & inside)
    assert torch.equal(cut.response_mask, batch.response_mask & inside)

    plain = graded(played(arithmetic, {"1+2": [["1+2=3"], ["\\boxed{4}"]]}))
    plain = plain.replace(turn=None, episodes=None, finished=torch.tensor([True, False]))
    several = graded(played(arithmetic))
    for one, other, rows in ((plain, several, slice(2)), (several, plain, slice(8, None))):
        joined = join(one, other)
        assert joined.turn.shape == joined.response_ids.shape
        assert not joined.turn[rows].any()
        ends = [(Turn(text="1+2=3"), "answered"), (Turn(text="\\boxed{4}"), "tokens")]
        assert joined.episodes[rows] == [Episode(turns=(turn,), end=end) for turn, end in ends]
        assert torch.equal(joined.valid_lengths, torch.cat([one.valid_lengths, other.valid_lengths]))
    assert join(plain, plain).turn is None


def test_rows_whose_environments_began_with_other_texts_share_no_node_of_the_prefix_tree(batch):
    nodes, begins = group_nodes(batch), batch.input_ids.clone()
    begins[1, batch.prompt_width - 1] += 1
    apart = group_nodes(batch.replace(input_ids=begins))
    assert {*nodes[0].tolist()} & {*nodes[1].tolist()} - {-1}
    assert not {*apart[0].tolist()} & {*apart[1].tolist()} - {-1}
    assert torch.equal(apart[0] == apart[2], nodes[0] == nodes[2])


def test_returns_are_discounted_by_sampled_tokens():
    rewards = torch.tensor([[1.0, 9, 9, 2, 4, 9], [3.0, 5, 9, 9, 9, 6]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 0, 1, 1, 0], [1, 1, 0, 0, 0, 1]]).bool()
    group, outcomes, whole = torch.zeros(2).long(), torch.tensor([1.0, 0.0]), torch.ones(2, 3, dtype=torch.bool)
    gapless = rewards[mask].view(2, 3)
    assert torch.equal(discounted_returns(rewards * mask, 0.5, mask)[mask].view(2, 3), discounted_returns(gapless, 0.5))
    found = process_advantages(rewards, outcomes, mask, group, discount=0.5)
    expected = process_advantages(gapless, outcomes, whole, group, discount=0.5)
    assert torch.equal(found[mask].view(2, 3), expected)
    assert not found[~mask].any()


# ---- what engines return, and what runs keep

WRONG = {
    "a hole": (lambda b: _put(b, "attention_mask", (0, b.prompt_width + 2), False), r"padded on the right, but got"),
    "not valid": (lambda b: _put(b, "response_mask", (3, -1), True), r"a `response_mask` within the `attention_mask`"),
    "turns that fall": (
        lambda b: _put(b, "turn", (1, 2), 3),
        r"numbers of a `turn` that do not fall, but got 0 in row 1, c",
    ),
    "a negative turn": (lambda b: _put(b, "turn", (0, 0), -1), r"numbers of a `turn` from 0, but got -1 in row 0"),
    "episodes": (lambda b: b.replace(episodes=b.episodes[1:]), r"`episodes` as a list of 8, one a row, but got 7"),
}


def _put(batch, name, place, value):
    changed = getattr(batch, name).clone()
    changed[place] = value
    return batch.replace(**{name: changed})


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_rollouts_of_several_turns_are_checked(change, message, arithmetic):
    made = played(arithmetic, logprobs=-0.5)
    asked = arithmetic, [TASK.prompt({"problem": text}) for text in PROBLEMS], 4
    longest = int(made.response_lengths.max())
    assert longest < made.valid_lengths.max()
    check_rollouts(Canned(), made, *asked, Sampling(max_response_length=longest))
    with pytest.raises(ValueError, match=rf"responses of at most {longest - 1} tokens"):
        check_rollouts(Canned(), made, *asked, Sampling(max_response_length=longest - 1))
    with pytest.raises(ValueError, match=message):
        check_rollouts(Canned(), change(made), *asked, Sampling(max_response_length=longest))


def test_a_batch_in_flight_is_restored_with_its_turns(arithmetic):
    made = played(arithmetic, logprobs=-0.5)
    rewarded = [  # An environment gives a number or none, say after a tool that hangs.
        dataclasses.replace(prompt, columns={**prompt.columns, REWARD: reward})
        for prompt, reward in zip(made.prompts, [0.25, None] * 4, strict=True)
    ]
    prompts, sampling = made.prompts[::4], Sampling(max_response_length=LIMIT)
    sampler = Sampler(
        group_size=4, sampling=sampling, policy=arithmetic, engine=Canned(), verifier=None, clock=None, rank=0
    )
    state = {"step": 2, "options": _options(sampler), "ranks": [_record(made.replace(prompts=rewarded))]}
    restored = _restore(state, prompts, sampler)
    for name, value in made.fields().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, getattr(restored.batch, name)), name
    assert (restored.batch.texts, restored.batch.prompts) == (made.texts, rewarded)
    before, after = ([turn for e in b.episodes for turn in e.turns] for b in (made, restored.batch))
    assert [dataclasses.replace(t, state=None) for t in after] == [dataclasses.replace(t, state=None) for t in before]
    states = [(one.state, other.state) for one, other in zip(before, after, strict=True)]
    assert len({one for one, _ in states}) == len({other for _, other in states}) == len({*states})
    assert _restore(state, prompts[::-1], sampler) is None
