import pytest
import torch

from grail_lightning.batch import Sampling
from grail_lightning.engines import HFEngine
from grail_lightning.engines.draw import Ending
from grail_lightning.engines.vllm.requests import (
    Completion,
    first_ends,
    row_seed,
    sample,
    sampling_parameters,
)
from grail_lightning.tasks import ArithmeticTask
from grail_lightning.tasks.base import Prompt

TASK = ArithmeticTask()
PROMPTS = [Prompt(messages=text, reference="", task=TASK) for text in ("Compute 7+5-3+8-2.", "Compute 1+2+3.")]


def _seeds(seed, rows):
    return [row_seed(seed, row) for row in range(rows)]


class Sampler:
    """vLLM's side of the interface, drawn by `HFEngine`'s own loop, which also reads what was asked for.

    Args:
        policy: The policy that samples.
        past_end: Whether it ignores end tokens, and samples up to the length limit.
        early: The number of tokens after which rows with stop strings end for no reason; None if they do not.
    """

    def __init__(self, policy, past_end=False, early=None):
        self.policy, self.past_end, self.early = policy, past_end, early
        self.calls = []

    def __call__(self, requests):
        self.calls.append(list(requests))
        return [self._one(request) for request in requests]

    def _one(self, request):
        asked = request.parameters
        ids, logprobs = list(request.prompt), []
        generator = torch.Generator().manual_seed(asked["seed"] % 2**32)
        for _ in range(asked["max_tokens"]):
            with torch.no_grad():
                logits = self.policy.model(torch.tensor([ids])).logits[0, -1].double()
            chances = (logits / (asked["temperature"] or 1)).log_softmax(-1)
            token = int(torch.multinomial(chances.exp(), 1, generator=generator)) if asked["temperature"] else None
            token = int(chances.argmax()) if token is None else token
            ids.append(token)
            logprobs.append(float(chances[token]))
            new = ids[len(request.prompt) :]
            if (new[-1] in asked["stop_token_ids"] and not self.past_end) or (asked["stop"] and len(new) == self.early):
                break
        return Completion(ids[len(request.prompt) :], logprobs)


def test_greedy_texts_are_those_of_the_own_engine(arithmetic):
    sampling = Sampling(max_response_length=30, temperature=0.0)
    engine = HFEngine()
    engine.update_weights(arithmetic)
    expected = engine.generate(PROMPTS, 2, sampling, seed=3)
    found = sample(arithmetic, PROMPTS, 2, sampling, _seeds(3, 2 * len(PROMPTS)), Sampler(arithmetic))
    assert torch.equal(found.response_ids, expected.response_ids)
    assert torch.equal(found.finished, expected.finished)
    assert found.texts == expected.texts
    torch.testing.assert_close(found.sampling_logprobs, expected.sampling_logprobs, rtol=0, atol=1e-4)


def test_what_was_sampled_beyond_the_end_is_cut_off(arithmetic):
    sampling = Sampling(max_response_length=50, temperature=0.0)
    exact = sample(arithmetic, PROMPTS, 1, sampling, _seeds(0, len(PROMPTS)), Sampler(arithmetic))
    beyond = sample(arithmetic, PROMPTS, 1, sampling, _seeds(0, len(PROMPTS)), Sampler(arithmetic, past_end=True))
    assert exact.finished.all()
    assert beyond.texts == exact.texts
    assert torch.equal(beyond.response_mask, exact.response_mask)
    assert torch.equal(beyond.sampling_logprobs, exact.sampling_logprobs)


def test_a_response_that_ends_without_a_reason_is_continued_without_stop_strings(arithmetic):
    """A greedy response does not depend on where it was interrupted."""
    sampling = Sampling(max_response_length=30, temperature=0.0, stop=("nowhere in it",))
    whole = sample(arithmetic, PROMPTS, 1, sampling, _seeds(0, len(PROMPTS)), Sampler(arithmetic))
    sampler = Sampler(arithmetic, early=4)
    found = sample(arithmetic, PROMPTS, 1, sampling, _seeds(0, len(PROMPTS)), sampler)
    assert found.texts == whole.texts
    assert torch.equal(found.finished, whole.finished)
    (first, second) = sampler.calls
    assert [len(b.prompt) - len(a.prompt) for a, b in zip(first, second, strict=True)] == [4, 4]
    assert [request.parameters["max_tokens"] for request in second] == [26, 26]


def test_a_response_that_vllm_gives_up_is_an_error_that_names_the_lengths(arithmetic):
    def give_up(requests):
        return [Completion(request.prompt[:2], [-1.0, -1.0]) for request in requests]

    with pytest.raises(ValueError, match=r"ended a response after 2 of 9 tokens.*`max_model_len`"):
        sample(arithmetic, PROMPTS, 1, Sampling(max_response_length=9), _seeds(0, len(PROMPTS)), give_up)


def test_stop_strings_end_rows_where_decoding_would_have_ended_them(arithmetic):
    """The oracle asks the rule after every token, as the loop of `HFEngine` does."""
    tokenizer = arithmetic.tokenizer
    texts = ["7+5=12\n12-3=9\n9+8=17\n", "1+2=3\n3+3=6\n", "\n", "12"]
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    for stop in (("\n",), ("12",), ("=9\n9+", "6"), ("never",), ("2=3", "17\n")):
        ending = Ending(arithmetic, Sampling(max_response_length=30, stop=stop))
        expected = [
            next((k for k in range(1, len(row) + 1) if bool(ending(torch.tensor([row[:k]]))[0])), None) for row in rows
        ]
        assert first_ends(ending, rows) == expected
        assert stop == ("never",) or any(end is not None for end in expected)


def test_end_tokens_end_rows_before_stop_strings_that_come_later(arithmetic):
    (end,) = arithmetic.end_token_ids[:1]
    row = arithmetic.tokenizer("1+2=3\n", add_special_tokens=False)["input_ids"]
    ending = Ending(arithmetic, Sampling(max_response_length=30, stop=("\n",)))
    assert first_ends(ending, [[row[0], end, *row], row, []]) == [2, len(row), None]


def test_rows_have_seeds_of_their_own_that_follow_one_another():
    """`n` responses of one request get consecutive seeds from vLLM, so both ways of asking draw the same tokens."""
    seeds = [row_seed(5, row) for row in range(4)]
    assert seeds == list(range(seeds[0], seeds[0] + 4))
    assert abs(row_seed(6, 0) - seeds[0]) > 2**32
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_temperatures_that_vllm_would_replace_are_refused():
    with pytest.raises(ValueError, match=r"at least 0.01 with vLLM, but got 0.005. Use 0"):
        sampling_parameters(Sampling(max_response_length=5, temperature=0.005), (), 0)
