"""`run_credit`: advantages of tokens from tensors alone, beside those of the batch that our own step has."""

import copy

import pytest
import torch

from grail_lightning import ArithmeticTask, GroupMean, Prompt
from grail_lightning.core.credit.base import token_advantages
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.runtime.seeds import derive_seed
from grail_lightning.core.step.assign import weigh_batch
from grail_lightning.credit import (
    DGPO,
    GRAIL,
    PRIME,
    GiGPO,
    GivenRollouts,
    HighEntropy,
    Oracle,
    Resampled,
    Shuffled,
    TreeAdvantage,
    Uniform,
    as_policy,
    run_credit,
)
from tests.batches import graded, in_turns
from tests.core.credit.rollouts import context, elsewhere
from tests.runs import GROUP, graded_rollouts, problems
from tests.tolerance import assert_near


@pytest.fixture(scope="module")
def rollouts():
    return graded_rollouts(4, seed=2)


@pytest.fixture(scope="module")
def loaded():
    """A model as a user has it, with sampling defaults of its own."""
    policy = load_policy("arithmetic")
    policy.model.generation_config.update(temperature=0.5, top_k=7, do_sample=True)
    return policy.model, policy.tokenizer


def given(batch, order=None, left=0, right=0, **more):
    """The tensors of a batch, its rows in another order, and wider."""
    order = torch.arange(len(batch)) if order is None else order
    width = batch.prompt_width
    parts = {
        "prompt_ids": (batch.input_ids[:, :width], (left, 0)),
        "prompt_mask": (batch.attention_mask[:, :width], (left, 0)),
        "response_ids": (batch.response_ids, (0, right)),
        "response_mask": (batch.response_mask, (0, right)),
        "valid_mask": (batch.valid_mask, (0, right)),
    }
    tensors = {name: torch.nn.functional.pad(t, pad)[order].long() for name, (t, pad) in parts.items()}
    rows = {"rewards": batch.rewards, "group": batch.group, "finished": batch.finished, "row": batch.row}
    tensors |= {name: tensor[order] for name, tensor in rows.items()}
    prompts = [batch.prompts[k] for k in order.tolist()]
    return GivenRollouts(**tensors | {"prompts": prompts} | more)


def own(batch, credit, control=None, **more):
    policy = load_policy("arithmetic")
    whole = batch.with_advantages(GroupMean()(batch, GROUP, None))
    weights = weigh_batch(credit, control, policy, whole, context(seed=derive_seed(0, "credit", 0), **more))
    return token_advantages(whole.advantages, weights).float()


CASES = {
    "Uniform": (Uniform(), None),
    "GRAIL": (GRAIL(), None),
    "GRAIL, shuffled": (GRAIL(), Shuffled()),
    "TreeAdvantage": (TreeAdvantage(), None),
    "HighEntropy": (HighEntropy(), None),
    "Oracle": (Oracle("balanced"), None),
}


@pytest.mark.parametrize("name", CASES)
def test_tensors_alone_give_the_advantages_of_our_step_in_any_order_and_width(name, rollouts, loaded):
    credit, control = CASES[name]
    model, tokenizer = loaded
    torch.backends.cuda.enable_cudnn_sdp(True)  # Our own loading switches it off.
    policy = as_policy(model, tokenizer)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    before = copy.deepcopy(model.generation_config), model.training
    expected = own(rollouts, *CASES[name])
    found = run_credit(credit, policy, given(rollouts), control=control)
    assert_near(found, expected, 4, torch.float32)
    order = torch.randperm(len(rollouts), generator=torch.Generator().manual_seed(3))
    moved = run_credit(credit, policy, given(rollouts, order, 3, 5), control=control, token_budget=300)
    assert_near(moved[:, :-5], expected[order], 3000, torch.float32)
    assert (moved[:, -5:] == 0).all()
    assert (model.generation_config, model.training) == before
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_advantages_that_are_given_replace_the_means_and_rows_without_a_reward_have_none(rollouts, loaded):
    policy = as_policy(*loaded)
    mine = torch.linspace(-1, 1, len(rollouts))
    found = run_credit(Uniform(), policy, given(rollouts, advantages=mine))
    assert torch.equal(found, mine[:, None] * rollouts.response_mask)
    rewards = rollouts.rewards.clone()
    rewards[[0, 4, 5, 6]] = torch.nan
    found = run_credit(TreeAdvantage(), policy, given(rollouts, rewards=rewards))
    assert (found[[0, 4, 5, 6, 7]] == 0).all(), "a row that is compared with no other has no advantage"
    scored = (rewards[1:4] - rewards[1:4].mean()).float()
    uniform = run_credit(Uniform(), policy, given(rollouts, rewards=rewards))
    assert_near(uniform[1:4, 0], scored, 4, torch.float32)


def test_without_prompts_and_verdicts_the_last_box_and_the_reward_are_taken(rollouts, loaded):
    policy = as_policy(*loaded)
    found = run_credit(GRAIL(), policy, given(rollouts, prompts=None, valid_mask=None, finished=None, row=None))
    assert_near(found, run_credit(GRAIL(), policy, given(rollouts)), 4, torch.float32)
    assert found[found[:, 0] != 0].unique().numel() > 10


def test_turns_are_what_was_sampled_between_what_was_put_in(loaded):
    model, tokenizer = loaded
    owner = load_policy("arithmetic")
    texts = [["1+2=3", "ok", "\\boxed{3}"], ["1+2=4", "no", "4+4=8", "no", "\\boxed{8}"]] * 2
    batch = in_turns(owner, problems(1), texts, group_size=4).replace(group=torch.zeros(4, dtype=torch.long))
    batch = graded(batch, torch.tensor([1.0, 0, 0, 1]).double(), tokenizer=owner.tokenizer)
    found = run_credit(GiGPO(), as_policy(model, tokenizer), given(batch))
    expected = own(batch.replace(episodes=None), GiGPO())
    assert_near(found, expected, 4, torch.float32)
    assert (found[~batch.response_mask] == 0).all()


def test_a_reference_is_given_and_stays_where_it_is(rollouts, loaded):
    model, tokenizer = loaded
    policy, other = as_policy(model, tokenizer), elsewhere(load_policy("arithmetic"))
    reference = as_policy(other.model.bfloat16(), tokenizer)
    found = run_credit(DGPO(temperature=0.05), policy, given(rollouts), reference=reference)
    expected = own(rollouts, DGPO(temperature=0.05), reference=elsewhere(load_policy("arithmetic")))
    uniform = own(rollouts, Uniform())
    assert (expected - uniform).abs().max() > 0.1, "the reference makes a difference here"
    assert_near(found, expected, 8, torch.bfloat16)
    assert reference.model.dtype == torch.bfloat16, "our own trainer moves its copy beside the policy"
    with pytest.raises(ValueError, match="needs no reference, since this run has none, but got `DGPO`"):
        run_credit(DGPO(), policy, given(rollouts))


@pytest.mark.parametrize(("credit", "why"), [(PRIME(), "trains a second model"), (Resampled(), "samples with the rol")])
def test_methods_that_use_more_than_rollouts_and_model_are_refused(credit, why, rollouts, loaded):
    policy = as_policy(*loaded)
    with pytest.raises(ValueError, match=f"got `{type(credit).__name__}`, which {why}"):
        run_credit(credit, policy, given(rollouts), reference=policy)


WRONG = {
    "`rewards` must have the shape \\[16\\], but got \\[3\\]": {"rewards": torch.zeros(3)},
    "`group` must have the shape \\[16\\], but got \\[16, 1\\]": {"group": torch.zeros(16, 1)},
    "`prompts` must have one entry for each of 16 rows, but got 1": {
        "prompts": [Prompt(messages="", reference="", task=ArithmeticTask())]
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_tensors_of_another_shape_are_named(message, rollouts):
    with pytest.raises(ValueError, match=message):
        given(rollouts, **WRONG[message])


def test_padding_on_the_other_side_and_a_mask_with_gaps_are_named(rollouts):
    flipped = rollouts.attention_mask[:, : rollouts.prompt_width].clone()
    flipped[0] = True
    flipped[0, -1] = False
    with pytest.raises(ValueError, match="`prompt_mask` must be of rows that are padded on the left alone"):
        given(rollouts, prompt_mask=flipped)
    gap = rollouts.response_mask.clone()
    gap[0, 1] = False
    with pytest.raises(ValueError, match="`valid_mask` must be of rows that are padded on the right alone"):
        given(rollouts, response_mask=gap, valid_mask=None)
    with pytest.raises(ValueError, match="`response_mask` must lie within `valid_mask`"):
        given(rollouts, response_mask=torch.ones_like(gap))


def test_models_that_cannot_be_policies_are_named(loaded):
    model, tokenizer = loaded
    wrapped = torch.nn.ModuleDict({"module": model})
    with pytest.raises(ValueError, match=r"`model` must be a causal language model .* but got ModuleDict.*module"):
        as_policy(wrapped, tokenizer)
    bare = copy.deepcopy(tokenizer)
    bare.pad_token = None
    with pytest.raises(ValueError, match="`tokenizer` must have a pad token, but got none"):
        as_policy(model, bare)
