"""Our names for the options of other trainers are options, and each optional option takes null."""

import dataclasses
import inspect
import types
from typing import Union, get_args, get_origin

import pytest
import torch
import yaml

from grail_lightning import CodeTask, EnvironmentTask, GroupMean, LoRA, MathData, MathTask, Objective
from grail_lightning.app.cli.app import FitOptions
from grail_lightning.app.cli.classes import BASES
from grail_lightning.app.cli.known_as import KNOWN_AS, known_as

BASE = ["--config=quickstart.yaml"]


@pytest.fixture(scope="module")
def options():
    made = FitOptions()
    made.parse(BASE)
    return made


def test_each_of_our_names_for_an_option_of_another_trainer_is_an_option(options):
    ours = {*options._cli.known_options, *BASES, "ckpt_path"}
    ours |= {f"model.optimizer.{name}" for name in inspect.signature(torch.optim.AdamW).parameters}
    ours |= {f"data.{name}" for name in inspect.signature(MathData).parameters}
    ours |= {f"data.task.{name}" for name in inspect.signature(EnvironmentTask).parameters}
    ours |= {f"model.objective.{field.name}" for field in dataclasses.fields(Objective)}
    ours |= {f"model.advantage.{field.name}" for field in dataclasses.fields(GroupMean)}
    ours |= {f"model.loading.lora.{field.name}" for field in dataclasses.fields(LoRA)}
    assert {*KNOWN_AS.values()} - ours == set()
    assert not {*KNOWN_AS} & ours, "ours is not answered with another"


def test_tools_of_another_trainer_are_our_tools_and_ours_are_answered_with_nothing():
    assert known_as("tools") == " Here it is `data.task.tools`."
    assert known_as("environment_factory") == " Here it is `data.task.environment`."
    assert known_as("data.train.tools") == ""


def optional(cls):
    """The names of a class's options that may be None."""
    hints = {name: of.annotation for name, of in inspect.signature(cls, eval_str=True).parameters.items()}
    return [n for n, h in hints.items() if get_origin(h) in (Union, types.UnionType) and type(None) in get_args(h)]


TASKS = {
    MathTask: {},
    CodeTask: {},
    EnvironmentTask: {"environment": "grail_lightning.worlds.sums.calculator.Calculator"},
}


# One option after the other, each with a parser of its own: the tasks with most of them are the slow ones.
@pytest.mark.parametrize("task", [t if t is MathTask else pytest.param(t, marks=pytest.mark.slow) for t in TASKS])
def test_every_optional_option_of_a_task_takes_null_on_the_command_line_and_in_a_file(task, options, tmp_path):
    """Those of classes and lists, too: `rewards`, `answer`, `limits`."""
    names, required = optional(task), TASKS[task]
    assert {"rewards", "answer"} <= {*names}
    given = [f"--data.task.{name}={value}" for name, value in required.items()]
    made = [*BASE, "--data=MathData", f"--data.task={task.__name__}", *given]
    for name in names:
        for how in ("null", "None"):
            held = options.parse([*made, f"--data.task.{name}={how}"]).data.init_args.task.init_args
            assert held[name] is None, (name, how)
    arguments = required | dict.fromkeys(names)
    written = {"class_path": "MathData", "init_args": {"task": {"class_path": task.__name__, "init_args": arguments}}}
    (tmp_path / "null.yaml").write_text(yaml.safe_dump({"data": written}))
    held = options.parse([*BASE, f"--config={tmp_path / 'null.yaml'}"]).data.init_args.task.init_args
    assert [held[name] for name in names] == [None] * len(names)


def test_null_undoes_what_a_file_sets(options, tmp_path):
    task = "{class_path: MathTask, init_args: {answer: {class_path: Marker}, rewards: [{function: correctness}]}}"
    (tmp_path / "set.yaml").write_text(f"data: {{class_path: MathData, init_args: {{task: {task}}}}}\n")
    null = ["--data.task.answer=null", "--data.task.rewards=null"]
    held = options.parse([*BASE, f"--config={tmp_path / 'set.yaml'}", *null]).data.init_args.task
    assert (held.init_args.answer, held.init_args.rewards) == (None, None)
    for name in optional(MathData):
        assert options.parse([*BASE, "--data=MathData", f"--data.{name}=null"]).data.init_args[name] is None, name
