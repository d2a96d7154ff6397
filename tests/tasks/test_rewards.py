import math
import sys
import textwrap

import pytest
from jsonargparse import ArgumentParser

from grail_lightning.answers import Verdict
from grail_lightning.data import MathData
from grail_lightning.data.modules import PromptData
from grail_lightning.tasks import ArithmeticTask
from grail_lightning.tasks.base import Task
from grail_lightning.tasks.math import MathTask
from grail_lightning.tasks.rewards import RewardSpec, boxed_format, correctness, overlong

SOURCE = """
    seen = {}

    def brevity(responses, references, **columns):
        seen.update(columns, responses=responses, references=references)
        return [1.0 / (1 + len(text)) for text in responses]

    def by_level(responses, references, level, factor=1):
        return [None if here is None else factor * here for here in level]

    def raises(responses, references):
        return [1 / len(text) for text in responses]

    def too_few(responses, references):
        return [1.0]

    def not_a_number(responses, references):
        return [float("nan") if text == "b" else 0.0 for text in responses]

    def one_number(responses, references):
        return 1.0

    def words(responses, references):
        return ["good" for _ in responses]

    constant = 3
"""


@pytest.fixture(autouse=True)
def mypkg(tmp_path, monkeypatch):
    """A user's module on the path."""
    (tmp_path / "userrewards.py").write_text(textwrap.dedent(SOURCE))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("userrewards", None)


def verdict(correct):
    status = "right" if correct else "wrong"
    return Verdict(correct=correct, status=status, layer="number", gold="2", prediction="")


def earned(specs, texts, correct=None, rows=None, lengths=None):
    task = MathTask(rewards=[RewardSpec(**spec) for spec in specs])
    rows = rows or [{}] * len(texts)
    prompts = [task.prompt({"problem": "1+1", "answer": "2"} | row) for row in rows]
    verdicts = [verdict(right) for right in correct or [False] * len(texts)]
    return task.reward(texts, prompts, verdicts, lengths)


def test_several_rewards_add_up_with_their_weights():
    specs = [{"function": "correctness", "weight": 2.0}, {"function": "userrewards.brevity", "weight": -0.5}]
    # 2*1 - 0.5/(1+1) and 2*0 - 0.5/(1+3)
    assert earned(specs, ["a", "abc"], [True, False]) == [1.75, -0.125]


def test_without_rewards_a_right_answer_earns_one():
    assert MathTask(rewards=[]).rewards[0].path == "correctness"
    prompts = [MathTask().prompt({"problem": "p", "answer": "2"})] * 2
    assert MathTask().reward(["", ""], prompts, [verdict(True), verdict(False)]) == [1.0, 0.0]


def test_the_values_before_weighting_have_the_names_of_the_rewards():
    task = MathTask(
        rewards=[
            RewardSpec(function="correctness", weight=7.0),
            RewardSpec(function="userrewards.by_level", weight=0.5, arguments={"factor": 10}, name="hard"),
        ]
    )
    prompts = [task.prompt({"problem": "p", "answer": "2", "level": level}) for level in (3, None)]
    values = task.reward_values(["", ""], prompts, [verdict(True), verdict(True)])
    assert values == {"correctness": [1.0, 1.0], "hard": [30.0, None]}
    # 7 + 0.5*30; None is no opinion: 7
    assert task.reward(["", ""], prompts, [verdict(True), verdict(True)]) == [22.0, 7.0]


def test_a_function_sees_the_columns_of_all_rows_and_the_verdicts():
    rows = [{"level": 1, "lengths": "not ours"}, {"source": "x", "references": "not ours"}]
    earned([{"function": "userrewards.brevity"}], [r"\boxed{2}", "no"], [True, False], rows, lengths=[5, 6])
    seen = sys.modules["userrewards"].seen
    assert seen["responses"] == [r"\boxed{2}", "no"]
    assert seen["references"] == ["2", "2"]
    assert seen["correct"] == [True, False]
    assert seen["status"] == ["right", "wrong"]
    assert seen["answers"] == ["2", None]
    assert seen["lengths"] == [5, 6]
    assert seen["level"] == [1, None]
    assert seen["source"] == [None, "x"]


def test_the_format_is_a_complete_box_with_nothing_behind_it():
    texts = [r"So \boxed{1}", r"So $\boxed{\frac{1}{2}}$. ", r"\[\boxed{1}\]", r"\boxed{}"]
    assert boxed_format(texts, [""] * 4) == [1.0] * 4
    texts = ["1", r"\boxed{1", r"\boxed{1} or 2", r"\boxed{1} and \boxed{2", ""]
    assert boxed_format(texts, [""] * 5) == [0.0] * 5


def test_the_correctness_reward_is_one_or_zero():
    assert correctness(["", ""], ["", ""], correct=[True, False]) == [1.0, 0.0]


def test_the_overlong_penalty_is_a_slope_between_buffer_and_limit():
    # limit 100, buffer 20: free up to 80, then 1/20 a token, -1 at 100 and behind
    lengths = [1, 80, 81, 90, 100, 150]
    values = overlong([""] * 6, [""] * 6, lengths=lengths, limit=100, buffer=20)
    assert values == pytest.approx([0.0, 0.0, -0.05, -0.5, -1.0, -1.0])


def test_the_overlong_penalty_counts_tokens_and_says_so_when_nobody_counted():
    spec = {"function": "overlong", "arguments": {"limit": 10, "buffer": 4}}
    assert earned([spec], ["a", "b"], lengths=[6, 8]) == [0.0, -0.5]
    with pytest.raises(ValueError, match=r"`overlong` raised TypeError: .*'lengths'"):
        earned([spec], ["a", "b"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"limit": 10, "buffer": 11}, r"`buffer` must lie between 1 and `limit` \(10\) tokens, but got 11"),
        ({"limit": 10, "buffer": 0}, "tokens, but got 0"),
        ({"limit": 10}, "missing 1 required keyword-only argument: 'buffer'"),
        ({"limit": "ten", "buffer": 4}, "not supported between instances"),
        (None, "missing 2 required keyword-only arguments"),
    ],
)
def test_arguments_of_a_built_in_reward_are_tried_out_before_anything_runs(arguments, message):
    with pytest.raises(ValueError, match=f"`overlong` must get `arguments` that it can use, .*{message}"):
        MathTask(rewards=[RewardSpec(function="overlong", arguments=arguments)])


def test_an_overlong_penalty_must_be_within_reach():
    task = MathTask(rewards=[RewardSpec(function="overlong", arguments={"limit": 100, "buffer": 20}, name="long")])
    task.check_length(81)
    with pytest.raises(ValueError, match=r"`long` must begin below .* 80, but got .* = 80\. Set `limit` to 80"):
        task.check_length(80)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"`userrewards.raises` raised ZeroDivisionError: .*It got 3 responses.*by hand"),
        ("too_few", r"`userrewards.too_few` must return 3 finite numbers or None.*but got 1\. .*whole batch"),
        ("not_a_number", r"`userrewards.not_a_number` must return .* but got nan for the response 'b'"),
        ("one_number", r"`userrewards.one_number` must return .* but got 1.0 .*Return a list of floats"),
        ("words", r"`userrewards.words` must return .* but got \['good'"),
    ],
)
def test_a_reward_that_fails_is_named(name, message):
    with pytest.raises(ValueError, match=message):
        earned([{"function": f"userrewards.{name}"}], ["a", "b", ""])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"function": "brevity"}, r"one of \['answer_format', 'boxed_format', .*\] or an import path.*'brevity'"),
        ({"function": "userrewards.nothing"}, r"but got 'userrewards.nothing' .*PYTHONPATH"),
        ({"function": "nowhere.at_all"}, r"No module named 'nowhere'"),
        ({"function": "userrewards.constant"}, r"is 3, which cannot be called"),
        (
            {"function": "overlong", "arguments": {"length": 3}},
            r"takes \['buffer', .*but got the `arguments` \['length'",
        ),
        ({"function": "correctness", "weight": math.inf}, r"`weight` of the reward `correctness` must be a finite"),
    ],
)
def test_a_reward_that_cannot_be_is_found_before_anything_runs(spec, message):
    with pytest.raises(ValueError, match=message):
        MathTask(rewards=[RewardSpec(**spec)])


def test_two_rewards_of_one_name_are_an_error():
    with pytest.raises(ValueError, match=r"`rewards` must have different names, but got \['correctness', 'corr"):
        MathTask(rewards=[RewardSpec(function="correctness"), RewardSpec(function="correctness")])


def test_rewards_come_from_a_config_file_and_from_the_command_line(tmp_path):
    parser = ArgumentParser()
    parser.add_subclass_arguments(Task, "task", required=False)
    config = {"class_path": "grail_lightning.tasks.math.MathTask", "init_args": {"rewards": [{"function": "userrewards.brevity", "weight": 0.5}]}}  # fmt: skip  # noqa: E501
    task = parser.instantiate(parser.parse_object({"task": config})).task
    assert [(reward.name, reward.weight) for reward in task.rewards] == [("brevity", 0.5)]
    words = ["--task=MathTask", "--task.rewards=[{function: correctness}, {function: overlong, weight: 2, arguments: {limit: 9, buffer: 3}}]"]  # fmt: skip  # noqa: E501
    task = parser.instantiate(parser.parse_args(words)).task
    assert [(reward.name, reward.weight) for reward in task.rewards] == [("correctness", 1.0), ("overlong", 2.0)]
    assert task.rewards[1].arguments == {"limit": 9, "buffer": 3}


def test_a_data_module_takes_a_task_with_rewards():
    parser = ArgumentParser()
    parser.add_class_arguments(MathData, "data")
    words = ["--data.task=MathTask", "--data.task.rewards=[{function: boxed_format, weight: 0.1, name: box}]"]
    data = parser.instantiate(parser.parse_args(words)).data
    assert [(reward.name, reward.weight) for reward in data.task.rewards] == [("box", 0.1)]


class Lenient(ArithmeticTask):
    """A task of a user's that has a reward of its own and knows nothing of lengths."""

    def reward(self, texts, prompts, verdicts):
        return [0.5 + verdict.correct for verdict in verdicts]


def test_a_subclass_with_a_reward_of_its_own_is_asked_for_it():
    task = Lenient()
    prompts = [task.prompt({"problem": "1+1"})] * 2
    earned = task.earn(["", ""], prompts, [verdict(True), verdict(False)], [1, 1])
    assert earned.total == [1.5, 0.5]
    assert earned.values == {}


def test_the_arithmetic_task_takes_rewards_too():
    specs = [RewardSpec(function="correctness"), RewardSpec(function="userrewards.brevity", weight=0.5)]
    task = ArithmeticTask(rewards=specs)
    prompts = [task.prompt({"problem": "1+1"})] * 2
    earned = task.earn(["a", "abc"], prompts, [verdict(True), verdict(False)], [1, 3])
    assert earned.total == [1.25, 0.125]  # 1 + 0.5/(1+1) and 0 + 0.5/(1+3)
    assert earned.values == {"correctness": [1.0, 0.0], "brevity": [0.5, 0.25]}
    with pytest.raises(ValueError, match="`rewards` must have different names"):
        ArithmeticTask(rewards=[RewardSpec(function="correctness")] * 2)


@pytest.mark.parametrize(
    "arguments",
    [
        [
            "--data=ArithmeticData",
            "--data.task=ArithmeticTask",
            "--data.task.rewards=[{function: correctness}, {function: userrewards.brevity, weight: 0.1}]",
        ],
        ["--config={folder}/run.yaml"],
    ],
    ids=["command line", "YAML"],
)
def test_rewards_of_the_arithmetic_task_come_from_the_command_line_and_from_yaml(arguments, tmp_path):
    (tmp_path / "run.yaml").write_text(
        textwrap.dedent(
            """
            data:
              class_path: ArithmeticData
              init_args:
                task:
                  class_path: ArithmeticTask
                  init_args:
                    rewards:
                      - {function: correctness}
                      - {function: userrewards.brevity, weight: 0.1}
            """
        )
    )
    parser = ArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_subclass_arguments(PromptData, "data")
    parsed = parser.parse_args(
        [argument.format(folder=tmp_path) if "{folder}" in argument else argument for argument in arguments]
    )
    data = parser.instantiate(parsed).data
    assert [(reward.path, reward.weight) for reward in data.task.rewards] == [
        ("correctness", 1.0),
        ("userrewards.brevity", 0.1),
    ]
    (prompts,) = data.load("val")
    assert prompts.prompts[0].task is data.task


def test_rewards_that_a_task_without_types_passes_on_are_told():
    with pytest.raises(ValueError, match=r"must be a list of `RewardSpec`, but got {'function'.*write their type"):
        MathTask(rewards=[{"function": "correctness"}])
