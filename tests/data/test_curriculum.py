"""Training prompts from easy to hard."""

import itertools

import pytest

from grail_lightning.data import Curriculum, MathData, PromptSet, TrainingLoader
from grail_lightning.data.curriculum import easy_first
from tests.data.recorder import write

ROWS = [{"problem": f"{k}+{k}?", "answer": str(2 * k), "level": k % 5} for k in range(50)]


def loader(tmp_path, rows=ROWS, **options):
    curriculum = Curriculum(**({"column": "level", "batches": 10} | options))
    data = MathData(train=write(tmp_path, rows), prompts_per_batch=4, curriculum=curriculum)
    data.setup("fit")
    return data.train_dataloader()


def levels(batch):
    return [prompt.columns["level"] for prompt in batch]


def test_the_share_of_problems_grows_from_the_easiest_to_all(tmp_path):
    made = loader(tmp_path)
    batches = list(itertools.islice(itertools.chain.from_iterable(iter(made) for _ in range(4)), 36))
    assert levels(batches[0]) == [0, 0, 0, 0]
    for number, batch in enumerate(batches[:10]):
        reach = 0.2 + 0.8 * (number + 1) / 10  # of ten problems a level
        assert max(levels(batch)) <= 5 * reach
    assert max(level for batch in batches[:10] for level in levels(batch)) >= 3
    epoch = [prompt.reference for batch in batches[10:] for prompt in batch][:50]
    assert sorted(map(int, epoch)) == [2 * k for k in range(50)]  # then ordinary epochs


def test_no_problem_is_drawn_twice_before_all_of_the_share():
    for start in (0.3, 1.0):
        order = [index for _, index in easy_first([[0.0] * 5 + [1.0] * 5], [1], draws=20, start=start, seed=3)]
        assert len(set(order[:3])) == 3
        assert start < 1 or sorted(order[:10]) == sorted(order[10:]) == list(range(10))


def test_the_order_is_a_function_of_the_seed(tmp_path):
    first, again, other = (easy_first([[0.0, 1.0] * 20], [1], draws=20, start=0.5, seed=seed) for seed in (0, 0, 1))
    assert first == again != other


def test_sets_are_mixed_by_their_weights():
    drawn = easy_first([[0.0] * 100, [0.0] * 100], [1, 3], draws=4000, start=0.5, seed=0)
    assert 0.7 < sum(which for which, _ in drawn) / 4000 < 0.8


@pytest.mark.parametrize("stop", [3, 10, 12])
def test_a_resumed_run_continues_at_its_position(stop, tmp_path):
    whole = loader(tmp_path)
    batches = itertools.chain.from_iterable(iter(whole) for _ in range(3))
    head = [next(batches) for _ in range(stop)]
    state = whole.state_dict()
    tail = [next(batches) for _ in range(6)]
    resumed = loader(tmp_path)
    resumed.load_state_dict(state)
    again = itertools.chain.from_iterable(iter(resumed) for _ in range(3))
    assert [levels(next(again)) for _ in range(6)] == [levels(batch) for batch in tail]
    assert head


def test_a_changed_curriculum_starts_anew_with_a_warning(tmp_path):
    first = loader(tmp_path)
    next(iter(first))
    changed = loader(tmp_path, batches=20)
    with pytest.warns(UserWarning, match=r"curriculum .* became .*The curriculum starts anew"):
        changed.load_state_dict(first.state_dict())
    assert (changed.epoch, changed.offset) == (-1, 0)
    data = MathData(train=write(tmp_path, ROWS), prompts_per_batch=4)
    data.setup("fit")
    plain = data.train_dataloader()
    with pytest.warns(UserWarning, match=r"Epoch 0 starts anew"):
        plain.load_state_dict(first.state_dict())
    assert (plain.epoch, plain.offset) == (0, 0)


def test_ranks_share_the_batches_of_a_curriculum():
    prompts = [f"prompt {k}" for k in range(20)]
    sets = [PromptSet("a", prompts, 1.0, [float(k) for k in range(20)])]
    one, *two = (
        TrainingLoader(sets, 4, 0, rank, ranks, Curriculum("x", 3)) for rank, ranks in ((0, 1), (0, 2), (1, 2))
    )
    for together, left, right in itertools.islice(zip(one, *two, strict=True), 3):
        assert sorted(together) == sorted(left + right)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            ROWS,
            {"column": "hardness"},
            r"line 1: `hardness` must be a finite number.*The columns are: problem, answer, level",
        ),
        ([*ROWS, ROWS[0] | {"level": "hard"}], {}, r"line 51: `level` must be a finite number.*but got 'hard'"),
        ([*ROWS, ROWS[0] | {"level": True}], {}, r"but got True"),
        (ROWS, {"batches": 0}, r"`curriculum.batches` must be at least 1, but got 0"),
        (ROWS, {"start": 0}, r"`curriculum.start` must be above 0 and at most 1, but got 0"),
    ],
)
def test_a_curriculum_that_cannot_be_is_an_error_before_training(rows, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        loader(tmp_path, rows=rows, **options)


def test_overfitting_keeps_the_difficulty_of_the_prompts_it_keeps():
    prompts = PromptSet("a", ["x", "y", "z"], 1.0, [1.0, 2.0, 3.0]).first(2)
    assert (list(prompts.prompts), list(prompts.difficulty)) == (["x", "y"], [1.0, 2.0])
