"""What TRL's loss is given beside what our own trainer gives its own, and the loss itself where credit is uniform."""

import pytest
import torch
from lightning.pytorch import seed_everything
from transformers import TrainerCallback

import grail_lightning.credit as credits
from grail_lightning import ArithmeticTask, GroupMean, RolloutEngine, SampledBatch
from grail_lightning.core.credit.base import token_advantages
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.step.assign import scored_rows, weigh_batch, with_unscored_rows
from grail_lightning.core.step.update import without_lone_rows
from grail_lightning.credit import GRAIL, SaliencyOptions, TreeAdvantage, Uniform
from tests.batches import graded, in_turns
from tests.core.credit.rollouts import context
from tests.runs import GROUP, LIMIT, Watch, batches, graded_rollouts, module, problems, trainer
from tests.steps import backward, update_of
from tests.tolerance import assert_near
from tests.trl_trainers import OF_TRL, GRPOTrainer, handing_over, loss_of, scored, trainer_of

pytestmark = OF_TRL
ROWS = 16


@pytest.fixture(scope="module")
def rollouts():
    """Sixteen rollouts of four problems, some truncated, with right and wrong ones in most groups."""
    batch = graded_rollouts(ROWS // GROUP, seed=2)
    of_groups = batch.rewards.reshape(-1, GROUP).mean(1)
    assert ((of_groups > 0) & (of_groups < 1)).sum() >= 2
    assert 0 < (~batch.finished).sum() < ROWS
    return batch


class Given(RolloutEngine):
    """Samples what was sampled before."""

    def __init__(self, batch):
        self.batch = batch

    def update_weights(self, policy):
        """Nothing is sampled."""

    def generate(self, prompts, group_size, sampling, seed):
        names = ("input_ids", "attention_mask", "response_ids", "response_mask", "group", "row", "finished", "texts")
        made = {name: getattr(self.batch, name) for name in names}
        return SampledBatch(**made, prompts=list(self.batch.prompts), sampling_logprobs=self.batch.sampling_logprobs)


def own_trainer(batch, credit, control):
    """The advantages of tokens of one step of our trainer, ``[B, T]``."""
    seed_everything(0, verbose=False)
    watch, ours = Watch(), module({"aggregation": "dr_grpo"}, engine=Given(batch), credit=credit, control=control)
    trainer(1, watch).fit(ours, batches(1, ROWS // GROUP))
    (output,) = watch.outputs
    return token_advantages(output.advantages, output.weights)


ALONE = SaliencyOptions(fuse=False)  # In a pass of its own, as here; else the update's own passes give it.
METHODS = {
    "Uniform": Uniform,
    "GRAIL": lambda: GRAIL(saliency=ALONE),
    "GRAIL, all rows, mean one": lambda: GRAIL(gate="all", normalise="mean_one", saliency=ALONE),
    "GRAIL, a middle block": lambda: GRAIL(saliency=SaliencyOptions(leaf="middle", fuse=False)),
    "OARGradient": credits.OARGradient,
    "OARPerturbation": credits.OARPerturbation,
    "HighEntropy": credits.HighEntropy,
    "AdvantageReweighting": credits.AdvantageReweighting,
    "LESS": lambda: credits.LESS(min_length=1),
    "UCAS": credits.UCAS,
    "RLSD": credits.RLSD,
    "AttentionRhythm": credits.AttentionRhythm,
    "TreeAdvantage": TreeAdvantage,
    "TreeAdvantage, other rows": lambda: TreeAdvantage(own_row=False),
    "TreeAdvantage, numbers": lambda: TreeAdvantage(state="numbers", advantage=False),
    "PrefixWeights": credits.PrefixWeights,
    "OptimalBaseline": credits.OptimalBaseline,
    "GiGPO": credits.GiGPO,
    "IGPO": credits.IGPO,
    "Oracle": lambda: credits.Oracle("balanced"),
    "SpanScores": credits.SpanScores,
    "RandomSubset": credits.RandomSubset,
    "PermutedRewards": lambda: credits.PermutedRewards(TreeAdvantage()),
    "Shuffled": lambda: (GRAIL(saliency=ALONE), credits.Shuffled()),
    "Random": lambda: (GRAIL(saliency=ALONE), credits.Random()),
    "AnswerOnly": lambda: (GRAIL(saliency=ALONE), credits.AnswerOnly()),
    "SameMagnitude": lambda: (TreeAdvantage(), credits.SameMagnitude()),
    "Balanced": lambda: (TreeAdvantage(), credits.Balanced()),
}
# Which of them computes a weight by other passes, or over the responses in another order, is a rounding apart.
ROUNDED = {"OARPerturbation": 64, "OptimalBaseline": 64}


# The others are marked slow, since each needs two trainers.
QUICK = ("Uniform", "GRAIL", "HighEntropy", "TreeAdvantage", "OptimalBaseline", "Oracle", "Shuffled")


def quick(names, some):
    """The names as parameters, of which all but some are slow."""
    return [name if name in some else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", quick(METHODS, QUICK))
def test_the_advantages_of_tokens_are_those_of_our_own_trainer(name, rollouts, tmp_path):
    made = METHODS[name]()
    credit, control = made if isinstance(made, tuple) else (made, None)
    theirs = trainer_of(
        tmp_path, **handing_over(rollouts), args={"seed": 0}, credit=credit, credit_control=control,
        credit_task=ArithmeticTask(),
    )  # fmt: skip
    theirs.model.train()
    found = scored(theirs, rollouts)["advantages"]
    expected = own_trainer(rollouts, *(METHODS[name]() if control else (METHODS[name](), None)))
    assert found.shape == (ROWS, rollouts.response_ids.shape[1])
    uniform = GroupMean()(rollouts, GROUP, None)[:, None] * rollouts.response_mask
    assert (name == "Uniform") == torch.equal(found, uniform), "credit makes a difference here"
    assert_near(found, expected, ROUNDED.get(name, 4), torch.float32)
    assert (found[~rollouts.response_mask] == 0).all()


LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo")


@pytest.mark.parametrize("how", quick(LOSSES, ("grpo", "dapo", "cispo", "vespo")))
def test_with_uniform_credit_loss_gradients_and_figures_are_bitwise_trls(how, rollouts, tmp_path):
    args = {"loss_type": how, "scale_rewards": "group", "epsilon": 0.1}
    pair = []
    for kind, more in ((GRPOTrainer, {}), (None, {"credit": Uniform()})):
        made = trainer_of(tmp_path, **({"kind": kind} if kind else {}), **handing_over(rollouts), args=args, **more)
        made.model.train()
        inputs = scored(made, rollouts)
        old = rollouts.sampling_logprobs + 0.3 * torch.sin(torch.arange(rollouts.response_ids.shape[1]))
        inputs["old_per_token_logps"] = old.float().masked_fill(~rollouts.response_mask, 0)
        loss, gradients = loss_of(made, inputs)
        figures = {k: v for k, v in made._metrics["train"].items() if not k.startswith("credit/")}
        pair.append((loss, gradients, figures, inputs["advantages"].dim()))
    (theirs, their_gradients, their_figures, one), (loss, gradients, figures, two) = pair
    assert (one, two) == (1, 2)
    assert torch.equal(loss, theirs)
    assert loss != 0
    assert gradients.keys() == their_gradients.keys()
    assert all(torch.equal(gradients[name], their_gradients[name]) for name in gradients)
    if how == "vespo":  # TRL's mean of a figure of a completion is then one over tokens.
        assert {figures.pop("vespo/phi_seq_mean")[0] > 0, their_figures.pop("vespo/phi_seq_mean")[0] > 0} == {True}
    assert figures == their_figures


def test_with_grail_a_step_of_train_has_the_gradient_of_our_own_step(rollouts, tmp_path):
    caught = {}

    class Catch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            caught.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    made = trainer_of(
        tmp_path, **handing_over(rollouts), credit=GRAIL(), callbacks=[Catch()], rows=None,
        args={"max_steps": 1, "max_grad_norm": 0.0, "epsilon_high": 0.28},
    )  # fmt: skip
    made.train()
    fresh = load_policy("arithmetic").train()
    batch = rollouts.with_advantages(GroupMean()(rollouts, GROUP, None))
    update = update_of(fresh, batch, credit=GRAIL(), limit=LIMIT, mask_truncated=False, aggregation="dr_grpo")
    update.accumulate(0, backward)
    ours = {name.removeprefix("model."): p.grad for name, p in fresh.named_parameters()}
    scale = max(gradient.abs().max() for gradient in ours.values())
    assert scale > 1e-4
    for name, gradient in ours.items():
        assert_near(caught[name], gradient, 100, torch.float32, scale=scale)
    plain = update_of(load_policy("arithmetic").train(), batch, limit=LIMIT, mask_truncated=False)
    assert plain.token_advantages.ne(update.token_advantages).any(), "credit makes a difference here"


def own_step(batch, credit):
    """The advantages of tokens of a batch, by the functions of our step."""
    whole = batch.with_advantages(GroupMean()(batch, GROUP, None))
    rows = scored_rows(whole)
    policy = load_policy("arithmetic")
    weights = without_lone_rows(weigh_batch(credit, None, policy, rows, context(budget=16384)), rows)
    return token_advantages(whole.advantages, with_unscored_rows(weights, whole))


TURNS = {
    "GiGPO": credits.GiGPO,
    "IGPO": credits.IGPO,
    "TreeAdvantage, turns": lambda: TreeAdvantage(state="turns"),
    "OptimalBaseline, turns": lambda: credits.OptimalBaseline(unit="turn"),
    "GRAIL": GRAIL,
}


@pytest.fixture(scope="module")
def dialogues():
    """Eight rollouts in which an environment answers; some begin alike, and none is truncated."""
    policy = load_policy("arithmetic")
    texts = [
        ["1+2=3", "ok", "3+4=7", "no", "\\boxed{7}"],
        ["1+2=3", "ok", "\\boxed{3}"],
        ["1+2=4", "no", "4+4=8", "no", "\\boxed{8}"],
        ["1+2=3", "ok", "3+4=7", "no", "\\boxed{8}"],
    ] * 2
    prompts = problems(2)
    batch = in_turns(policy, prompts, texts, group_size=4)
    batch = batch.replace(group=torch.arange(8) // 4, episodes=None)
    rewards = torch.tensor([1.0, 0, 0, 0.5, 0, 1, 1, 0]).double()
    return graded(batch, rewards, tokenizer=policy.tokenizer)


@pytest.mark.parametrize("name", quick(TURNS, ("GiGPO", "IGPO")))
def test_turns_between_which_an_environment_answers_have_the_credit_of_turns(name, dialogues, tmp_path):
    made = trainer_of(
        tmp_path, **handing_over(dialogues), credit=TURNS[name](), args={"per_device_train_batch_size": 8}
    )
    made.model.train()
    output = scored(made, dialogues)
    assert torch.equal(output["tool_mask"][dialogues.valid_mask].bool(), dialogues.response_mask[dialogues.valid_mask])
    found, expected = output["advantages"], own_step(dialogues, TURNS[name]())
    assert_near(found, expected, 64, torch.float32)
    assert (found[~dialogues.response_mask] == 0).all()
    assert (found - found[:, :1])[dialogues.response_mask].abs().max() > 0.01


def test_truncated_and_unscored_rows_keep_their_place_in_the_group(rollouts, tmp_path):
    """TRL clears the masks of truncated rows, and says nothing of rows without a reward."""
    rewards = rollouts.rewards.clone()
    rewards[[2, 9]] = torch.nan
    told = rollouts.replace(rewards=rewards)
    made = trainer_of(tmp_path, **handing_over(told), credit=TreeAdvantage(), args={"mask_truncated_completions": True})
    made.model.train()
    output = scored(made, told)
    cut = ~rollouts.finished
    assert (output["completion_mask"].sum(1) == 0).equal(cut)
    whole = told.with_advantages(GroupMean()(told, GROUP, None))
    rows = scored_rows(whole)
    weights = weigh_batch(TreeAdvantage(), None, made._credit_policy, rows, context())
    expected = token_advantages(whole.advantages, with_unscored_rows(weights, whole))
    assert_near(output["advantages"], expected, 8, torch.float32)
    assert (output["advantages"][[2, 9]] == 0).all()
    assert output["advantages"][cut].abs().max() > 0


def test_the_scale_of_the_group_is_that_of_the_terms_too(rollouts, tmp_path):
    given = TreeAdvantage()
    made = trainer_of(tmp_path, **handing_over(rollouts), credit=given, args={"scale_rewards": "group"})
    made.model.train()
    found = scored(made, rollouts)["advantages"]
    whole = rollouts.with_advantages(GroupMean(scale="group")(rollouts, GROUP, None))
    weights = weigh_batch(TreeAdvantage(standardise=True), None, made._credit_policy, whole, context())
    assert_near(found, token_advantages(whole.advantages, weights), 100, torch.float32)
    assert not given.standardise, "the caller's method stays as it is"
    assert made.credit.standardise
