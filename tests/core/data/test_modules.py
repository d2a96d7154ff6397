from pathlib import Path

import pytest
from jsonargparse import ActionConfigFile
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningArgumentParser

from grail_lightning import ArithmeticData, CodeData, DatasetSpec, MathData, SearchData
from grail_lightning.worlds.code.functions import FunctionSpace
from grail_lightning.worlds.search.environment import Search
from grail_lightning.worlds.search.task import SearchSpace
from grail_lightning.worlds.splits import split_of
from grail_lightning.worlds.sums.task import ProblemSpace
from tests.core.data.recorder import problems, ten


def held_out(data):
    """The prompts of a batch of validation; the problems of training, validation and test are disjoint."""
    for stage in ("fit", "validate", "test", "predict"):
        data.setup(stage)
    loaders = data.train_dataloader(), data.val_dataloader()[0], data.test_dataloader()[0]
    splits = [problems(loader) for loader in loaders]
    assert [len(split) for split in splits] == [60, 30, 20]
    assert len({problem for split in splits for problem in split}) == 110
    assert problems(data.predict_dataloader()[0]) == splits[2]
    return next(iter(loaders[1]))


SIZES = {"num_train": 60, "num_val": 30, "num_test": 20, "prompts_per_batch": 20}


def test_arithmetic_carries_what_step_labels_need():
    first, *others = held_out(ArithmeticData(**SIZES, problems=ProblemSpace(min_terms=3, max_terms=3)))
    assert {split_of(prompt.columns["problem"]) for prompt in (first, *others)} == {"validation"}
    assert first.dataset == "arithmetic"
    assert [step.kind for step in first.task.label_steps(f"{first.columns['problem'][:3]}=99", first)] == ["slip"]


def test_search_questions_carry_what_the_environment_needs():
    for prompt in held_out(SearchData(**SIZES, problems=SearchSpace(max_hops=2))):
        environment = Search()
        environment.reset(**prompt.columns)
        assert prompt.columns["path"][0] in environment.search(prompt.columns["path"][0])
        assert prompt.messages == [{"role": "user", "content": prompt.columns["problem"]}]
        assert prompt.task.answer(f"So it is.\nAnswer: {prompt.reference}\n") == prompt.reference
        assert (prompt.task.compare, prompt.dataset, prompt.columns["hops"]) == ("text", "search", 2)


def test_functions_to_write_carry_their_tests(programs_run):
    data = CodeData(**SIZES, problems=FunctionSpace(5, 6))
    prompt, *_ = held_out(data)
    assert prompt.messages == [{"role": "user", "content": prompt.columns["problem"]}]
    assert (prompt.dataset, prompt.columns["statements"] in (5, 6)) == ("functions", True)
    (verdict,) = prompt.task.verdicts([f"```\n{prompt.reference}\n```"], [prompt])
    assert verdict.correct
    data.task.executor.close()


def test_the_seed_of_the_run_moves_the_order_of_training_problems_and_nothing_else(monkeypatch):
    def drawn(seed):
        monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
        data = ten()
        data.setup("fit")
        return problems(data.train_dataloader()), problems(data.val_dataloader()[0])

    (train, val), (other_train, other_val) = drawn(1), drawn(2)
    assert (sorted(train), val) == (sorted(other_train), other_val)
    assert train != other_train
    assert drawn(1) == (train, val)


def test_the_size_of_a_batch_may_change_after_setup_as_a_finder_of_lightning_changes_it():
    data = ArithmeticData(**SIZES)
    data.setup("fit")
    data.prompts_per_batch = 30
    assert [len(batch) for batch in data.train_dataloader()] == [30, 30]


@pytest.mark.parametrize("option", ["num_test", "prompts_per_batch", "eval_prompts_per_batch"])
def test_sizes_must_be_positive(option):
    with pytest.raises(ValueError, match=rf"`{option}` must lie in \[1, inf\), but got 0"):
        ArithmeticData(**{option: 0})


@pytest.mark.parametrize(
    ("file", "content", "arguments"),
    [
        ("array.json", '[{"problem": "1+1?", "answer": "2"}]', ["--data=MathData", "--data.train={}"]),
        ("row.jsonl", '{"problem": "1+1?", "answer": "2"}', ["--data=MathData", "--data.train=[{}]"]),
        ("row.jsonl", '{"problem": "1+1?", "answer": "2"}', ["--config=whole.yaml"]),
        ("paths.json", '["a.jsonl", "b.jsonl"]', ["--data=MathData", "--data.train+={}"]),
        ("paths.json", '["a.jsonl", "b.jsonl"]', ["--data=part.yaml"]),
        ("name.parquet", "owner/name", ["--data=MathData", "--data.train.path={}"]),
        ("name.parquet", "owner/name", ["--data=MathData", "--data.train={}"]),
    ],
)
def test_the_path_of_a_dataset_is_a_path_whatever_the_file_holds(file, content, arguments, empty_folder):
    Path(file).write_text(content)
    given = f"class_path: MathData, init_args: {{train: {file}}}"
    Path("part.yaml").write_text(f"{{{given}}}")
    Path("whole.yaml").write_text(f"data: {{{given}}}")
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action=ActionConfigFile)
    parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)
    parsed = parser.parse_args([argument.format(file) for argument in arguments])
    assert parser.instantiate(parsed).data.specs["train"] == [DatasetSpec(file)]
    path = Path(file)
    assert MathData(train=path).specs == MathData(train=[path]).specs == MathData(train=file).specs
