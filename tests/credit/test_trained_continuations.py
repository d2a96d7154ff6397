"""Continuations as rows of the update: what they hold, and their gradient against plain loops."""

from datetime import timedelta

import pytest
import torch

from grail_lightning.answers import Verifier
from grail_lightning.credit import GRAIL, UCAS, PermutedRewards, Product, Resampled, WarmUp
from grail_lightning.credit.continuations import Place
from grail_lightning.engines import HFEngine
from grail_lightning.policy import load_policy
from grail_lightning.runtime.clock import PhaseClock
from grail_lightning.step.advantages import token_advantages, with_advantages
from grail_lightning.step.continuations import SampledContinuations
from grail_lightning.step.options import Distillation
from grail_lightning.step.sampler import Sampler
from tests.batches import graded
from tests.runs import SAMPLING, Watch, batches, module, problems, sampled, trainer
from tests.steps import backward, update_of
from tests.tolerance import assert_near

REWARDS = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])


@pytest.fixture(scope="module")
def policy():
    return load_policy("arithmetic").double().train()


def batch_of(policy, scale="none"):
    """Two groups of four rollouts. The first of the first group is counted as right, and all of the second."""
    made = graded(sampled(policy, problems(2), 4, SAMPLING, seed=3), REWARDS)
    return with_advantages(made, 4, scale)


def source_of(policy, verifier):
    sampler = Sampler(
        group_size=4,
        sampling=SAMPLING,
        policy=policy,
        engine=HFEngine(),
        verifier=verifier,
        clock=PhaseClock(policy.device),
        rank=0,
    )
    return SampledContinuations(sampler, step=3)


def logprobs_of(policy, ids, start):
    """The log-probabilities of the tokens from `start` on, by a pass over this row alone."""
    logits = policy.model(torch.tensor([ids])).logits[0]
    return logits.log_softmax(-1)[range(start - 1, len(ids) - 1), ids[start:]]


def row_ids(batch, row):
    """The prompt's and the response's token ids."""
    length = int(batch.response_lengths[row])
    whole = batch.input_ids[row][batch.attention_mask[row]].tolist()
    return whole[: len(whole) - length], whole[len(whole) - length :]


def test_a_row_is_a_continuation_whose_prompt_includes_the_kept_tokens(policy):
    batch, places = batch_of(policy), [Place(1, 12), Place(2, 6), Place(3, 12)]
    with Verifier(num_workers=1) as verifier:
        source = source_of(policy, verifier)
        assert source.drawn() is None
        first, _ = source.draw(batch, places[:2], 3, 10_000)
        second, _ = source.draw(batch, places[2:], 3, 10_000)
        rows = source.drawn()
    drawn = [first[1], first[0], second[0]]  # A call samples the earliest places first.
    assert len(rows) == 9
    assert rows.group.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert len({*rows.row.tolist()}) == 9
    assert rows.rewards.tolist() == [reward for one in drawn for reward in one.rewards]
    assert rows.correct.tolist() == [right for one in drawn for right in one.correct]
    for k in range(9):
        row, kept = [places[1], places[0], places[2]][k // 3]
        (prompt, response), (before, own) = row_ids(batch, row), row_ids(rows, k)
        assert before == prompt + response[:kept]
        assert len(own) + kept <= SAMPLING.max_response_length
        assert own == rows.response_ids[k, : len(own)].tolist()
        assert rows.texts[k] == policy.tokenizer.decode(own, skip_special_tokens=True)
        with torch.no_grad():
            expected = logprobs_of(policy, before + own, len(before))
        assert_near(rows.sampling_logprobs[k, : len(own)].double(), expected, 1000, torch.float32)
        answer = rows.answer.content[k].nonzero().flatten().tolist()
        boxed = policy.tokenizer.decode([own[t] for t in answer])
        assert f"boxed{{{boxed}}}" in rows.texts[k] or not answer
        assert rows.correct[k] == (bool(answer) and boxed.strip() == batch.prompts[row].reference)


def gradient(policy, batch, credit, source, **options):
    """The gradient of one optimiser step, and its `Update`."""
    policy.zero_grad()
    limit = SAMPLING.max_response_length
    update = update_of(policy, batch, credit=credit, limit=limit, continuations=source, token_budget=300, **options)
    update.accumulate(0, backward)
    return torch.cat([p.grad.flatten() for p in policy.parameters()]), update


@pytest.mark.parametrize("aggregation", ["dr_grpo", "grpo", "dapo"])
@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_the_gradient_is_that_of_a_loop_over_rollouts_and_continuations(aggregation, scale, policy):
    batch = batch_of(policy, scale)
    credit = Resampled(4, borders="lines", train_continuations=True)
    with Verifier(num_workers=1) as verifier:
        source = source_of(policy, verifier)
        found, update = gradient(policy, batch, credit, source, aggregation=aggregation, scale_rewards=scale)
        drawn = source.drawn()
    assert len(torch.unique(update.forward.batch.group)) == 2 + len(drawn) // 4
    of_tokens = token_advantages(batch.advantages, update.forward.token_weights())
    rows = [(*row_ids(batch, k), of_tokens[k].tolist()) for k in range(len(batch))]
    for place in range(len(drawn) // 4):
        rewards = drawn.rewards[4 * place : 4 * place + 4].double()
        divisor = {"none": 1.0, "group": rewards.std() + 1e-4, "batch": REWARDS.std() + 1e-4}[scale]
        for k, reward in enumerate(rewards, start=4 * place):
            advantage = (reward - rewards.mean()) / divisor
            rows.append((*row_ids(drawn, k), [float(advantage)] * SAMPLING.max_response_length))
    assert any(advantages[0] for *_, advantages in rows[8:]), "a continuation with a learning signal"
    tokens = sum(len(response) for _, response, _ in rows)
    policy.zero_grad()
    loss = torch.zeros((), dtype=torch.float64)
    for prompt, response, advantages in rows:
        gained = logprobs_of(policy, prompt + response, len(prompt)) * torch.tensor(advantages[: len(response)])
        row = {"grpo": gained.mean() / len(rows), "dapo": gained.sum() / tokens}
        loss = loss - row.get(aggregation, gained.sum() / len(rows) / SAMPLING.max_response_length)
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in policy.parameters()])
    assert (found - expected).abs().max() < 1e-6 * expected.abs().max()
    assert expected.abs().max() > 0


def _one_rank(rank, folder, policy, batch, credit):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    with Verifier(num_workers=1) as verifier:
        mine = batch.select(torch.arange(4) + 4 * rank)
        found, update = gradient(policy, mine, credit, source_of(policy, verifier), scale_rewards="batch")
        torch.distributed.all_reduce(found)
        torch.save((found / 2, len(update.forward.batch)), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_ranks_have_the_gradient_of_one_and_one_of_them_has_no_continuation(policy, tmp_path):
    batch, credit = batch_of(policy, "batch"), Resampled(4, borders="lines", train_continuations=True)
    with Verifier(num_workers=1) as verifier:
        alone, update = gradient(policy, batch, credit, source_of(policy, verifier), scale_rewards="batch")
    arguments = tmp_path, policy, batch, credit
    torch.multiprocessing.start_processes(_one_rank, args=arguments, nprocs=2, start_method="fork")
    (one, rows), (other, rollouts) = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    assert torch.equal(one, other)
    assert (one - alone).abs().max() < 1e-9 * alone.abs().max()
    assert (rows + rollouts, rollouts) == (len(update.forward.batch), 4)
    assert rows > 4


def test_a_run_takes_several_steps_and_reports_its_rollouts_alone():
    """UCAS asks for new weights before each step, for the rollouts; figures and output are those of the rollouts."""
    watch, credit = Watch(), Product(Resampled(4, budget=20_000, train_continuations=True), UCAS())
    objective = {"mini_batches": 2, "updates_per_batch": 2, "kl_coefficient": 0.01}
    trainer(4, watch).fit(module(objective, credit=credit), batches(1, size=4))
    (output,) = watch.outputs
    assert len(output.batch) == 16
    assert output.weights.values.shape == output.batch.response_mask.shape
    assert output.metrics["accuracy"] == output.batch.correct.double().mean()
    assert 0 < output.metrics["credit/continued_live"] < 1
    assert output.metrics["grad_norm"] > 0


def test_composed_methods_train_on_the_continuations_of_an_inner_one():
    inner = Resampled(train_continuations=True)
    for made in (WarmUp(inner), Product(GRAIL(), inner), PermutedRewards(inner)):
        assert made.trains_continuations
    assert not Product(GRAIL(), Resampled()).trains_continuations


def test_one_continuation_has_nothing_beside_it():
    with pytest.raises(ValueError, match=r"`train_continuations` needs at least 2 `continuations`, .* but got 1"):
        Resampled(1, train_continuations=True)


def test_a_teacher_is_refused():
    with pytest.raises(ValueError, match=r"`train_continuations` must be off with `objective\.distillation`"):
        module({"distillation": Distillation()}, credit=Resampled(train_continuations=True))
