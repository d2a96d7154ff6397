"""A folder of copies stands for datasets of the hub alone; a row that a task refuses is named with its place."""

import pytest

from grail_lightning.data import DatasetSpec, MathData
from grail_lightning.tasks import ArithmeticTask
from tests.data.recorder import rows, write

ON_HUB = DatasetSpec("owner/first", problem="question")


def test_a_dataset_that_is_here_is_read_from_its_own_path_beside_copies_of_the_hub(tmp_path, monkeypatch):
    copies = tmp_path / "copies"
    copies.mkdir()
    write(copies, rows(3), "first.jsonl")
    write(copies, rows(5), "easy.jsonl")
    own = DatasetSpec(write(tmp_path, [{"q": "1+1?", "final": "2"}], "easy.jsonl"), problem="q", answer="final")
    (data := MathData(test=[ON_HUB, own], folder=str(copies))).setup("test")
    assert [len(loader.prompts) for loader in data.test_dataloader()] == [3, 1]
    assert data.test_dataloader()[1].prompts[0].reference == "2"


def test_a_file_that_is_missing_is_named_and_not_looked_for_among_the_copies(tmp_path):
    write(tmp_path, rows(3), "easy.jsonl")
    with pytest.raises(ValueError, match=r"'nowhere/easy\.jsonl' does not exist"):
        MathData(test="nowhere/easy.jsonl", folder=str(tmp_path))


def test_columns_of_a_file_that_is_here_are_not_guessed(tmp_path):
    own = DatasetSpec(write(tmp_path, rows(1)), problem="question")
    with pytest.raises(ValueError, match="line 1: there is no column `question`"):
        MathData(test=own, folder=str(tmp_path)).setup("test")


def test_a_row_that_a_task_refuses_is_named_with_file_and_line(tmp_path):
    sums = [{"problem": problem, "answer": "0"} for problem in ("Compute 3+2-5.", "Compute 3 plus 2.")]
    data = MathData(test=write(tmp_path, sums), task=ArithmeticTask())
    data.setup("test")
    (loader,) = data.test_dataloader()
    with pytest.raises(ValueError, match=r"train\.jsonl, line \d: "):
        [prompt for batch in loader for prompt in batch]
