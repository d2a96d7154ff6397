"""Worked examples before each question, and training prompts from easy to hard."""

import itertools
from types import SimpleNamespace

import pytest

from grail_lightning import ArithmeticData, Curriculum, DatasetSpec, FewShot, MathData, MathTask, WordProblemData
from grail_lightning.answers import LastNumber, Marker
from grail_lightning.core.data.loaders import PromptSet, TrainingLoader, easy_first
from grail_lightning.core.data.modules import _overfitted
from grail_lightning.core.data.rows import Example, with_examples
from tests.core.data.recorder import write

# ---- worked examples

SOLVED = [
    {"problem": f"{k}+{k}?", "answer": str(2 * k), "solution": f"{k} + {k} = {2 * k}\n#### {2 * k}"} for k in range(6)
]
TASK = MathTask(answer=Marker(), instruction=" Work it out.", system_prompt="Be brief.")


def load(split="train", rows=SOLVED, task=TASK, val=None, **options):
    return MathData(train=rows, val=val, task=task, few_shot=FewShot(**options)).load(split)[0].prompts


def test_examples_are_turns_before_the_question_and_their_rows_are_left_out(tmp_path):
    same = write(tmp_path, SOLVED)
    with pytest.warns(UserWarning, match=r"^2 of the 6 rows of train are left out of `data\.val`"):
        evaluated = load("val", rows=same, val=same)
    for prompts in (load(), load(rows=same), evaluated):
        assert prompts[0].messages == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "0+0? Work it out."},
            {"role": "assistant", "content": "0 + 0 = 0\n#### 0"},
            {"role": "user", "content": "1+1? Work it out."},
            {"role": "assistant", "content": "1 + 1 = 2\n#### 2"},
            {"role": "user", "content": "2+2? Work it out."},
        ]
        assert [prompt.reference for prompt in prompts] == ["4", "6", "8", "10"]


def test_examples_as_text_need_no_chat_template():
    task = MathTask(answer=Marker(), instruction="")
    prompts = load(task=task, number=1, style="text", template="Q: {problem}\nA: {solution}")
    assert prompts[0].messages == "Q: 0+0?\nA: 0 + 0 = 0\n#### 0\n\nQ: 1+1?\nA:"
    # Texts are not searched for the names of the template.
    prompt = MathTask(instruction="").prompt({"problem": "What is {solution} in {problem}?", "answer": "2"})
    made = with_examples(prompt, [Example("Say {problem}", "{solution} {problem}")], FewShot(number=1, style="text"))
    assert made.messages == "Say {problem}\n{solution} {problem}\n\nWhat is {solution} in {problem}?\n"


def test_another_dataset_may_hold_the_examples(tmp_path):
    """Which may have the same problems: no prompt has its own solution."""
    prompts = load(number=1, dataset=DatasetSpec(write(tmp_path, SOLVED), where={"answer": "10"}))
    assert prompts[0].messages[1]["content"] == "5+5? Work it out."
    assert [prompt.reference for prompt in prompts] == ["0", "2", "4", "6", "8"]


UNANSWERED, WRONG = ([SOLVED[0] | {"solution": solution}, *SOLVED] for solution in ("It is 0.", "#### 3"))


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (SOLVED, {"number": 7}, "`few_shot.number` must not exceed the 6 rows"),
        (SOLVED, {"number": 6}, "All rows of .* serve as worked examples"),
        (SOLVED, {"solution": "proof"}, r"row 1: the column `proof` \(`few_shot.solution`\) must be a text"),
        (UNANSWERED, {}, r"row 1: .* that ends with the answer '0'.*got the answer None in 'It is 0.'"),
        (WRONG, {}, r"ends with the answer '0'.*got the answer '3'"),
        (SOLVED, {"style": "poem"}, "`few_shot.style` must be one of turns, text"),
        (SOLVED, {"template": "{solution}{problem}"}, r"must contain \{problem\} and after it \{solution\}"),
        (SOLVED, {"dataset": "nowhere.jsonl"}, "nowhere.jsonl"),
        (None, {}, "`few_shot.dataset` must name the dataset"),
    ],
)
def test_examples_that_cannot_be_are_an_error_before_training(rows, options, message):
    with pytest.raises(ValueError, match=message):
        load("train" if rows else "val", rows=rows, val=SOLVED, **options)


def test_an_answer_that_is_text_is_compared_as_text_and_prompts_that_are_text_take_no_turns():
    rows = [{"problem": f"Capital {k}?", "answer": "Paris", "solution": "#### PARIS"} for k in range(3)]
    task = MathTask(answer=Marker(), instruction="", compare="text")
    assert load(rows=rows, task=task, number=1)[0].reference == "Paris"
    prompt = ArithmeticData(num_train=1).load("train")[0].prompts[0]
    with pytest.raises(ValueError, match=r"`few_shot.style: turns` needs prompts that are conversations"):
        with_examples(prompt, [Example("Compute 1+1.", "1+1=2")], FewShot())


def test_generated_word_problems_have_solutions_that_serve_as_examples():
    for task in (None, MathTask(answer=LastNumber())):
        data = WordProblemData(num_train=20, num_val=5, few_shot=FewShot(number=3), task=task)
        train, val = data.load("train")[0].prompts, data.load("val")[0].prompts
        assert (len(train), len(val), len(train[0].messages)) == (17, 5, 7)
        assert train[0].messages[:6] == val[0].messages[:6]


# ---- a curriculum

LEVELS = [{"problem": f"{k}+{k}?", "answer": str(2 * k), "level": k % 5} for k in range(50)]


def loader(rows=LEVELS, **options):
    data = MathData(
        train=rows, prompts_per_batch=4, curriculum=Curriculum(**{"column": "level", "batches": 10} | options)
    )
    data.setup("fit")
    return data.train_dataloader()


def stream(made):
    return itertools.chain.from_iterable(iter(made) for _ in range(4))


def levels(batch):
    return [prompt.columns["level"] for prompt in batch]


def test_the_share_of_problems_grows_from_the_easiest_to_all():
    batches = list(itertools.islice(stream(loader()), 36))
    assert levels(batches[0]) == [0, 0, 0, 0]
    for number, batch in enumerate(batches[:10]):
        assert max(levels(batch)) <= 5 * (0.2 + 0.8 * (number + 1) / 10)  # of ten problems a level
    assert max(level for batch in batches[:10] for level in levels(batch)) >= 3
    epoch = [prompt.reference for batch in batches[10:] for prompt in batch][:50]
    assert sorted(map(int, epoch)) == [2 * k for k in range(50)]  # then ordinary epochs


def test_the_order_of_a_curriculum():
    for start in (0.3, 1.0):  # No problem is drawn twice before all of the share.
        order = [index for _, index in easy_first([[0.0] * 5 + [1.0] * 5], [1], draws=20, start=start, seed=3)]
        assert len(set(order[:3])) == 3
        assert start < 1 or sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    first, again, other = (easy_first([[0.0, 1.0] * 20], [1], draws=20, start=0.5, seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    drawn = easy_first([[0.0] * 100, [0.0] * 100], [1, 3], draws=4000, start=0.5, seed=0)
    assert 0.7 < sum(which for which, _ in drawn) / 4000 < 0.8  # Sets are mixed by their weights.


@pytest.mark.parametrize("stop", [3, 10, 12])
def test_a_resumed_curriculum_continues_at_its_position_on_any_number_of_ranks(stop):
    whole, *halves = loader(), loader(), loader()
    batches = stream(whole)
    assert len(list(itertools.islice(batches, stop))) == stop
    for rank, half in enumerate(halves):
        half.rank, half.world_size = rank, 2
        half.load_state_dict(whole.state_dict())
    shares = zip(*map(stream, halves), strict=True)
    for together, (left, right) in itertools.islice(zip(batches, shares, strict=False), 6):
        assert sorted(levels(together)) == sorted(levels(left) + levels(right))


def test_a_changed_curriculum_starts_anew_with_a_warning():
    first = loader()
    next(iter(first))
    changed, plain = loader(batches=20), TrainingLoader(first.sets, 4, first.seed)
    with pytest.warns(UserWarning, match=r"curriculum .* became .*The curriculum starts anew"):
        changed.load_state_dict(first.state_dict())
    with pytest.warns(UserWarning, match=r"Epoch 0 starts anew"):
        plain.load_state_dict(first.state_dict())
    assert [(made.epoch, made.offset) for made in (changed, plain)] == [(-1, 0), (0, 0)]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (LEVELS, {"column": "hard"}, r"row 1: `hard` must be a finite number.*The columns are: problem, answer, level"),
        ([*LEVELS, LEVELS[0] | {"level": "hard"}], {}, r"row 51: `level` must be a finite number.*but got 'hard'"),
        ([*LEVELS, LEVELS[0] | {"level": True}], {}, r"but got True"),
        (LEVELS, {"start": 20}, r"`curriculum.start` must lie in \(0, 1\], but got 20"),
    ],
)
def test_a_curriculum_that_cannot_be_is_an_error_before_training(rows, options, message):
    with pytest.raises(ValueError, match=message):
        loader(rows, **options)


def test_overfitted_batches_are_those_of_all_datasets_together():
    for weights, number in (((3, 1), [6, 2]), ((1, 1, 1), [3, 2, 3]), ((1, 30), [8])):
        sets = [PromptSet(str(k), [*"abcdefgh"], float(weight), range(8)) for k, weight in enumerate(weights)]
        kept = _overfitted(sets, SimpleNamespace(overfit_batches=2), 4)
        assert [len(part.prompts) for part in kept] == [len(part.difficulty) for part in kept] == number
