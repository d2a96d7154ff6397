from dataclasses import replace

import pytest

from grail_lightning import Sampling
from grail_lightning.core.engines.base import TurnRequest
from grail_lightning.core.engines.requests import Completion, row_seeds, sample, sample_turns
from grail_lightning.core.engines.vllm.client import _completion
from grail_lightning.core.records.task import TokenText
from tests.runs import problems
from tests.vllm_routes import Worker

PROMPTS = problems(2)


class Sampler(Worker):
    """vLLM's side of the interface, drawn from the policy, which also reads what was asked for."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def __call__(self, requests):
        return [_completion(self.complete(request.prompt, request.parameters), request) for request in requests]


def test_turns_have_limits_and_seeds_of_their_own(arithmetic):
    """A long prompt with a short limit is none with a long one, as the longest of both would be."""
    ids = [arithmetic.encode(prompt.messages) for prompt in PROMPTS]
    room = arithmetic.model.config.max_position_embeddings
    rows = [(ids[0], 3), (ids[1], 60), (ids[0] + [5] * (room - len(ids[0]) - 2), 2)]
    requests = [TurnRequest(row, PROMPTS[0], *of_row, seed=7 + row) for row, of_row in enumerate(rows)]
    turns = sample_turns(arithmetic, Sampling(max_response_length=99), Sampler(arithmetic), requests)
    for request, turn in zip(requests, turns, strict=True):
        prompt = replace(PROMPTS[0], messages=TokenText("", request.ids))
        limited = Sampling(max_response_length=request.limit)
        alone = sample(arithmetic, [prompt], 1, limited, [request.seed], Sampler(arithmetic))
        assert turn.ids == alone.response_ids[0].tolist()
        assert turn.logprobs == pytest.approx(alone.sampling_logprobs[0].tolist())
        assert turn.finished == bool(alone.finished[0])
    assert {turn.finished for turn in turns} == {True, False}
    assert sample_turns(arithmetic, Sampling(max_response_length=99), Sampler(arithmetic), []) == []


def test_a_row_has_finished_if_vllm_stopped_it_or_its_last_token_is_an_end_token(arithmetic):
    (end,) = arithmetic.end_token_ids[:1]
    rows = [([5, 6], "stop"), ([5, 6, 7], "length"), ([5, 6, end], "length"), ([end], "stop")]
    completions = [Completion(ids, [-1.0] * len(ids), reason) for ids, reason in rows]
    batch = sample(arithmetic, PROMPTS, 2, Sampling(max_response_length=3), range(4), lambda requests: completions)
    assert batch.finished.tolist() == [True, False, True, True]
    assert batch.response_lengths.tolist() == [2, 3, 3, 1]


@pytest.mark.parametrize("ids", [[5, 6], []])
def test_a_response_that_vllm_gives_up_is_an_error_that_names_the_lengths(ids, arithmetic):
    def give_up(requests):
        return [Completion(ids, [-1.0] * len(ids), "length") for _ in requests]

    with pytest.raises(ValueError, match=rf"after {len(ids)} of 9 tokens \(length\).*`max_model_len`"):
        sample(arithmetic, PROMPTS, 1, Sampling(max_response_length=9), row_seeds(0, 2), give_up)


def test_rows_have_seeds_of_their_own_that_follow_one_another():
    seeds = row_seeds(5, 4)
    assert seeds == list(range(seeds[0], seeds[0] + 4))
    assert abs(row_seeds(6, 1)[0] - seeds[0]) > 2**32
    assert all(0 <= seed < 2**63 for seed in seeds)
