"""Lists of options: a given one replaces the one before it, `+` adds to it, and a printed one can be given again."""

from pathlib import Path

import pytest
import yaml

from grail_lightning.app.cli.app import FitOptions
from tests.shell import main

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
ONE = {"path": "one.jsonl", "problem": "question", "answer": "final", "limit": 3}
TWO = {"path": "two.jsonl", "where": {"level": 1}}


@pytest.fixture(scope="module")
def options():
    return FitOptions()


@pytest.fixture
def given(options, tmp_path, monkeypatch):
    """The options of a fit that a run would save, of config files with these contents and of arguments."""
    monkeypatch.chdir(tmp_path)

    def saved(*parts):
        arguments = ["--config=configs/quickstart.yaml"]
        for number, part in enumerate(parts):
            if isinstance(part, dict):
                Path(f"{number}.yaml").write_text(yaml.safe_dump(part))
            arguments += [f"--config={number}.yaml"] if isinstance(part, dict) else part.split("\t")
        parsed = options.parse(arguments)
        return yaml.safe_load(options._cli._parser("fit").dump(parsed, skip_none=False))

    return saved


def math_data(**init_args):
    return {"data": {"class_path": "MathData", "init_args": init_args}}


def datasets(saved, split="train"):
    """What was given for each dataset, without the defaults."""
    default = {"problem": "problem", "answer": "answer", "split": "train", "weight": 1.0, "skip": 0}
    return [
        {name: value for name, value in spec.items() if value not in (None, default.get(name))}
        for spec in saved["data"]["init_args"][split]
    ]


@pytest.mark.parametrize(
    "second",
    [
        math_data(train=[{"path": "a.jsonl"}, {"path": "b.jsonl"}]),
        "--data.train\t[{path: a.jsonl}, b.jsonl]",
        "--data={class_path: MathData, init_args: {train: [{path: a.jsonl}, b.jsonl]}}",
    ],
)
def test_datasets_of_a_later_file_or_argument_have_no_columns_of_earlier_ones(given, second):
    found = given(math_data(train=[ONE, TWO]), second)["data"]["init_args"]["train"]
    assert [spec if isinstance(spec, str) else spec["path"] for spec in found] == ["a.jsonl", "b.jsonl"]
    for spec in (spec for spec in found if spec != "b.jsonl"):
        assert (spec["limit"], spec["where"], spec["problem"]) == (None, None, "problem")


def test_a_plus_sign_adds_a_dataset_in_a_file_and_as_an_argument(given):
    more = math_data(**{"train+": [{"path": "a.jsonl"}]})
    found = given(math_data(train=[ONE, TWO]), more, "--data.train+={path: b.jsonl, limit: 2}")
    assert datasets(found) == [ONE, TWO, {"path": "a.jsonl"}, {"path": "b.jsonl", "limit": 2}]


def test_rewards_and_callbacks_of_a_later_file_have_no_arguments_of_earlier_ones(given):
    def settings(reward, callback):
        task = {"class_path": "ArithmeticTask", "init_args": {"rewards": [reward]}}
        listed = [{"class_path": "LearningRateMonitor", "init_args": callback}]
        return {"data": {"class_path": "ArithmeticData", "init_args": {"task": task}}, "trainer": {"callbacks": listed}}

    overlong = {"function": "overlong", "arguments": {"limit": 9, "buffer": 3}, "weight": 2}
    first = settings(overlong, {"logging_interval": "step"})
    found = given(first, settings({"function": "correctness"}, {}))
    (reward,) = found["data"]["init_args"]["task"]["init_args"]["rewards"]
    assert (reward["weight"], reward["arguments"]) == (1.0, None)
    assert found["trainer"]["callbacks"][0]["init_args"]["logging_interval"] is None


def test_an_option_of_the_last_callback_of_a_list_keeps_the_others(given):
    found = given(
        {"trainer": {"callbacks": [{"class_path": "KeepRollouts"}]}},
        "--trainer.callbacks+=EarlyStopping",
        "--trainer.callbacks.monitor=val/accuracy",
        "--trainer.callbacks.patience=9",
    )["trainer"]["callbacks"]
    assert [callback["class_path"].rpartition(".")[2] for callback in found] == ["KeepRollouts", "EarlyStopping"]
    assert (found[1]["init_args"]["monitor"], found[1]["init_args"]["patience"]) == ("val/accuracy", 9)


@pytest.mark.parametrize("train", [[ONE, "two.jsonl", TWO], [ONE]])
def test_datasets_that_a_run_saves_can_be_given_again(given, train):
    first = given(math_data(train=train))
    assert given(first) == first
    assert [type(part) for part in first["data"]["init_args"]["train"]] == [type(part) for part in train]


def printed(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(["test", *arguments, "--print_config"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_the_benchmarks_and_one_more_are_printed_as_options_that_can_be_given(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = printed(capsys, "--config=configs/eval_math.yaml", f"--config={EXAMPLES / 'more_benchmarks.yaml'}")
    found = yaml.safe_load(said)["data"]["init_args"]["test"]
    assert [spec["name"] for spec in found][:6] == [
        *("aime24", "amc23", "college_math", "math500", "minerva_math", "olympiadbench")
    ]
    assert [(spec["path"], spec["problem"], spec["answer"]) for spec in found[6:]] == [
        ("owner/dataset", "question", "final_answer")
    ]
    Path("again.yaml").write_text(said)
    assert printed(capsys, "--config=again.yaml") == said
