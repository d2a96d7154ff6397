from functools import cache
from pathlib import Path

import pytest
from jsonargparse import ActionConfigFile
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningArgumentParser

from grail_lightning.data import ArithmeticData, CodeData, DatasetSpec, MathData, SearchData
from grail_lightning.environments.search import Search
from grail_lightning.tasks import FunctionSpace, ProblemSpace, SearchSpace, split_of
from tests.data.recorder import problems, rows, ten, write


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
        assert prompt.reference in prompt.columns["path"][-1]
        assert prompt.task.answer(f"So it is.\nAnswer: {prompt.reference}\n") == prompt.reference
        assert (prompt.task.compare, prompt.dataset, prompt.columns["hops"]) == ("text", "search", 2)


def test_functions_to_write_carry_their_tests(programs_run):
    data = CodeData(**SIZES, problems=FunctionSpace(5, 6))
    for prompt in held_out(data)[:3]:
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


@pytest.mark.parametrize("option", ["num_train", "num_val", "num_test", "prompts_per_batch", "eval_prompts_per_batch"])
def test_sizes_must_be_positive(option):
    with pytest.raises(ValueError, match=rf"`{option}` must lie in \[1, inf\), but got 0"):
        ArithmeticData(**{option: 0})


@cache
def _parser():
    """LightningCLI's parser of data modules."""
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action=ActionConfigFile)
    parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)
    return parser


def _parse(*args):
    """The data module that the parser makes of arguments."""
    return _parser().instantiate(_parser().parse_args(list(args))).data


def test_datasets_are_given_in_yaml_and_changed_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, rows(3), "a.jsonl")
    write(tmp_path, [{"q": "1+1?", "a": "2"}] * 2, "b.jsonl")
    Path("config.yaml").write_text(
        r"""
data:
  class_path: MathData
  init_args:
    train:
      - {path: a.jsonl, where: {level: {min: 1}}, weight: 3}
      - path: b.jsonl
        problem: q
        answer: a
    val: {path: b.jsonl, problem: q, answer: a, name: bench}
    task:
      class_path: MathTask
      init_args: {instruction: ' Box it: \boxed{}.', system_prompt: Be brief.}
    prompts_per_batch: 4
"""
    )
    first, second = DatasetSpec("a.jsonl", where={"level": {"min": 1}}, weight=3), DatasetSpec("b.jsonl", "q", "a")
    data = _parse("--config=config.yaml")
    assert data.specs["train"] == [first, second]
    assert data.specs["val"] == [DatasetSpec("b.jsonl", "q", "a", name="bench")]
    assert (data.task.instruction, data.task.system_prompt) == (r" Box it: \boxed{}.", "Be brief.")
    data.setup("fit")
    assert data.train_dataloader().shares == [3, 1]

    data = _parse("--config=config.yaml", "--data.val.limit=1", '--data.train=[{"path": "a.jsonl", "limit": 2}]')
    assert data.specs["train"] == [DatasetSpec("a.jsonl", limit=2)]
    assert data.specs["val"] == [DatasetSpec("b.jsonl", "q", "a", name="bench", limit=1)]

    for args in (
        ['--data.train={"path": "a.jsonl", "limit": 2}'],
        ["--data.train.path=a.jsonl", "--data.train.limit=2"],
        ['--data.train+={"path": "a.jsonl", "limit": 2}'],
    ):
        assert _parse("--data=MathData", *args).specs["train"] == [DatasetSpec("a.jsonl", limit=2)]


CONTENTS = {
    "array.json": '[{"problem": "1+1?", "answer": "2"}]',
    "row.jsonl": '{"problem": "1+1?", "answer": "2"}',
    "rows.jsonl": '{"problem": "1+1?", "answer": "2"}\n{"problem": "1+2?", "answer": "3"}',
    "paths.json": '["a.jsonl", "b.jsonl"]',
    "name.parquet": "owner/name",
}


@pytest.mark.parametrize("file", CONTENTS)
@pytest.mark.parametrize(
    "args",
    [
        ["--data=MathData", "--data.train={}"],
        ["--data=MathData", "--data.train=[{}]"],
        ["--data=MathData", "--data.train+={}"],
        ["--data=MathData", "--data.train.path={}"],
        ["--config=whole.yaml"],
        ["--data=part.yaml"],
    ],
)
def test_the_path_of_a_dataset_is_a_path_whatever_the_file_holds(file, args, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(file).write_text(CONTENTS[file])
    given = f"class_path: MathData, init_args: {{train: {file}}}"
    Path("part.yaml").write_text(f"{{{given}}}")
    Path("whole.yaml").write_text(f"data: {{{given}}}")
    assert _parse(*[arg.format(file) for arg in args]).specs["train"] == [DatasetSpec(file)]
    path = Path(file)
    assert MathData(train=path).specs == MathData(train=[path]).specs == MathData(train=file).specs
