"""What a task makes of a row is checked: it may be anybody's."""

from dataclasses import replace

import pytest

from grail_lightning.data import ArithmeticData, MathData
from grail_lightning.tasks import ArithmeticTask, MathTask
from grail_lightning.tasks.base import Prompt
from tests.data.recorder import write


class Mine(MathTask):
    """A task of a user's whose prompts are changed."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def prompt(self, row):
        return self.change(super().prompt(row))


WRONG = {
    "nothing": (lambda p: None, r"`Mine\.prompt` must return a `Prompt`, but got NoneType\. Return `Prompt\(messages"),
    "a dict": (lambda p: {"messages": p.messages}, r"must return a `Prompt`, but got dict\."),
    "ids": (lambda p: replace(p, messages=[1, 2]), r"`messages` are text or a list of .*, but got \[1, 2\]\."),
    "no message": (lambda p: replace(p, messages=[]), r"`messages` are text or a list of .*, but got \[\]\."),
    "no role": (lambda p: replace(p, messages=[{"content": "1"}]), r"but got \[\{'content': '1'\}\]\."),
    "no content": (lambda p: replace(p, messages=[{"role": "user"}]), r"but got \[\{'role': 'user'\}\]\."),
    "a number": (lambda p: replace(p, reference=12), r"`reference` is a string, but got int \(12\)\. Use `str`"),
    "no task": (lambda p: replace(p, task=None), r"`task` grades it, but got NoneType\. Give it `task=self`"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_a_prompt_that_is_something_else_is_an_error_that_names_the_task(change, message, tmp_path):
    train = write(tmp_path, [{"problem": "7+5?", "answer": "12"}])
    data = MathData(train=train, task=Mine(change), prompts_per_batch=1)
    with pytest.raises(ValueError, match=message):
        data.setup("fit")


def test_a_task_of_the_arithmetic_world_is_checked_alike():
    class Mine(ArithmeticTask):
        def prompt(self, row):
            return str(row)

    with pytest.raises(ValueError, match=r"`Mine\.prompt` must return a `Prompt`, but got str\."):
        ArithmeticData(task=Mine()).setup("fit")


def test_conversations_and_texts_pass(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "7+5?"}]
    train = write(tmp_path, [{"problem": "7+5?", "answer": "12"}])
    for messages in (chat, "7+5?"):
        task = Mine(lambda p, m=messages: replace(p, messages=m))
        data = MathData(train=train, task=task, prompts_per_batch=1)
        data.setup("fit")
        (prompt,) = next(iter(data.train_dataloader()))
        assert isinstance(prompt, Prompt)
        assert prompt.messages == messages
