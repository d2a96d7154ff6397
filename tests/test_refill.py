"""Dynamic sampling."""

import pytest
import torch

from grail_lightning import ArithmeticData, HFEngine, Sampling
from grail_lightning.answers import Verifier
from grail_lightning.core.advantages import same_verdict_groups
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.rollout.grading import grade_and_locate
from grail_lightning.core.step.collect import refill
from tests.copying_engine import Elsewhere
from tests.runs import Watch, batches, module, problems, trainer

SAMPLING = Sampling(max_response_length=40)


@pytest.fixture(scope="module", params=["compact", "static"])
def draw(request):
    """Samples and grades four responses to each prompt."""
    policy, engine = load_policy("arithmetic"), HFEngine(method=request.param)
    engine.update_weights(policy)
    with Verifier(num_workers=1) as verifier:

        def sample(prompts, number):
            batch = engine.generate(prompts, 4, SAMPLING, seed=number)
            return grade_and_locate(batch, verifier, policy.tokenizer)

        yield sample


@pytest.mark.parametrize("option", ["refill_rounds", "sample_ahead"])
def test_a_loader_that_has_no_further_prompts_is_refused_before_anything_is_sampled(option):
    ours = module({option: 1}, engine=Elsewhere())
    with pytest.raises(ValueError, match=f"`execution.{option}` asks the training loader .*, but got a `DataLoader`"):
        trainer(1).fit(ours, batches(1))


class Stream:
    """Further prompts, and how many were asked for."""

    def __init__(self, prompts):
        self.prompts, self.asked = prompts, []

    def take(self, number):
        self.asked.append(number)
        taken, self.prompts = self.prompts[:number], self.prompts[number:]
        return taken


def test_dead_groups_make_way_for_live_ones_and_the_others_stay(draw):
    batch = draw(problems(6), 0)
    dead = same_verdict_groups(batch)
    expected = [len({v.correct for v in batch.verdicts[4 * k : 4 * k + 4]}) == 1 for k in range(6)]  # by hand
    assert dead.tolist() == expected
    assert 1 <= dead.sum() < 6
    stream, drawn = Stream(problems(40, seed=9)), [batch]

    def drawing(prompts, number):
        drawn.append(draw(prompts, number))
        return drawn[-1]

    filled, figures = refill(batch, drawing, stream, 8, same_verdict_groups)
    assert not same_verdict_groups(filled).any()
    rows = {id(verdict): (part, row) for part in drawn for row, verdict in enumerate(part.verdicts)}
    for k in range(24):
        part, row = rows[id(filled.verdicts[k])]
        assert (part is batch) == (not dead[k // 4])
        assert filled.texts[k] == part.texts[row]
        ours, own = filled.response_mask[k], part.response_mask[row]
        whole = filled.input_ids[k][filled.attention_mask[k]], part.input_ids[row][part.attention_mask[row]]
        assert torch.equal(*whole)
        assert torch.equal(filled.response_ids[k][ours], part.response_ids[row][own])
        assert torch.equal(filled.answer.content[k][ours], part.answer.content[row][own])
        assert torch.equal(filled.sampling_logprobs[k][ours], part.sampling_logprobs[row][own])
    assert [v.correct for v in filled.verdicts] == filled.correct.tolist()
    assert all(filled.prompts[k] is filled.prompts[k - k % 4] for k in range(24))
    assert torch.equal(filled.row, batch.row)
    assert torch.equal(filled.group, batch.group)
    assert stream.asked[0] == int(dead.sum())
    assert figures["refill/rounds"] == len(stream.asked)
    assert figures["refill/drawn_groups"] == 6 + sum(stream.asked)
    assert figures["refill/dropped_groups"] == sum(stream.asked)
    assert 0 < figures["refill/accuracy_drawn"] < 1


def test_rounds_are_capped(draw):
    batch = draw(problems(6), 0)
    stream = Stream([batch.prompts[4 * k] for k in range(6) if same_verdict_groups(batch)[k]] * 10)

    def same_again(prompts, number):
        """The very responses that were dead."""
        picked = [k for p in prompts for k in range(24) if batch.prompts[k] is p][: 4 * len(prompts)]
        return batch.select(torch.tensor(picked))

    filled, figures = refill(batch, same_again, stream, 2, same_verdict_groups)
    assert len(stream.asked) == figures["refill/rounds"] == 2
    assert filled.texts == batch.texts


def test_a_run_takes_further_prompts_from_its_loader_and_logs_what_it_dropped():
    data = ArithmeticData(num_train=64, num_val=4, prompts_per_batch=4)
    watch = Watch()
    run = trainer(2, watch, limit_val_batches=0)
    run.fit(module({"refill_rounds": 3}), data)
    for output in watch.outputs:
        metrics = output.metrics
        assert len(output.batch) == 16
        assert metrics["refill/drawn_groups"] - metrics["refill/dropped_groups"] == 4
        assert metrics["frac_correct_zero_std"] == 0 or metrics["refill/rounds"] == 3
    assert sum(o.metrics["refill/drawn_groups"] for o in watch.outputs) == run.train_dataloader.offset
    assert max(o.metrics["refill/rounds"] for o in watch.outputs) >= 1
