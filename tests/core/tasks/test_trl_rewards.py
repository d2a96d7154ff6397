"""Rewards in TRL's form: known by their arguments, and told what TRL's trainer tells them."""

import asyncio
import json

import pytest
import torch

from grail_lightning import ArithmeticTask, EnvironmentTask, MathData, MathTask, RewardSpec
from grail_lightning.core.tasks.rewards import Reward
from tests.app.callbacks.scripted import scalars
from tests.core.tasks.test_rewards import verdict
from tests.runs import Watch, module, problems, trainer
from tests.shell import RUN, SHORT, fails_early, main

CHAT = {"prompt": [{"role": "user", "content": "1+1?"}], "answer": "2", "level": 3}


def earned(task, rows, texts, ids=None):
    """The parts of the rewards of texts."""
    prompts = [task.prompt(row) for row in rows]
    return task.earn(texts, prompts, [verdict(False)] * len(texts), [1] * len(texts), ids).values


def by_level(completions, level, factor=1, **columns):
    return [None if here is None else factor * here for here in level]


@pytest.mark.parametrize(
    ("function", "is_trl"),
    [
        (lambda completions, **columns: [], True),
        (lambda prompts, completions, level: [], True),
        (lambda environments, **columns: [], True),
        (lambda completion_ids, scale=1: [], True),
        (lambda **columns: [], True),
        (lambda *, completions: [], True),
        (lambda responses, references, **columns: [], False),
        (lambda responses, references, prompts: [], False),
        (lambda texts, answers: [], False),
    ],
)
def test_the_form_is_known_by_the_names_of_the_arguments(function, is_trl):
    assert Reward(function).is_trl is is_trl


def test_a_conversation_is_told_as_messages_and_a_text_as_text():
    told = []

    def keeps(**columns):
        told.append(columns)
        return [0.0] * len(columns["completions"])

    row = {key: value for key, value in CHAT.items() if key != "level"}
    earned(MathTask(instruction="", rewards=[keeps]), [CHAT, row], ["It is 2.", "3"], [[5, 6], [7]])
    sums = [{"problem": "7+5-3+8", "answer": "17"}]
    earned(ArithmeticTask(rewards=[keeps]), sums, ["7+5=12"], [[8]])
    chat, text = told
    assert chat == {
        "prompts": [CHAT["prompt"]] * 2,
        "completions": [[{"role": "assistant", "content": said}] for said in ("It is 2.", "3")],
        "completion_ids": [[5, 6], [7]],
        "problem": ["1+1?"] * 2,
        "answer": ["2", "2"],
        "level": [3, None],
    }, "`prompt` is told as `prompts` alone, as under TRL"
    assert (text["prompts"], text["completions"]) == (["Compute 7+5-3+8."], ["7+5=12"])


def test_parts_add_up_beside_rewards_of_our_form_in_the_order_in_which_they_are_named():
    async def slow(completions, **columns):
        await asyncio.sleep(0.01)
        return [float(len(said[0]["content"])) for said in completions]

    hard = RewardSpec(function=by_level, weight=0.5, arguments={"factor": 10}, name="hard")
    task = MathTask(rewards=[slow, RewardSpec(function="correctness"), hard])
    prompts = [task.prompt(row) for row in (CHAT, CHAT | {"level": None})]
    made = task.earn(["two", "2"], prompts, [verdict(True), verdict(False)], [1, 1], [[1], [1]])
    assert [*made.values.items()] == [("slow", [3.0, 1.0]), ("correctness", [1.0, 0.0]), ("hard", [30.0, None])]
    assert made.total == [3 + 1 + 15, 1.0]


def test_a_function_cannot_change_the_data():
    def empties(prompts, completions, level):
        prompts[0].clear()
        return [level[0].pop()]

    row = CHAT | {"level": [2.0]}
    assert earned(MathTask(rewards=[empties]), [row], ["2"]) == {"empties": [2.0]}
    assert (row["level"], len(row["prompt"])) == ([2.0], 1)


def test_trls_own_rewards_are_taken_as_they_are():
    rewards = pytest.importorskip("trl.rewards")
    task = MathTask(rewards=[rewards.think_format_reward, rewards.get_soft_overlong_punishment(100, 20)])
    texts, ids = ["<think>\nWhy?\n</think>\nSo.", "No."], [[1] * 90, [1] * 3]
    assert [*earned(task, [CHAT] * 2, texts, ids).values()] == [[1.0, 0.0], [-0.5, 0.0]]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda completions, lvl: [], r"columns of the data, answer, level, prompt, or prompts, completions, .*'lvl'"),
        (lambda completions, trainer_state: [], r"\['trainer_state'\].*trainer_state, log_extra, log_metric are those"),
        (lambda environments: [], r"asks for \['environments'\]"),
        (
            lambda completions, **columns: 1 / 0,
            "raised ZeroDivisionError: division by zero. It got 1 responses and",
        ),
        (lambda completions, **columns: [], "must return 1 finite numbers or None, one a response, but got 0"),
        (lambda completions, **columns: [float("inf")], "but got inf for the response .*content"),
        (lambda completion_ids: [0.0], "raised TypeError: .*completion_ids"),
    ],
)
def test_a_function_that_cannot_be_called_or_fails_is_named(function, said):
    task = MathTask(rewards=[RewardSpec(function=function, name="mine")])

    def used():
        task.check_columns(CHAT)
        earned(task, [CHAT], ["2"])

    with pytest.raises(ValueError, match=said):
        used()


def test_a_run_tells_a_function_the_tokens_that_were_sampled(tmp_path):
    told = []

    def keeps(prompts, completions, completion_ids):
        told.append((prompts, completions, completion_ids))
        return [float(len(ids)) for ids in completion_ids]

    task, watch = ArithmeticTask(rewards=[keeps]), Watch()
    rows = [prompt.columns for prompt in problems(2)]
    data = MathData(train=[dict(row, answer=0) for row in rows], task=task, prompts_per_batch=2)
    trainer(1, watch, default_root_dir=tmp_path).fit(module({"group_size": 2}), data)
    ((prompts, completions, ids),) = told
    batch = watch.outputs[0].batch
    assert completions == batch.texts
    assert prompts == [prompt.messages for prompt in batch.prompts]
    assert ids == [row[mask].tolist() for row, mask in zip(batch.response_ids, batch.response_mask, strict=True)]
    assert batch.rewards.tolist() == [len(own) for own in ids]
    assert torch.equal(batch.reward_values["keeps"], batch.rewards)


PROMPTS_ALONE = ["--data=MathData", "--data.train=prompts.jsonl", "--data.val=prompts.jsonl", "--model.policy=words"]
JUDGED = ["--data.task.rewards=[{function: of_prompts.brevity}]", "--data.task.solved_at=0.9"]


@pytest.fixture
def _prompts_alone(tmp_path, monkeypatch):
    """A file of prompts without answers, and a reward function that was written for TRL."""
    rows = [{"prompt": f"Say {number}.", "most": 40 + number} for number in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "of_prompts.py").write_text(
        "def brevity(completions, most, **columns):\n"
        "    lengths = [len(messages[-1]['content']) for messages in completions]\n"
        "    return [1 - length / limit for length, limit in zip(lengths, most, strict=True)]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("_prompts_alone")
@pytest.mark.filterwarnings("ignore:.*validation problems are training problems", "ignore:.*ended by the limit")
def test_prompts_without_answers_are_trained_on_and_judged_by_a_function_of_trl(recwarn):
    main(["fit", *SHORT, *PROMPTS_ALONE, "--data.task=EnvironmentTask", *JUDGED])
    values = scalars(RUN)
    ((_, reward),) = values["train/reward"]  # Of one batch.
    assert reward < 1
    assert values["train/rewards/brevity/mean"] == values["train/reward"]
    assert len(values["val/accuracy"]) > 1
    assert {turns for _, turns in values["train/episodes/turns"]} == {1}
    assert not any("call no tool" in str(warning.message) for warning in recwarn)


@pytest.mark.usefixtures("_prompts_alone")
def test_prompts_without_answers_are_refused_by_other_tasks_with_what_to_set(capsys):
    told = fails_early(capsys, "fit", *SHORT, *PROMPTS_ALONE, "--data.task=MathTask", *JUDGED[:1])
    assert "there is no column `answer`. The columns are: prompt, most." in told
    assert "`EnvironmentTask` needs no answer if" in told
    assert "functions in TRL's form, also without an environment" in told
    told = fails_early(capsys, "fit", *SHORT, *PROMPTS_ALONE, "--data.task=EnvironmentTask")
    assert "`task.environment`, `task.tools` or `task.rewards` in TRL's form must be given, but got none" in told


def test_a_task_without_tools_tells_the_policy_of_none():
    task = EnvironmentTask(rewards=[by_level])
    assert (task.tool_instruction, task.has_tools) == ("", False)
    assert task.prompt({"prompt": "Say 1.", "level": 3}).messages == [{"role": "user", "content": "Say 1."}]
