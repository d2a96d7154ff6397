"""What an engine returns is checked: it may be anybody's."""

import pytest
import torch

import grail_lightning
from grail_lightning import ArithmeticData, ArithmeticTask, Evaluation, Execution, RolloutEngine, Sampling, build_batch
from grail_lightning.app.cli.classes import choices
from grail_lightning.core.engines.checks import check_reported
from grail_lightning.core.step.execution import resolve_cap
from grail_lightning.core.step.sampler import sample_rollouts
from tests.copying_engine import Elsewhere
from tests.runs import TASK, module, trainer

PROMPTS = [TASK.prompt({"problem": text}) for text in ("1+2", "1+2+3")]  # The first one is padded.


class Canned(RolloutEngine):
    """An engine of a user's: three responses to each of two prompts, changed in one place."""

    def __init__(self, change=lambda batch: batch, logprobs=True):
        self.change, self.logprobs = change, logprobs

    def update_weights(self, policy):
        self.policy = policy

    def generate(self, prompts, group_size, sampling, seed):
        ids = [list(range(5, 5 + length)) for length in (4, 6, 0, 2, 6, 3)][: len(prompts) * group_size]
        logprobs = [[-0.5] * len(row) for row in ids] if self.logprobs else None
        finished = [len(row) < 6 for row in ids]
        return self.change(build_batch(self.policy, prompts, group_size, ids, finished, logprobs))


def sampled(policy, engine, prompts=PROMPTS, limit=6):
    engine.update_weights(policy)
    return sample_rollouts(engine, policy, prompts, 3, Sampling(max_response_length=limit), seed=0)


def _put(name, place, value):
    def change(batch):
        tensor = getattr(batch, name).clone()
        tensor[place] = value
        return batch.replace(**{name: tensor})

    return change


def _hole(batch):
    masks = batch.response_mask.clone(), batch.attention_mask.clone()
    for mask, column in zip(masks, (2, batch.prompt_width + 2), strict=True):
        mask[1, column] = False
    return batch.replace(response_mask=masks[0], attention_mask=masks[1])


WRONG = {
    "nothing": (lambda b: None, r"a `SampledBatch`, but got NoneType\. .*build_batch"),
    "texts": (lambda b: b.replace(texts=b.texts[1:]), r"`texts` as a list of 6, one a row, but got 5\. "),
    "prompts": (
        lambda b: b.replace(prompts=b.prompts[::2] + b.prompts[1::2]),
        r"the rows of each prompt side by side, .* but got '.*' in row 2, for 'Compute",
    ),
    "no prompts": (
        lambda b: b.replace(input_ids=b.response_ids, attention_mask=b.response_mask),
        r"`input_ids` as an integer tensor of shape \[6, 7\] on cpu, but got int32 of shape \[6, 6\]",
    ),
    "no tokens": (
        lambda b: b.replace(
            input_ids=b.input_ids[:, : b.prompt_width],
            attention_mask=b.attention_mask[:, : b.prompt_width],
            response_ids=b.response_ids[:, :0],
            response_mask=b.response_mask[:, :0],
            sampling_logprobs=b.sampling_logprobs[:, :0],
        ),
        r"one token of a response at least, but got none",
    ),
    "rows": (_put("row", 3, 2), r"rows that `row` numbers from 0, but got 2 in row 3\. "),
    "groups": (_put("group", 2, 1), r"numbered from 0 and of 3 neighbours, but got 1 in row 2"),
    "a hole": (_hole, r"the tokens after the prompt padded on the right, but got False in row 1, column 2\. "),
    "masks that differ": (
        lambda b: b.replace(response_mask=b.response_mask.flip(1)),
        r"that ends with the `response_mask`, but got False in row 0, column 0",
    ),
    "beyond the vocabulary": (_put("response_ids", (1, 5), 448), r"from 0 to 447, .* but got 448 in row 1, column 5"),
    "ids that differ": (_put("response_ids", (1, 0), 9), r"end with the `response_ids`, but got 5 in row 1, column 0"),
    "infinite": (_put("sampling_logprobs", (3, 1), -torch.inf), r"finite `sampling_logprobs` .* but got -inf in row 3"),
    "a likelihood above 1": (
        _put("sampling_logprobs", (3, 1), 0.25),
        r"of at most 0, but got 0\.25 in row 3",
    ),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_an_engine_that_returns_something_else_is_named(change, message, arithmetic):
    with pytest.raises(ValueError, match=message) as error:
        sampled(arithmetic, Canned(change))
    assert str(error.value).startswith("`Canned.generate` must return ")
    assert "\n" not in str(error.value)


def test_what_is_right_passes_and_a_response_longer_than_was_asked_for_is_named(arithmetic):
    """Right are an empty response, int64 ids, log-probabilities that round to a little above 0, NaN in the padding."""

    def change(batch):
        wide = batch.replace(response_ids=batch.response_ids.long(), input_ids=batch.input_ids.long())
        rounded = torch.where(wide.response_mask, 1e-7, torch.nan)
        return wide.replace(sampling_logprobs=rounded)

    for engine in (Canned(), Canned(change), Canned(logprobs=False)):
        assert len(sampled(arithmetic, engine)) == 6
    assert len(sampled(arithmetic, Canned(), prompts=[])) == 0
    with pytest.raises(ValueError, match=r"responses of at most 5 tokens, but got True in row 1, column 5"):
        sampled(arithmetic, Canned(), limit=5)


def test_log_probabilities_that_a_sampler_did_not_report_are_few_or_an_error_with_their_number(arithmetic):
    """NaN is none. Of a batch of less than 200 tokens one may be missing; of larger ones one in a hundred."""
    one = sampled(arithmetic, Canned(_put("sampling_logprobs", (3, 1), torch.nan)))
    assert one.sampling_logprobs.isnan().sum() == 1
    tokens = int(one.response_mask.sum())
    assert 4 < tokens < 200
    said = rf"`Canned` must report the log-probability of each token .* for 2 of {tokens} tokens"
    with pytest.raises(ValueError, match=said):
        sampled(arithmetic, Canned(_put("sampling_logprobs", (3, slice(0, 2)), torch.nan)))
    check_reported("Sampler", 3, 300)
    with pytest.raises(ValueError, match="for 4 of 300 tokens"):
        check_reported("Sampler", 4, 300)


def test_every_engine_of_the_package_but_hfengine_samples_with_a_copy_and_so_corrects_by_default():
    copies = {name for name in choices("model.engine") if getattr(grail_lightning, name).copies_weights}
    assert copies == {"VLLMEngine", "VLLMServer"}  # The policy's weights must be whole for others, a user's too.
    assert resolve_cap(Execution().sampler_cap, copies_weights=True) == 2
    assert resolve_cap(Execution().sampler_cap, copies_weights=False) is None
    assert resolve_cap(None, copies_weights=True) is None
    assert resolve_cap(3.0, copies_weights=False) == 3


class Silent(Elsewhere):
    """Reports no log-probabilities."""

    reports_logprobs = False
    calls = 0

    def generate(self, prompts, group_size, sampling, seed):
        self.calls += 1
        return super().generate(prompts, group_size, sampling, seed).replace(sampling_logprobs=None)


class Surprising(Silent):
    """Does not say so."""

    reports_logprobs = True


class Recording(ArithmeticTask):
    """Keeps what it was asked to grade."""

    graded = ()

    def answer(self, text):
        self.graded = (*self.graded, text)
        return super().answer(text)


def _module(engine, **options):
    return module({"group_size": 2} | options, engine=engine, sampling=Sampling(max_response_length=8))


def _data(task):
    return ArithmeticData(num_train=8, num_val=2, prompts_per_batch=2, eval_prompts_per_batch=2, task=task)


@pytest.mark.parametrize(
    ("engine", "ahead", "validated"), [(Silent, False, True), (Silent, True, False), (Surprising, False, True)]
)
def test_an_engine_without_log_probabilities_is_refused_before_anything_is_sampled(engine, ahead, validated):
    """Or at least before the first batch is graded, if the engine's class does not tell."""
    task, made = Recording(), engine()
    run = trainer(1, *([Evaluation(at_start=True)] if validated else []), limit_val_batches=int(validated))
    with pytest.raises(ValueError, match=rf"`execution.sampler_cap` needs .* `{engine.__name__}` reports none"):
        run.fit(_module(made, sample_ahead=ahead), _data(task))
    assert made.calls == (engine is Surprising)
    assert not task.graded


def test_an_engine_without_log_probabilities_trains_without_the_correction_and_evaluates():
    task, engine = Recording(), Silent()
    trainer(1, limit_val_batches=0).fit(_module(Silent(), sampler_cap=None, mask_truncated=False), _data(task))
    graded = len(task.graded)
    ours = _module(engine)
    trainer(1).validate(ours, _data(task), verbose=False)
    assert 0 < graded < len(task.graded)
    calls = engine.calls
    with pytest.raises(ValueError, match=r"`execution.sampler_cap` needs"):
        trainer(1).fit(ours, _data(task))  # The policy is loaded already.
    assert engine.calls == calls
