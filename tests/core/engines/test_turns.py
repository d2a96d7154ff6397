"""Rollouts of several turns that continue from the KV cache, against a loop that reads every row from its beginning."""

import os
import weakref

import pytest
import torch
from transformers import MistralConfig, Qwen3Config

from grail_lightning import Sampling
from grail_lightning.core.engines.base import SampledTurn, TurnRequest
from grail_lightning.core.engines.hf import static
from grail_lightning.core.policy.load import load_policy
from tests.core.engines.test_decoding import MODELS, SIZES, engine_of, policy_of
from tests.draws import without_ties
from tests.processes import group, on_ranks
from tests.runs import problems
from tests.tolerance import roundings

ROWS, GROUP, TURNS = 8, 2, 3
SAMPLING = Sampling(max_response_length=30)
STOPS = ("+",), ("-",)  # Of every other group, as with tools of two tasks.
PROMPTS = [prompt for prompt in problems(ROWS // GROUP) for _ in range(GROUP)]


def request(row, turn, ids, stops=STOPS):
    """Uneven limits; row and turn decide on the seed."""
    limit, stop = 2 + (5 * row + 3 * turn) % 11, stops[row // GROUP % len(stops)]
    return TurnRequest(row, PROMPTS[row], ids, limit, seed=100 * turn + row + 3, stop=stop)


def observation(row, turn):
    """1 to 12 ids of digits and the like, which no policy sampled."""
    return torch.randint(
        20, 60, (1 + (7 * row + 5 * turn) % 12,), generator=torch.Generator().manual_seed(row)
    ).tolist()


def play(policy, sample, after=lambda turn, requests, turns: None, stops=STOPS):
    """`TURNS` turns with observations of uneven length, by row and number; after each one two rows end."""
    ids = {row: policy.encode(PROMPTS[row].messages) for row in range(ROWS)}
    played = {}
    for turn in range(TURNS):
        requests = [request(row, turn, ids[row], stops) for row in ids]
        turns = sample(requests)
        after(turn, requests, turns)
        played |= {(row, turn): sampled for row, sampled in zip(ids, turns, strict=True)}
        ids = {
            row: ids[row] + played[row, turn].ids + observation(row, turn)
            for row in ids
            if row not in (turn, ROWS - 1 - turn)
        }
    return played


def read_again(policy, sampling):
    """Turns of which each token is the outcome of a forward pass over all tokens before it, row by row.

    A turn's uniform numbers are those of a generator with its seed, one for each token of its limit.
    """

    def sample(requests):
        return [one(request) for request in requests]

    @torch.no_grad()
    def one(request):
        noise = torch.rand(request.limit, dtype=torch.float64, generator=torch.Generator().manual_seed(request.seed))
        ids, logprobs, finished = [], [], False
        while len(ids) < request.limit and not finished:
            logits = policy.model(torch.tensor([request.ids + ids])).logits[0, -1] / sampling.logprob_temperature
            probs = logits.softmax(-1)
            ids.append(int((probs.cumsum(0) <= noise[len(ids)]).sum()) if sampling.temperature else int(probs.argmax()))
            logprobs.append(probs[ids[-1]].log().item())
            finished = ids[-1] in policy.end_token_ids or policy.tokenizer.decode(ids[-1:]) in request.stop
        return SampledTurn(ids, logprobs, finished)

    return sample


def same(found, expected):
    """Compare two rollouts, and return how many turns they have."""
    assert found.keys() == expected.keys()
    for key, turn in expected.items():
        assert found[key][::2] == turn[::2], key
        # The engine keeps log-probabilities in float32.
        assert found[key].logprobs == pytest.approx(turn.logprobs, rel=0, abs=roundings(64, torch.float32, scale=4))
    return len(found)


@pytest.fixture(scope="module")
def policy():
    return load_policy("arithmetic").double().eval()


@pytest.mark.parametrize(
    ("method", "temperature", "sizes"),
    [("compact", 1.0, (10**6, 90, 1)), ("compact", 0.0, (150,)), ("static", 1.0, (10**6, 90))],
)
def test_turns_are_those_of_a_loop_that_reads_all_tokens_again(policy, method, temperature, sizes, monkeypatch):
    """Also with room for some rows only, so that rows wait without keys and values, and one row a call."""
    monkeypatch.setattr(static, "_FEWEST_ROWS", 2)
    monkeypatch.setattr(static, "_GROWTH_COLUMNS", 4)
    monkeypatch.setattr(static, "_TOKENS_BETWEEN_LOOKS", 2)
    sampling = Sampling(max_response_length=30, temperature=temperature)
    expected = play(policy, read_again(policy, sampling))
    finished = [turn.finished for turn in expected.values()]
    assert 4 < sum(finished) < len(finished) - 4, "the case must hold both"
    with without_ties():
        for cache_tokens in sizes:
            with engine_of(policy, cache_tokens=cache_tokens, method=method).turns(sampling) as sampler:
                same(play(policy, sampler), expected)


def test_every_token_is_run_once_and_only_kept_rows_are_continued(monkeypatch):
    monkeypatch.setattr(
        "grail_lightning.core.engines.hf.decoding._MIN_FINISHED_SHARE", 1e-9
    )  # Finished rows leave at once.
    policy = policy_of(MODELS["llama"](), end_bias=8.0)
    run = []

    def count(module, args, kwargs):
        width, mask = kwargs["input_ids"].shape[1], kwargs["attention_mask"]
        run.append(kwargs["input_ids"].numel() if mask is None else int(mask[:, -width:].sum()))

    def after(turn, requests, turns):
        new = [1 + len(observation(row.row, turn - 1)) if turn else len(row.ids) for row in requests]
        if turn:
            assert sum(run) == sum(new) + sum(len(sampled.ids) - 1 for sampled in turns)
        else:
            assert sum(run) <= sum(new) // GROUP + sum(len(sampled.ids) - 1 for sampled in turns)
        run.clear()

    hook = policy.model.register_forward_pre_hook(count, with_kwargs=True)
    with engine_of(policy).turns(SAMPLING) as sampler:
        played = play(policy, sampler, after)
    hook.remove()
    same(played, play(policy, read_again(policy, SAMPLING)))


def test_ids_that_do_not_go_on_from_the_turn_before_are_read_again(policy):
    """As where an environment takes back a turn, or goes on without a word."""
    other = [ids + 1 for ids in policy.encode(PROMPTS[0].messages)]
    first = request(0, 0, policy.encode(PROMPTS[0].messages))
    with engine_of(policy).turns(SAMPLING) as sampler:
        (turn,) = sampler([first])
        (silent,) = sampler([second := request(0, 1, first.ids + turn.ids)])
        (elsewhere,) = sampler([third := request(0, 2, other)])
    expected = read_again(policy, SAMPLING)([first, second, third])
    assert same({0: turn, 1: silent, 2: elsewhere}, dict(enumerate(expected))) == 3


@pytest.mark.parametrize("cache_tokens", [10**6, 90])
def test_what_is_kept_is_bounded_and_freed_with_the_row_or_the_context(policy, cache_tokens):
    tables = {}

    def after(turn, requests, turns):
        read = [len(row.ids) + len(sampled.ids) - 1 for row, sampled in zip(requests, turns, strict=True)]
        rows = {request.row: size for request, size in zip(requests, read, strict=True)}
        assert all(ref() is None for row, refs in tables.items() if row not in rows for ref in refs)
        kept = {row: sampler.waiting[row].stored for row in sampler.waiting}
        assert kept
        assert (len(kept) == len(rows)) == (cache_tokens == 10**6)
        assert {row: stored.size for row, stored in kept.items()} == {row: rows[row] for row in kept}
        assert all(len(table) == stored.size for stored in kept.values() for table in stored.tables)
        assert sum(stored.size for stored in kept.values()) <= cache_tokens
        tables.update({row: [weakref.ref(table) for table in stored.tables] for row, stored in kept.items()})

    with engine_of(policy, cache_tokens=cache_tokens).turns(SAMPLING) as sampler:
        play(policy, sampler, after)
        assert any(ref() is not None for refs in tables.values() for ref in refs)
    assert not any(ref() is not None for refs in tables.values() for ref in refs)


@pytest.mark.parametrize("case", ["window", "generate"])
def test_engines_that_cannot_continue_read_all_tokens_again(case):
    """A window is shorter than the prompts; Transformers' `generate` draws other numbers, here none."""
    config = MistralConfig(**SIZES, sliding_window=6) if case == "window" else MODELS["qwen3"]()
    policy = policy_of(config, end_bias=4.0)
    sampling = Sampling(max_response_length=30, temperature=float(case == "window"))
    with engine_of(policy, method="generate" if case == "generate" else "compact").turns(sampling) as sampler:
        sample, stops = (sampler, read_again(policy, sampling)), STOPS if case == "window" else STOPS[:1]
        assert same(*(play(policy, how, stops=stops) for how in sample)) > len(PROMPTS)


def test_a_turn_has_room_if_its_own_ids_and_its_own_limit_have():
    policy = policy_of(Qwen3Config(**SIZES | {"max_position_embeddings": 64}))
    long, short = TurnRequest(0, PROMPTS[0], [30] * 58, 6, seed=1), TurnRequest(1, PROMPTS[1], [30] * 4, 50, seed=2)
    with engine_of(policy, method="generate").turns(SAMPLING) as sampler:  # Its calls have one limit for all rows.
        assert [len(turn.ids) <= r.limit for turn, r in zip(sampler([long, short]), [long, short], strict=True)]
        assert sampler([]) == []
    with engine_of(policy).turns(SAMPLING) as sampler:
        assert len(sampler([long, short])) == 2
        with pytest.raises(ValueError, match="prompt of 58 tokens and `max_response_length` 7 exceed"):
            sampler([long._replace(limit=7)])


# By turn and rank, the rows that go on. The second rank has fewer, and then none.
ROWS_OF_RANKS = [[range(8), range(3)], [range(6), range(2)], [(1, 4), ()], [(4,), ()]]


def _alone_and_together():
    """The ids that this rank samples, and in how many passes, for two sizes of the cache: by itself, and in step."""
    policy, passes = load_policy("arithmetic").double().eval(), []
    policy.model.register_forward_pre_hook(lambda *_: passes.append(1))
    rank = int(os.environ["RANK"])

    def sample(cache_tokens):
        passes.clear()
        ids, made = {row: policy.encode(PROMPTS[row].messages) for row in range(8)}, []
        with engine_of(policy, cache_tokens=cache_tokens).turns(SAMPLING) as sampler:
            for turn, rows in enumerate(ROWS_OF_RANKS):
                turns = sampler([request(row, turn + rank, ids[row]) for row in rows[rank]])
                made.append([sampled.ids for sampled in turns])
                for row, sampled in zip(rows[rank], turns, strict=True):
                    ids[row] = ids[row] + sampled.ids + observation(row, turn)
        return made, len(passes)

    sizes = (10**6, 90)
    alone = [sample(size) for size in sizes]
    with group():
        return list(zip(alone, [sample(size) for size in sizes], strict=True))


def test_ranks_with_uneven_turns_or_none_stay_in_step_and_draw_what_they_draw_alone():
    for (first, ours), (second, theirs) in zip(*on_ranks(_alone_and_together), strict=True):
        assert (first[0], second[0]) == (ours[0], theirs[0])
        assert ours[1] == theirs[1] >= first[1] > second[1], "the case must make one rank wait"
