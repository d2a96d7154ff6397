"""Responses that nothing scored: they are as if they had not been sampled, from the advantage to what a run shows."""

import json
import math

import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch import Callback

import grail_lightning.credit as credits
from grail_lightning import (
    BNPO,
    ArithmeticData,
    ArithmeticTask,
    CreditPictures,
    DrGRPO,
    EnergyBaseline,
    Evaluation,
    GroupMean,
    KeepRollouts,
    PredictionWriter,
    Preflight,
    Sampling,
    StepOutput,
)
from grail_lightning.app.callbacks.credit_plots import _text
from grail_lightning.app.callbacks.samples import sample_rows
from grail_lightning.core.advantages import same_verdict_groups
from grail_lightning.core.credit.base import token_advantages
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.rollout.grading import grade_and_locate
from grail_lightning.core.rollout.rows import rows_of
from grail_lightning.core.step.assign import compute_advantages, scored_rows, weigh_batch, with_unscored_rows
from grail_lightning.core.step.figures import Tally, add_rollouts
from grail_lightning.credit import Resampled
from tests.batches import graded
from tests.copying_engine import Elsewhere
from tests.core.credit.rollouts import context
from tests.gallery.test_resampled import Table
from tests.processes import group, on_ranks
from tests.runs import Watch, module, problems, sampled, trainer
from tests.runs_on_ranks import saved_fit
from tests.steps import backward, context_for, sums, update_of
from tests.tolerance import roundings

NONE, LIMIT = math.nan, 36
# Groups of four: without a reward, with two, with one, and with three.
REWARDS = [NONE] * 4 + [1.0, NONE, 0.0, NONE] + [NONE, 1.0, NONE, NONE] + [1.0, 0.0, 0.5, NONE]
ANCHORED = {"kl_coefficient": 0.1, "entropy_coefficient": 0.05}
OBJECTIVES = [
    *({"aggregation": how} | more for how in ("grpo", "dr_grpo", "dapo") for more in ({}, ANCHORED)),
    ANCHORED | {"mini_batches": 3, "split_groups": True, "aggregation": "dapo"},
    {"estimator": EnergyBaseline(), "mask_truncated": False},
    {"estimator": GroupMean(scale="batch"), "aggregation": "grpo", "mask_truncated": False},
    {"estimator": BNPO(), "kl_coefficient": 0.1, "kl_estimator": "k1", "kl_corrected": False},
]


def _batch(policy):
    made = sampled(policy, problems(4), 4, Sampling(max_response_length=LIMIT), seed=1)
    return graded(made, torch.tensor(REWARDS, dtype=torch.float64), correct=torch.arange(16) % 3 == 0)


def _weights(batch):
    return torch.rand(batch.response_mask.shape, generator=torch.Generator().manual_seed(3)).double() + 0.5


def _gradient(policy, reference, batch, weights, options, rows):
    """Of all weights, the sum over the steps of a batch, as DDP has it: the mean over the ranks; and the losses.

    `rows` says which rows of the batch are trained on.
    """
    options = dict(options)
    estimator = options.pop("estimator", GroupMean())
    asked = {name: options[name] for name in ("mask_truncated", "aggregation") if name in options}
    objective = DrGRPO(**{"mask_truncated": True} | asked)
    ready = compute_advantages(batch, 4, estimator, objective, policy, context_for(policy, 200, step=0))
    chosen = rows(ready)
    policy.zero_grad()
    frozen = reference if "kl_coefficient" in options else None
    how = {"limit": LIMIT, "token_budget": 200, "share_prefixes": False}
    own = torch.isin(batch.row, chosen.row)
    update = update_of(policy, chosen, weights[own, : chosen.response_mask.shape[1]], frozen, **how, **options)
    losses = [update.accumulate(number, backward).figures()["loss"] for number in range(len(update.steps))]
    found = torch.cat([p.grad.flatten() for p in policy.parameters()])
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(found)
        found /= 2
    return found, losses


def _removed(batch):
    return batch.select(batch.scored.nonzero().flatten())


def _models():
    policy, reference = load_policy("arithmetic").double().train(), load_policy("arithmetic", trainable=False).double()
    for p in reference.parameters():
        p.data *= 1.01
    return policy, reference


def _gap(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


def _compare():
    """How far the gradient of two ranks is from that of one process whose batch has the scored rows alone.

    One rank has a group without any reward.
    """
    policy, reference = _models()
    batch = _batch(policy)
    weights = _weights(batch)
    alone = [_gradient(policy, reference, batch, weights, options, _removed) for options in OBJECTIVES]
    report = []
    with group() as rank:
        rows = torch.arange(4, 16) if rank else torch.arange(4)
        mine = batch.select(rows)
        for options, (expected, losses) in zip(OBJECTIVES, alone, strict=True):
            own = weights[rows, : mine.response_mask.shape[1]]
            found, ours = _gradient(policy, reference, mine, own, options, scored_rows)
            report.append((_gap(found, expected), ours, losses))
    return report


def test_gradients_of_two_ranks_are_those_of_the_batch_without_the_rows_that_have_no_reward():
    """Denominators, the KL term, the entropy bonus and the deal of rows included."""
    for options, first, second in zip(OBJECTIVES, *on_ranks(_compare), strict=True):
        assert max(first[0], second[0]) <= roundings(64, torch.float32), options  # Norms run in it.
        assert first[1] == pytest.approx(first[2], rel=0, abs=roundings(64, torch.float32)), options


@pytest.mark.parametrize("options", [OBJECTIVES[k] for k in (1, 3, 5, 6)], ids=str)
def test_a_row_without_a_reward_is_out_of_the_loss_also_where_it_is_still_in_the_batch(options):
    policy, reference = _models()
    batch = _batch(policy)
    weights = _weights(batch)
    expected, losses = _gradient(policy, reference, batch, weights, options, _removed)
    found, ours = _gradient(policy, reference, batch, weights, options, lambda rows: rows)
    assert _gap(found, expected) <= roundings(64, torch.float32)
    assert ours == pytest.approx(losses, rel=0, abs=roundings(64, torch.float32))


@pytest.fixture(scope="module")
def policy():
    return load_policy("arithmetic").eval()


@pytest.fixture(scope="module")
def batch(policy):
    return compute_advantages(_batch(policy), 4, GroupMean(), DrGRPO(mask_truncated=True), policy, context_for(policy))


@pytest.mark.parametrize(
    "credit",
    [credits.UCAS(), credits.PRIME(accuracy=(0.0, 1.0)), credits.TurnRewards(baseline="group")],
    ids=lambda credit: type(credit).__name__,
)
def test_nothing_is_added_to_the_only_row_of_a_group_that_has_a_reward(credit, policy, batch):
    """Row 9; its group has no advantage."""
    from tests.core.credit.rollouts import elsewhere, second_model
    from tests.core.credit.test_contract import in_turns

    trained = scored_rows(batch)
    assert trained.row.tolist() == [4, 6, 9, 12, 13, 14]
    seen = in_turns(policy, trained) if isinstance(credit, credits.TurnRewards) else trained
    given = context(reference=elsewhere(policy), second=second_model(policy))
    weights = weigh_batch(credit, None, policy, seen, given)
    added = (weights.additive != 0).any(1)
    assert added[0], "of another group"
    assert added[2] != isinstance(credit, credits.PRIME), "PRIME itself adds nothing"
    update = update_of(policy, seen, weights, limit=LIMIT, mask_truncated=False)
    assert (update.token_advantages[2] == 0).all()
    assert update.live.tolist() == [True, True, False, True, True, bool(added[5])]
    assert torch.equal(update.token_advantages[[0, 5]], token_advantages(seen.advantages, weights)[[0, 5]])


def test_reward_means_leave_unscored_rows_out_and_dead_groups_are_those_without_two_different_rewards(batch):
    tally = Tally()
    add_rollouts(tally, batch.replace(reward_values={"judge": batch.rewards}))
    figures = tally.compute()
    assert figures["reward"] == figures["rewards/judge/mean"] == pytest.approx(3.5 / 6)  # 1 + 0 + 1 + 1 + 0 + 0.5
    assert figures["reward_std"] == pytest.approx(torch.tensor([1, 0, 1, 1, 0, 0.5]).std().item())
    assert figures["rewards/unscored"] == 10 / 16
    assert figures["frac_reward_zero_std"] == 0.5  # The first group and the third one.
    # Scored are rows 4 and 6 (wrong, right), 9 (right), and 12, 13 and 14 (right, wrong, wrong).
    assert figures["frac_correct_zero_std"] == 0.5
    assert figures["accuracy"] == 6 / 16, "that of the verdicts, whatever the rewards"


def test_what_is_replaced_by_further_samplings_are_groups_whose_scored_rows_teach_nothing(policy, batch):
    assert same_verdict_groups(batch).tolist() == [True, False, True, False]
    right = batch.replace(correct=torch.arange(16) % 2 == 0)  # Rows 4 and 6 are both right, 5 and 7 have no reward.
    assert same_verdict_groups(right).tolist() == [True, True, True, False]


# --- runs -------------------------------------------------------------------------------------------------------------


def sometimes(responses, references, *, correct, lengths):
    """No opinion about some responses, by their length."""
    return [None if n % 3 == 0 else float(right) for right, n in zip(correct, lengths, strict=True)]


def by_text(responses, references):
    """No opinion about some responses, by their text."""
    return [None if len(text) % 3 == 0 else float(len(text)) for text in responses]


def never(responses, references):
    """No opinion about any."""
    return [None] * len(responses)


class Validated(Callback):
    """Keeps the batches of a validation."""

    def __init__(self):
        self.batches = []

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.batches.append(outputs.batch)


class Fading:
    """An opinion in its first call alone."""

    def __init__(self):
        self.calls = 0

    def __call__(self, responses, references, *, correct):
        self.calls += 1
        return [float(right) if self.calls == 1 else None for right in correct]


def _data(*rewards, **options):
    task = ArithmeticTask(rewards=[*rewards])
    sizes = {"num_train": 12, "num_val": 4, "prompts_per_batch": 4, "eval_prompts_per_batch": 4}
    return ArithmeticData(task=task, **sizes | options)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A run of two batches whose reward has no opinion about some responses; with what callbacks kept."""
    folder, watch = tmp_path_factory.mktemp("kept"), Watch()
    evaluation = Evaluation(num_samples=2, sampling=Sampling(max_response_length=48))
    run = trainer(2, watch, evaluation, Preflight(), KeepRollouts(str(folder)), CreditPictures())
    ours = module({"kl_coefficient": 0.1, "aggregation": "dapo"}, credit=credits.TreeAdvantage())
    run.fit(ours, _data(sometimes))
    return run, ours, watch, folder


def test_a_run_trains_on_scored_rows_alone_and_hands_out_all(fitted):
    _, _, watch, _ = fitted
    for output in watch.outputs:
        rows, scored = output.batch, output.batch.scored
        assert scored.tolist() == [n % 3 != 0 for n in rows.response_lengths.tolist()]
        assert 0 < scored.sum() < len(rows) == 16
        assert (rows.advantages[~scored] == 0).all()
        assert (output.weights.additive[~scored] == 0).all()
        assert torch.equal(output.weights.values[~scored], rows.response_mask[~scored].float())
        assert rows.advantages.dtype == torch.float32
        assert output.metrics["rewards/unscored"] == (~scored).double().mean()
        assert output.metrics["reward"] == pytest.approx(rows.correct[scored].double().mean().item())
        for k in range(4):
            own = slice(4 * k, 4 * k + 4)
            known = rows.rewards[own][scored[own]]
            expected = known - known.mean() if len(known) > 1 else 0 * known
            assert rows.advantages[own][scored[own]].tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_kept_rollouts_have_null_where_there_is_no_reward(fitted):
    _, _, watch, folder = fitted
    rows = pq.read_table(folder).to_pylist()
    found = [row["reward"] for row in rows]
    expected = [None if math.isnan(r) else r for output in watch.outputs for r in output.batch.rewards.tolist()]
    assert sorted(map(str, found)) == sorted(map(str, expected))
    assert all(row["advantage"] == 0 for row in rows if row["reward"] is None)


def test_a_reward_of_a_kept_rollout_keeps_the_differences_of_large_rewards(policy, tmp_path):
    watch = Watch()

    def offset(responses, references, *, correct):
        return [1e8 + right for right in correct]

    trainer(1, watch, KeepRollouts(str(tmp_path))).fit(module(), _data(offset))
    (output,) = watch.outputs
    assert (output.batch.rewards - 1e8).tolist() == output.batch.correct.double().tolist()
    assert (pq.read_table(tmp_path)["reward"].to_numpy() - 1e8).tolist() == output.batch.correct.double().tolist()
    right = output.batch.correct.reshape(4, 4).double()
    assert output.batch.advantages.tolist() == (right - right.mean(1, keepdim=True)).flatten().tolist()
    assert output.metrics["rewards/offset/mean"] - 1e8 == pytest.approx(right.mean().item(), abs=1e-6)


def test_the_reward_of_a_validation_is_the_mean_of_scored_responses(fitted):
    run, ours, _, _ = fitted
    seen = Validated()
    run.callbacks.append(seen)
    (figures,) = run.validate(ours, _data(sometimes), verbose=False)
    run.callbacks.remove(seen)
    (rows,) = seen.batches
    assert rows.scored.tolist() == [n % 3 != 0 for n in rows.response_lengths.tolist()]
    assert 0 < rows.scored.sum() < len(rows)
    assert figures["val/reward"] == pytest.approx(rows.correct[rows.scored].double().mean().item())
    assert figures["val/accuracy"] == pytest.approx(rows.correct.double().mean().item()), "by the verdicts"


def test_a_validation_without_any_reward_has_no_mean_of_them(fitted):
    run, ours, _, _ = fitted
    (figures,) = run.validate(ours, _data(never), verbose=False)
    assert "val/reward" not in figures
    assert "val/accuracy" in figures


def test_samples_and_texts_say_that_there_is_no_reward(batch):
    rows = sample_rows(batch, [0, 1, 2, 3])
    assert [row["reward"] for row in rows] == [None if math.isnan(r) else r for r in REWARDS]
    assert json.dumps([row["reward"] for row in rows], allow_nan=False)
    assert "no reward" in _text(StepOutput(batch), 0).splitlines()[0]
    assert "reward 1" in _text(StepOutput(batch), 4).splitlines()[0]


def test_predict_gives_a_response_without_a_reward_no_advantage_and_weight_one(fitted, tmp_path):
    _, ours, _, _ = fitted
    file = tmp_path / "predictions.parquet"
    writer = PredictionWriter(str(file), compare=[credits.TreeAdvantage(own_row=False)])
    evaluation = Evaluation(num_samples=4, sampling=Sampling(max_response_length=48))
    trainer(1, writer, evaluation).predict(ours, _data(sometimes, num_test=4), return_predictions=False)
    rows = pq.read_table(file).to_pylist()
    unscored = [row for row in rows if row["reward"] is None]
    assert 0 < len(unscored) < len(rows)
    for row in rows:
        assert (row["reward"] is None) == (row["num_tokens"] % 3 == 0)
        sign = 0 if row["reward"] is None else 1 if row["correct"] else -1
        assert row["advantage"] == sign
        if not sign:
            assert set(row["weights"]) == set(row["weights.TreeAdvantage own_row=False"]) == {1.0}
    assert any(len(set(row["weights"])) > 1 for row in rows)
    assert file.with_suffix(".html").exists()


def test_a_first_batch_without_any_reward_is_an_error_at_once():
    said = r"first batch must have a reward, .*`never` gave no opinion.*Return numbers, 0"
    with pytest.raises(ValueError, match=said):
        trainer(2).fit(module(), _data(never))


def test_a_later_batch_without_any_reward_trains_nothing_and_the_run_goes_on():
    watch, ours = Watch(), module({"entropy_coefficient": 0.1})
    trainer(3, watch, Preflight(), limit_val_batches=0).fit(ours, _data(Fading()))
    assert len(watch.outputs) == 3
    for output in watch.outputs[1:]:
        assert output.metrics["rewards/unscored"] == 1
        assert output.metrics["grad_norm"] == 0
        assert "reward" not in output.metrics
        assert not any(name.startswith("credit/") for name in output.metrics)


def test_preflight_says_that_responses_have_no_rewards():
    said = "In each of the last 2 batches, no response had a reward"
    with pytest.warns(UserWarning, match=said):
        trainer(4, Preflight(patience=2), limit_val_batches=0).fit(module(), _data(Fading()))


def test_rows_sampled_ahead_without_a_reward_are_so_after_a_resume(tmp_path):
    def fit(max_steps, part, begun=None):
        ours = module(
            {"group_size": 4, "sample_ahead": True, "sampler_cap": 2.0, "mask_truncated": False},
            sampling=Sampling(max_response_length=12),
            engine=Elsewhere(),
        )
        data = _data(by_text)
        _, outputs = saved_fit(ours, data, 1, "auto", max_steps, tmp_path / part, begun, limit_val_batches=0)
        return sums(ours.policy.parameters()), [rows_of(output.batch, ["reward"])["reward"] for output in outputs]

    whole, rewards = fit(3, "whole")
    _, first = fit(2, "begun")
    resumed, left = fit(3, "resumed", tmp_path / "begun")
    assert rewards == first + left
    assert any(reward is None for of_batch in rewards for reward in of_batch)
    assert resumed == whole


# --- continuations, and what a task returns ---------------------------------------------------------------------------


def test_a_place_none_of_whose_continuations_has_a_reward_has_no_value(policy, batch):
    """Its row is a fallback; those of other rows are as ever."""

    class Partly(Table):
        def draw(self, batch, places, number, budget):
            found, spent = super().draw(batch, places, number, budget)
            return [[] if place.row == 0 else own for place, own in zip(places, found, strict=True)], spent

    trained = scored_rows(batch)
    trained = trained.replace(advantages=-torch.ones(len(trained)))
    source = Partly(lambda place: 1 / place.length)
    made = Resampled(8, search="everywhere")(policy, trained, context(continuations=source))
    plain = Resampled(8, search="everywhere")(policy, trained, context(continuations=Table(source.values)))
    assert made.fallback.tolist() == [True] + [False] * 5
    assert (made.additive[0] == 0).all()
    assert torch.equal(made.additive[1:], plain.additive[1:])


class OfItsOwn(ArithmeticTask):
    """A task whose own `reward` has no opinion about answers below 10."""

    def reward(self, texts, prompts, verdicts, lengths=None):
        rows = zip(prompts, verdicts, strict=True)
        return [None if int(prompt.reference) < 10 else 1e8 + verdict.correct for prompt, verdict in rows]


def test_a_tasks_own_reward_may_have_no_opinion(policy):
    from grail_lightning.answers import Verifier

    task = OfItsOwn()
    prompts = [task.prompt({"problem": text}) for text in ("9+9", "1+1", "8+8")]
    made = sampled(policy, prompts, 2, Sampling(max_response_length=LIMIT), seed=1)
    with Verifier(num_workers=1) as verifier:
        found = grade_and_locate(made, verifier, policy.tokenizer)
    assert found.scored.tolist() == [True, True, False, False, True, True]
    assert found.rewards.dtype == torch.float64
    assert found.rewards[found.scored].tolist() == (1e8 + found.correct[found.scored].double()).tolist()


def test_weights_of_scored_rows_take_their_places_among_all_rows(batch):
    trained = scored_rows(batch)
    ones = trained.response_mask.float()
    weights = credits.TokenWeights(
        values=ones * 2, scores=ones * 3, additive=ones * 4, answer=trained.answer, unscaled=ones * 5
    )
    spread = with_unscored_rows(weights, batch)
    width = trained.response_mask.shape[1]
    for name, factor, elsewhere in (("values", 2, 1), ("scores", 3, 0), ("additive", 4, 0), ("unscaled", 5, 1)):
        whole = getattr(spread, name)
        assert torch.equal(whole[batch.scored][:, :width], ones * factor), name
        assert torch.equal(whole[~batch.scored], batch.response_mask[~batch.scored].float() * elsewhere), name
    assert torch.equal(spread.answer.whole, batch.answer.whole)
