import itertools
import json
from collections import Counter

import pytest

from grail_lightning import Prompt
from grail_lightning.core.data.loaders import EvaluationLoader, GivenLoader, PromptSet, TrainingLoader, draws_per_epoch
from grail_lightning.core.engines.base import given_batch
from tests.core.data.recorder import flat, names, prompts
from tests.runs import TASK


def _loader(num_prompts=10, prompts_per_batch=4, **options):
    return TrainingLoader([PromptSet("a", prompts(num_prompts))], prompts_per_batch, **options)


def test_the_order_is_a_function_of_seed_and_epoch_wherever_a_pass_stops():
    first, parts, other = _loader(seed=1), _loader(seed=1), _loader(seed=2)
    epochs = [names(first) for _ in range(2)]
    assert [len(batch) for batch in epochs[0]] == [4, 4, 2], "the incomplete last batch is kept"
    assert len(first) == 3
    seen = []
    for stop in (2, 3, 1):  # crosses the border between the epochs, as `limit_train_batches` makes it
        seen += names(itertools.islice(parts, stop))
    assert seen == epochs[0] + epochs[1]
    assert epochs[0] != epochs[1]
    assert epochs[0] != names(other)
    assert sorted(flat(epochs[1])) == sorted(flat(names(other))) == sorted(str(n) for n in range(10))


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("consumed", [0, 1, 2, 3, 4])
def test_a_restored_loader_continues_with_the_next_batch(consumed, mixed):
    def made():
        sets = [PromptSet("a", prompts(7, "a"), 2.0), PromptSet("b", prompts(5, "b"), 1.0)]
        return TrainingLoader(sets, 4) if mixed else _loader()

    whole, begun, resumed = made(), made(), made()
    expected = names(whole) + names(whole) + names(whole)
    stream = itertools.chain.from_iterable(iter(begun) for _ in range(2))
    assert names(itertools.islice(stream, consumed)) == expected[:consumed]
    resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    assert names(resumed) == expected[consumed : consumed + 3]


@pytest.mark.parametrize("options", [{}, {"rank": 1, "world_size": 2}], ids=["one", "two"])
def test_peeking_shows_the_next_batch_and_moves_nothing(options):
    """Also at the end of an epoch, and behind prompts that were taken from one."""
    loader, other = _loader(10, 4, **options), _loader(10, 4, **options)
    for taken in (0, 0, 0, 2, 0, 0):
        loader.take(taken), other.take(taken)
        shown = loader.peek()
        assert (loader.epoch, loader.offset) == (other.epoch, other.offset)
        assert names([shown]) == names([next(iter(loader))]) == names([next(iter(other))])


def test_a_position_holds_for_another_batch_size_and_another_number_of_ranks():
    order = flat(names(_loader(12, 4)))
    loader = _loader(12, 4)
    next(iter(loader))
    halves = [_loader(12, 6, rank=rank, world_size=2) for rank in range(2)]
    for half in halves:
        half.load_state_dict(loader.state_dict())
    batches = [names([next(iter(half))])[0] for half in halves]
    assert sorted(flat(batches)) == sorted(order[4:10])


def test_other_data_than_those_of_the_checkpoint_start_their_order_anew_and_say_so():
    loader, changed = _loader(10, 4), _loader(11, 4)
    list(loader), next(iter(loader))
    with pytest.warns(UserWarning, match=r"not those of the checkpoint: shares \[10\] became \[11\]. Epoch 1 starts"):
        changed.load_state_dict(loader.state_dict())
    assert (changed.epoch, changed.offset) == (1, 0)


@pytest.mark.parametrize(("num_prompts", "world_size"), [(12, 2), (10, 3), (9, 4)])
def test_ranks_share_each_batch_without_overlap_and_have_equally_many_batches(num_prompts, world_size):
    alone = _loader(num_prompts, 4)
    ranks = [_loader(num_prompts, 4, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert len({len(loader) for loader in ranks}) == 1
    shared = [names(loader) for loader in ranks]
    assert all(batch for rank in shared for batch in rank), "no rank may be without work"
    together = [sorted(flat(parts)) for parts in zip(*shared, strict=True)]
    # A last batch with fewer prompts than ranks is left out (10 = 4 + 4 + 2 on 3 ranks, 9 = 4 + 4 + 1 on 4).
    assert together == [sorted(batch) for batch in names(alone) if len(batch) >= world_size]


def test_too_few_prompts_for_the_ranks_or_a_weight_that_never_counts_is_an_error():
    with pytest.raises(ValueError, match="`prompts_per_batch` must hold at least one prompt for each of the 8 ranks"):
        _loader(100, 4, world_size=8)
    with pytest.raises(ValueError, match=r"The training data must hold at least one .* 4 ranks, but got 3"):
        _loader(3, 4, world_size=4)
    with pytest.raises(ValueError, match="`weight` of tiny must give it at least one of the 10 draws"):
        TrainingLoader([PromptSet("a", prompts(9)), PromptSet("tiny", prompts(1), weight=0.01)], 2)


def test_a_mixture_draws_in_proportion_to_weights_and_no_prompt_comes_back_before_the_others_of_its_set():
    sets = [PromptSet("a", prompts(30, "a"), weight=3.0), PromptSet("b", prompts(10, "b"), weight=1.0)]
    assert draws_per_epoch(sets) == [30, 10]
    thirds = [PromptSet(name, prompts(5)) for name in "abc"]
    assert sum(draws_per_epoch([*thirds, PromptSet("d", prompts(2))])) == 17  # 4.25 each: one gets the fifth
    loader = TrainingLoader([PromptSet("a", prompts(12, "a")), PromptSet("b", prompts(4, "b"))], 4)
    epochs = [flat(names(loader)) for _ in range(3)]  # 16 draws, 8 of each set: 24 are two rounds of a, six of b
    assert max(times for name, times in Counter(epochs[0]).items() if name[0] == "a") == 1
    rounds = {f"a{n}": 2 for n in range(12)} | {f"b{n}": 6 for n in range(4)}
    assert Counter(flat(epochs)) == rounds


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_evaluation_shows_every_problem_once_with_ranks_in_step(world_size):
    loaders = [EvaluationLoader(prompts(9), 4, rank, world_size) for rank in range(world_size)]
    assert {len(loader) for loader in loaders} == {len(list(loader)) for loader in loaders} == {3}  # 4 + 4 + 1
    seen = [name for loader in loaders for batch in names(loader) for name in batch]
    assert sorted(seen) == sorted(str(n) for n in range(9))
    if world_size > 1:
        assert names(loaders[-1])[-1] == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_further_prompts_are_the_next_ones_also_beyond_an_epoch_and_batches_stay_whole(world_size):
    """40 prompts in batches of 8; each batch takes 6 more: the stream is the same, and no batch is a small rest."""
    loaders = [_loader(40, 8, seed=3, rank=rank, world_size=world_size) for rank in range(world_size)]
    alone = _loader(40, 8, seed=3)
    order = [name for _ in range(4) for name in flat(names(alone))]
    place = 0
    for batches in zip(*loaders, strict=True):
        more = [loader.take(6) for loader in loaders]
        for parts, size in ((batches, 8), (more, 6)):
            assert sum(len(part) for part in parts) == size
            assert sorted(flat(names(parts))) == sorted(order[place : place + size])
            place += size
    assert place == 5 * 14


def given(name, group=None):
    """A prompt with a response."""
    columns = {"response": "1", "response_group": group}
    return Prompt(messages=name, reference="1", task=TASK, columns=columns)


@pytest.mark.parametrize("world_size", [1, 2])
def test_given_responses_of_one_group_stay_in_one_batch_on_one_rank(world_size):
    """Those of one prompt, unless a column says which; prompts without a response are groups of one."""
    rows = [given("a")] * 3 + [given("b")] * 2 + [given("c", 0)] * 2 + [given("c", 1)] * 2 + [given("d")]
    loaders = [GivenLoader(rows, 5, rank, world_size) for rank in range(world_size)]
    whole = [["a", "a", "a", "b", "b"], ["c", "c", "c", "c", "d"]]
    parts = [[["a", "a", "a"], ["c", "c", "d"]], [["b", "b"], ["c", "c"]]]
    assert [names(loader) for loader in loaders] == ([whole] if world_size == 1 else parts)
    assert {len(loader) for loader in loaders} == {2}
    assert [len(batch) for batch in GivenLoader(prompts(9), 4)] == [4, 4, 1]


@pytest.mark.parametrize("columns", [{}, {"response": None}, {"response": [{"role": "assistant"}]}])
def test_a_given_response_that_is_no_text_is_an_error(columns):
    """The batch would be sampled where one is missing, and "None" be graded."""
    rows = [given("a"), Prompt(messages="b", reference="1", task=TASK, columns=columns, dataset="d")]
    with pytest.raises(ValueError, match=r"`response` must be text in every row of .* but in prompt 2 of 2 it is"):
        GivenLoader(rows, 5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_groups_that_prompts_imply_are_at_most_a_batch_and_the_same_on_any_number_of_ranks(world_size, arithmetic):
    assert [len(batch) for batch in GivenLoader([given("a")] * 10, 4)] == [4, 4, 2]
    for rank in range(world_size):
        (batch,) = GivenLoader([given(name) for name in "ABABABAB"], 8, rank, world_size)
        assert len(set(given_batch(arithmetic, batch).group.tolist())) == len(batch)
