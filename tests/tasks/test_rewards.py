"""Rewards: their options, what a function gets and may return, in Python, YAML and on the command line."""

import math
import sys
import textwrap

import pytest
from jsonargparse import ArgumentParser

from grail_lightning.answers import Verdict
from grail_lightning.data.modules import PromptData
from grail_lightning.tasks import ArithmeticTask
from grail_lightning.tasks.answered import MathTask
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

    def by_row(responses, references):
        return {k: 1.0 for k, _ in enumerate(responses)}

    def generates(responses, references):
        return (1 / len(text) for text in responses)

    def huge(responses, references):
        return [10**400 for _ in responses]

    def words(responses, references):
        return ["good" for _ in responses]

    def takes_out(responses, references, cases):
        return [case.pop() for case in cases]

    constant = 3
"""


@pytest.fixture(autouse=True)
def userrewards(tmp_path, monkeypatch):
    """A user's module on the path."""
    (tmp_path / "userrewards.py").write_text(textwrap.dedent(SOURCE))
    (tmp_path / "userrewards_broken.py").write_text("import not_installed")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("userrewards", None)


def verdict(correct):
    return Verdict(correct=correct, status="right" if correct else "wrong", layer="number", gold="2", prediction="")


def reward(specs, texts, correct=None, rows=None, lengths=None):
    task = MathTask(rewards=[RewardSpec(**spec) for spec in specs])
    prompts = [task.prompt({"problem": "1+1", "answer": "2"} | row) for row in rows or [{}] * len(texts)]
    verdicts = [verdict(right) for right in correct or [False] * len(texts)]
    return task.reward(texts, prompts, verdicts, lengths)


def test_several_rewards_add_up_with_their_weights_and_without_any_a_right_answer_earns_one():
    specs = [{"function": "correctness", "weight": 2.0}, {"function": "userrewards.brevity", "weight": -0.5}]
    # 2*1 - 0.5/(1+1) and 2*0 - 0.5/(1+3)
    assert reward(specs, ["a", "abc"], [True, False]) == [1.75, -0.125]
    assert reward([], ["", ""], [True, False]) == [1.0, 0.0]


@pytest.mark.parametrize(("task", "row"), [(MathTask, {"answer": "2"}), (ArithmeticTask, {})])
def test_the_values_before_weighting_have_the_names_of_the_rewards(task, row):
    by_level = RewardSpec(function="userrewards.by_level", weight=0.5, arguments={"factor": 10}, name="hard")
    made = task(rewards=[RewardSpec(function="correctness", weight=7.0), by_level])
    prompts = [made.prompt({"problem": "1+1", "level": level} | row) for level in (3, None)]
    earned = made.earn(["", ""], prompts, [verdict(True), verdict(True)], [1, 1])
    assert earned.values == {"correctness": [1.0, 1.0], "hard": [30.0, None]}
    assert earned.total == [22.0, 7.0]  # 7 + 0.5*30; None is no opinion: 7


def test_a_function_sees_the_columns_of_all_rows_and_the_verdicts():
    rows = [{"level": 1, "lengths": "not ours"}, {"source": "x", "references": "not ours"}]
    reward([{"function": "userrewards.brevity"}], [r"\boxed{2}", "no"], [True, False], rows, lengths=[5, 6])
    expected = {
        "responses": [r"\boxed{2}", "no"],
        "references": ["2", "2"],
        "correct": [True, False],
        "status": ["right", "wrong"],
        "answers": ["2", None],
        "ends_with_answer": [True, False],
        "lengths": [5, 6],
        "level": [1, None],
        "source": [None, "x"],
    }
    assert {name: sys.modules["userrewards"].seen[name] for name in expected} == expected


def test_a_function_that_changes_what_it_is_given_changes_neither_the_data_nor_the_next_response():
    row = {"cases": [1.0, 2.0]}
    assert reward([{"function": "userrewards.takes_out"}], ["", ""], rows=[row, row]) == [2.0, 2.0]
    assert row == {"cases": [1.0, 2.0]}


def test_the_built_in_rewards():
    texts = [r"So \boxed{1}", r"So $\boxed{\frac{1}{2}}$. ", r"\[\boxed{1}\]", r"\boxed{}"]
    assert boxed_format(texts, [""] * 4) == [1.0] * 4
    texts = ["1", r"\boxed{1", r"\boxed{1} or 2", r"\boxed{1} and \boxed{2", ""]
    assert boxed_format(texts, [""] * 5) == [0.0] * 5
    assert correctness(["", ""], ["", ""], correct=[True, False]) == [1.0, 0.0]
    # limit 100, buffer 20: free up to 80, then 1/20 a token, -1 at 100 and behind
    values = overlong([""] * 6, [""] * 6, lengths=[1, 80, 81, 90, 100, 150], limit=100, buffer=20)
    assert values == pytest.approx([0.0, 0.0, -0.05, -0.5, -1.0, -1.0])


def test_the_overlong_penalty_counts_tokens_and_must_be_within_reach():
    spec = {"function": "overlong", "arguments": {"limit": 10, "buffer": 4}, "name": "long"}
    assert reward([spec], ["a", "b"], lengths=[6, 8]) == [0.0, -0.5]
    with pytest.raises(ValueError, match=r"`overlong` raised TypeError: .*'lengths'"):
        reward([spec], ["a", "b"])
    task = MathTask(rewards=[RewardSpec(**spec)])
    task.check_length(7)
    with pytest.raises(ValueError, match=r"`long` must begin below .* 6, but got .* = 6\. Set `limit` to 6"):
        task.check_length(6)


OVERLONG = "`overlong` must get `arguments` that it can use, .*"
TWO = [RewardSpec(function="correctness")] * 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"function": "brevity"}, r"one of \['answer_format', 'boxed_format', .*\] or an import path.*'brevity'"),
        ({"function": "userrewards.nothing"}, r"'userrewards.nothing' \(userrewards has no 'nothing'\). Correct the"),
        ({"function": "userrewards.brevty"}, r"Did you mean brevity\?"),
        ({"function": "nowhere.at_all"}, r"No module named 'nowhere'\). Is its folder on PYTHONPATH\?"),
        ({"function": "userrewards_broken.reward"}, r"\(No module named 'not_installed'\)\.$"),
        ({"function": "userrewards.constant"}, r"is 3, which cannot be called"),
        (
            {"function": "overlong", "arguments": {"length": 3}},
            OVERLONG + "got an unexpected keyword argument 'length'",
        ),
        ({"function": "correctness", "weight": math.inf}, r"`weight` of the reward `correctness` must be a finite"),
        (
            {"function": "overlong", "arguments": {"limit": 10, "buffer": 11}},
            OVERLONG + r"`limit` \(10\) tokens, but got 11",
        ),
        ({"function": "overlong", "arguments": {"limit": 10}}, OVERLONG + "missing 1 required .*: 'buffer'"),
        ({"function": "overlong", "arguments": {"limit": "ten", "buffer": 4}}, OVERLONG + "not supported between"),
        ({"function": "overlong"}, OVERLONG + "missing 2 required"),
        (
            {"function": "userrewards.by_level", "arguments": {"fctor": 2}},
            "must get `arguments` .*unexpected .*'fctor'",
        ),
        (TWO, r"`rewards` must have different names, but got \['correctness', 'corr"),
        ([{"function": "correctness"}], r"must be a list of `RewardSpec`, but got {'function'.*write their type"),
    ],
)
def test_a_reward_that_cannot_be_is_found_before_anything_runs(spec, message):
    with pytest.raises(ValueError, match=message):
        MathTask(rewards=[RewardSpec(**spec)] if isinstance(spec, dict) else spec)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"`userrewards.raises` raised ZeroDivisionError: .*It got 3 responses.*by hand"),
        ("too_few", r"`userrewards.too_few` must return 3 finite numbers or None.*but got 1\. .*whole batch"),
        ("not_a_number", r"`userrewards.not_a_number` must return .* but got nan for the response 'b'"),
        ("one_number", r"`userrewards.one_number` must return .* but got 1.0 .*Return a list of floats"),
        ("words", r"`userrewards.words` must return .* but got \['good'"),
        ("by_row", r"`userrewards.by_row` must return .* \(a dict has no order of responses\)"),
        ("generates", r"`userrewards.generates` must return .* \(division by zero\)"),
        ("huge", r"`userrewards.huge` must return .* too large"),
    ],
)
def test_a_reward_that_fails_is_named(name, message):
    with pytest.raises(ValueError, match=message):
        reward([{"function": f"userrewards.{name}"}], ["a", "b", ""])


YAML = """
data:
  class_path: {data}
  init_args:
    task:
      class_path: {task}
      init_args:
        rewards:
          - {{function: correctness}}
          - {{function: userrewards.brevity, weight: 0.1, arguments: {{scale: 3}}}}
"""
LIST = "[{function: correctness}, {function: userrewards.brevity, weight: 0.1, arguments: {scale: 3}}]"


@pytest.mark.parametrize("given", ["command line", "YAML"])
@pytest.mark.parametrize(("data", "task"), [("ArithmeticData", "ArithmeticTask"), ("MathData", "MathTask")])
def test_rewards_come_from_a_config_file_and_from_the_command_line(data, task, given, tmp_path):
    (tmp_path / "run.yaml").write_text(YAML.format(data=data, task=task))
    parser = ArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_subclass_arguments(PromptData, "data")
    words = [f"--data={data}", f"--data.task={task}", f"--data.task.rewards={LIST}"]
    made = parser.instantiate(parser.parse_args(words if given != "YAML" else [f"--config={tmp_path}/run.yaml"])).data
    found = [(reward.path, reward.weight, reward.arguments) for reward in made.task.rewards]
    assert found == [("correctness", 1.0, {}), ("userrewards.brevity", 0.1, {"scale": 3})]


class Lenient(ArithmeticTask):
    """A task of a user's that has a reward of its own and knows nothing of lengths."""

    def reward(self, texts, prompts, verdicts):
        return [0.5 + verdict.correct for verdict in verdicts]


def test_a_subclass_with_a_reward_of_its_own_is_asked_for_it():
    task = Lenient()
    earned = task.earn(["", ""], [task.prompt({"problem": "1+1"})] * 2, [verdict(True), verdict(False)], [1, 1])
    assert (earned.total, earned.values) == ([1.5, 0.5], {})
