"""Rows with a conversation, as TRL's column `prompt` holds it: from files, folders, lists and datasets."""

import datasets
import pytest

from grail_lightning import ArithmeticTask, DatasetSpec, EnvironmentTask, FewShot, MathData, MathTask, Prompt
from grail_lightning.answers import Boxed
from tests.core.data.recorder import write
from tests.core.environments.test_tools import Desk

SYSTEM, ASKED = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}
CHAT = [SYSTEM, {"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Yes?"}, ASKED]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """`datasets` keeps Arrow files of what it reads; not in the user's home."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def load(train, task=None, **options):
    """The training prompts of one dataset."""
    (part,) = MathData(train=train, task=task, **options).load("train")
    return [*part.prompts]


class Bare:
    """An environment without a reward, whose `reset` takes the columns of TRL's dataset alone."""

    def reset(self, prompt, number=0):
        """Begin."""
        self.told = prompt, number

    def add(self, number: int) -> str:
        """Add a number.

        Args:
            number: What is added.
        """
        return str(number)


def paid(environments, **columns):
    """A reward in TRL's form."""
    return [0.0 for _ in environments]


TASKS = {
    "plain": MathTask(instruction=" Think."),
    "environment": EnvironmentTask(Desk, instruction=" Think."),
    "outside": EnvironmentTask(Bare, instruction=" Think.", rewards=[paid]),
}


@pytest.mark.parametrize("form", ["list", "Dataset", "jsonl", "parquet", "folder"])
@pytest.mark.parametrize("task", TASKS)
def test_a_conversation_in_trls_column_is_the_prompt_wherever_the_rows_come_from(form, task, tmp_path):
    rows = [{"prompt": CHAT, "answer": 2}, {"prompt": [ASKED], "answer": 2}]
    rows = [{"prompt": row["prompt"]} for row in rows] if task == "outside" else rows
    table = datasets.Dataset.from_list(rows)
    forms = {
        "list": lambda: rows,
        "Dataset": lambda: table,
        "jsonl": lambda: write(tmp_path, rows),
        "parquet": lambda: table.to_parquet(tmp_path / "rows.parquet") and str(tmp_path / "rows.parquet"),
        "folder": lambda: table.to_parquet(tmp_path / "train.parquet") and str(tmp_path),  # As one of the hub.
    }
    first, second = load(forms[form](), TASKS[task])
    last = {"role": "user", "content": "1+1? Think."}
    assert (first.messages, second.messages) == ([*CHAT[:-1], last], [last])
    assert first.reference == ("" if task == "outside" else "2")
    assert first.columns["prompt"] == CHAT
    assert first.columns["problem"] == "1+1?", "rewards and tables are told the question"
    assert rows[0]["prompt"] == CHAT, "the rows are the user's"


def test_a_text_in_trls_column_is_the_problem_and_a_column_problem_comes_before_it():
    rows = [{"prompt": "2+3?", "problem": "1+1?", "answer": 2}]
    shown = [load(given)[0].messages[0]["content"] for given in (rows, DatasetSpec(rows, problem="prompt"))]
    assert [text[:4] for text in shown] == ["1+1?", "2+3?"]
    (only,) = load([{"prompt": "2+3?", "answer": 5}])
    assert only.messages == [{"role": "user", "content": f"2+3?{Boxed.instruction}"}]
    (shown,) = load([{"prompt": "Go."}], EnvironmentTask(Desk))
    assert shown.messages == [{"role": "user", "content": "Go."}], "a row without an answer is not asked for its form"


def test_pictures_stay_among_the_texts_and_fields_without_a_value_are_left_out():
    parts = [{"type": "image"}, {"type": "text", "text": "What?"}]
    row = {"problem": [{"role": "user", "content": parts, "name": None}], "answer": 1}
    made = MathTask(instruction=" Say.").prompt(row)
    assert made.messages == [{"role": "user", "content": [parts[0], {"type": "text", "text": "What? Say."}]}]
    assert parts[1]["text"] == "What?"


def test_worked_examples_stand_behind_the_message_of_the_system():
    rows = [{"prompt": [SYSTEM, ASKED], "answer": k, "solution": f"\\boxed{{{k}}}"} for k in (2, 3)]
    (prompt,) = load(rows, MathTask(instruction=""), few_shot=FewShot(number=1))
    assert prompt.messages == [SYSTEM, ASKED, {"role": "assistant", "content": "\\boxed{2}"}, ASKED]


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ([], {}, "row 1: `prompt` must be text or a number"),
        ([{"role": "user"}], {}, "row 1: A prompt that is a conversation must be a list of messages, .* but got"),
        ([{"role": "user", "content": 3}], {}, "must be a list of messages"),
        (CHAT[:3], {}, "of which the last is the user's, but got {'role': 'assistant', 'content': 'Yes.'} at its end"),
        (CHAT, {"system_prompt": "Be long."}, "`system_prompt` of the task .*'Be long.' and 'Be brief.'. Leave out"),
    ],
)
def test_a_conversation_that_no_policy_can_go_on_with_is_named(prompt, options, said):
    with pytest.raises(ValueError, match=said):
        load([{"prompt": prompt, "answer": 2}], MathTask(**options))


def test_a_task_that_reads_text_refuses_a_conversation_and_one_with_columns_of_its_own_reads_it():
    with pytest.raises(ValueError, match=r"row 1: `prompt` must be text or a number, .*`takes_conversations`"):
        load([{"prompt": [ASKED], "answer": 2}], ArithmeticTask())

    class Own(MathTask):
        """Reads the column as it is."""

        optional_columns = ("problem", "answer")

        def prompt(self, row):
            """The messages."""
            return Prompt(messages=row["prompt"], reference="2", task=self, columns=dict(row))

    (prompt,) = load([{"prompt": [ASKED]}], Own())
    assert (prompt.messages, [*prompt.columns]) == ([ASKED], ["prompt"])


def test_a_row_without_an_answer_is_told_what_an_environment_needs():
    said = "there is no column `answer`. .* a method `get_reward`, or if `task.rewards` are functions in TRL's form"
    for task in (None, EnvironmentTask(Bare)):
        with pytest.raises(ValueError, match=said):
            load([{"prompt": "1+1?"}], task)
    with pytest.raises(ValueError, match="a method `get_reward` of `Bare`, or give `rewards` in TRL's form"):
        EnvironmentTask(Bare).prompt({"prompt": "Go."})
