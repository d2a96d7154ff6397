"""`--help` as people meet it: a first screen without torch, and groups of options in whole sentences."""

import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields

import pytest
from jsonargparse import ArgumentParser

from grail_lightning.callbacks.choices import BASES, choices
from grail_lightning.cli import GrailCLI
from grail_lightning.cli.help import GROUPS, SUBCOMMANDS
from grail_lightning.step.options import Execution
from tests.shell import fails, main

OPTION = re.compile(r"^  (--[\w.]+)(?!\.help)[ ,\n]", re.MULTILINE)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def page(capsys):
    """What the command line prints before it ends without an error."""

    def printed(*arguments):
        with pytest.raises(SystemExit) as end:
            main([*arguments])
        assert not end.value.code
        said = capsys.readouterr()
        assert said.err == ""
        return said.out

    return printed


@pytest.fixture(scope="module")
def parsers():
    """The parser of each subcommand, as the command line builds it."""
    found = {}

    def keep(cli, *_):
        found.update(cli._subcommand_parsers)
        raise SystemExit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrailCLI, "parse_arguments", keep)
        with pytest.raises(SystemExit):
            main(["fit", "--help", "all"])
    return found


def test_the_first_screen_is_printed_without_torch_and_what_it_names_exists(page, parsers):
    code = (
        "import sys; sys.argv[1:] = ['--help']\nfrom grail_lightning.__main__ import main\nmain()\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 105
    for arguments in (["-h"], ["--help", "fit"], ["fit", "--config=any.yaml", "-h", "--data=MathData"]):
        assert page(*arguments).splitlines() == lines
    options = {action.dest for action in parsers["fit"]._actions}
    assert {name.removeprefix("--") for name in OPTION.findall(done.stdout)} - {
        "version",
        "model.optimizer.lr",
    } <= options
    assert {name for name, group in parsers["fit"].groups.items() if group._group_actions} - {"fit"} <= GROUPS.keys()
    assert all(f"{name}," in done.stdout or f" {name}\n" in done.stdout for name in GROUPS)
    for example in re.findall(r"grail-lightning (\w+ --config configs/.*)", done.stdout):
        assert "policy:" in page(*shlex.split(example), "--print_config")


def test_help_of_a_group_lists_its_options_alone_with_their_defaults(page):
    said = page("fit", "--help", "model.execution")
    assert OPTION.findall(said) == [
        "--model.execution",
        *(f"--model.execution.{field.name}" for field in fields(Execution)),
    ]
    for field in fields(Execution):
        default = {None: "null"}.get(field.default, field.default)
        section = said.rpartition(f"  --model.execution.{field.name} ")[2].partition("\n  --")[0]
        assert f"default: {default})" in " ".join(section.split())
    assert page("test", "--help=model.execution", "--data=MathData").partition("\n")[2] == said.partition("\n")[2]
    assert OPTION.findall(page("fit", "--help", "model.credit")) == ["--model.credit.help", "--model.credit"]


@pytest.mark.parametrize("subcommand", SUBCOMMANDS)
def test_help_all_lists_every_option(subcommand, parsers, page):
    listed = set(OPTION.findall(page(subcommand, "--help", "all")))
    assert listed >= {f"--{action.dest}" for action in parsers[subcommand]._actions if "." in action.dest}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("model.exection", "Did you mean model.execution"),
        ("execution", r"Did you mean model.execution\?"),
        ("al", r"Did you mean all\?"),
        ("data.num_train", "`--OPTION.help CLASS` lists those of a class"),
        ("zzz", "The groups are trainer, model, model.sampling, "),
    ],
)
def test_a_name_that_is_no_group_is_one_line_with_the_nearest(name, hint, capsys):
    said = fails(capsys, "fit", "--help", name)
    assert f"`--help` must be followed by all, an option or a group of options, but got '{name}'." in said
    assert re.search(hint, said)


def test_a_reader_that_closes_the_pipe_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "grail_lightning", "fit", "--help"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_help_of_every_option_of_ours_is_whole_sentences(parsers):
    """Those of the Trainer and of `ModelCheckpoint` are Lightning's."""
    seen = set()
    for action in (action for parser in parsers.values() for action in parser._actions):
        if not action.dest.startswith(("trainer.", "checkpoint.")) and action.dest != "help":
            assert (action.help or "").endswith("."), action.dest
    for option in ("model.credit", "model.control", "model.engine", "data", "data.task", "data.task.answer"):
        modules = [vars(importlib.import_module(module)) for module in BASES[option][1]]
        for name in choices(option):
            _walk(next(module[name] for module in modules if name in module), seen)
    assert {"GRAIL", "MathData", "Marker", "FewShot", "RewardSpec", "DatasetSpec"} <= {cls.__name__ for cls in seen}


def _walk(cls, seen):
    """Check the options of a class and, below it, of each class of ours that an option accepts."""
    if cls in seen or not cls.__module__.startswith("grail_lightning"):
        return
    seen.add(cls)
    parser = ArgumentParser()
    parser.add_class_arguments(cls, "it")
    assert inspect.getdoc(cls).splitlines()[0].endswith("."), f"the title of {cls.__name__} would be cut"
    for action in parser._actions:
        if action.dest.startswith("it."):
            assert (action.help or "").endswith("."), f"{cls.__name__}: {action.dest}"
        for below in getattr(action, "_help_types", ()):
            for one in (below, *below.__subclasses__()):
                if not inspect.isabstract(one):
                    _walk(one, seen)
