"""`--help` as people meet it: a first screen without torch, groups of options, and whole sentences."""

import inspect
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields

import pytest
import yaml
from jsonargparse import ArgumentParser

from grail_lightning.callbacks.choices import choices, class_of
from grail_lightning.cli import GrailCLI
from grail_lightning.cli.commands import SUBCOMMANDS
from grail_lightning.cli.help_pages import EXAMPLES, GROUPS, OPTIONS, PURPOSE, RELEVANT, WIDTH, WORTH_KNOWING
from grail_lightning.step.options import Execution
from tests.shell import fails, main

# What an option that is null by default amounts to.
NULL = {"required", "none", "all", "Uniform", "32-true"}
OPTION = re.compile(r"^  (--[\w.]+)(?!\.help)[ ,\n]", re.MULTILINE)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(WIDTH))


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


def started(*arguments):
    """The lines that the command prints, without torch."""
    said = (
        f"import sys; sys.argv[1:] = {arguments}\nfrom grail_lightning.__main__ import main\nmain()\n"
        "assert 'torch' not in sys.modules"
    )
    return subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], *([name, "--help"] for name in SUBCOMMANDS)])
def test_a_first_screen_is_printed_without_torch_and_fits_a_screen(arguments, page):
    lines = started(*arguments)
    assert page(*arguments).splitlines() == lines
    assert lines[0].startswith("usage: grail-lightning ")
    assert len(lines) <= (32 if arguments[0].startswith("-") else 45)
    assert max(len(line) for line in lines if "They lie in" not in line) <= WIDTH


def test_the_page_of_the_program_has_an_example_of_each_subcommand(page):
    said = page("--help")
    for name in SUBCOMMANDS:
        assert f"  {name:<10}{PURPOSE[name]}\n            grail-lightning {name} --config " in said
    assert "fit --model.credit.help GRAIL" in said
    assert page("--help", "fit") == page("fit", "--help") == page("fit", "--config=any.yaml", "-h", "--data=MathData")


@pytest.mark.parametrize("subcommand", SUBCOMMANDS)
def test_examples_are_accepted_and_defaults_are_those_of_the_parser(subcommand, page):
    for example in EXAMPLES[subcommand]:
        assert f"  grail-lightning {subcommand} {example}\n" in page(subcommand, "--help")
        assert yaml.safe_load(page(subcommand, *shlex.split(example), "--print_config"))["model"]["policy"]
    defaults = yaml.safe_load(page(subcommand, "--print_config"))
    assert len(WORTH_KNOWING[subcommand]) == 10
    for option in WORTH_KNOWING[subcommand]:
        value = defaults
        for part in option.split("."):
            value = value["init_args"][part] if "init_args" in value else value[part]
        shown, meaning = OPTIONS[option]
        assert re.search(
            rf"^  --{re.escape(option)} +{re.escape(shown)} +{re.escape(meaning)}$", page(subcommand, "-h"), re.M
        )
        assert (shown in NULL) if value is None else (yaml.safe_load(shown) == value), option


def test_every_group_of_options_stands_on_the_first_screen(parsers, page):
    with_options = {name for name, group in parsers["fit"].groups.items() if group._group_actions} - {"fit"}
    assert with_options <= GROUPS.keys()
    assert set(GROUPS) == {name for subcommand in SUBCOMMANDS for name in RELEVANT[subcommand]}
    for subcommand in SUBCOMMANDS:
        said = page(subcommand, "--help")
        assert all(re.search(rf"^  {name} +{re.escape(GROUPS[name])}$", said, re.M) for name in RELEVANT[subcommand])


@pytest.mark.parametrize("subcommand", SUBCOMMANDS)
def test_help_of_a_group_lists_its_options_alone(subcommand, page):
    said = page(subcommand, "--help", "model.execution")
    names = [f"--model.execution.{field.name}" for field in fields(Execution)]
    assert OPTION.findall(said) == ["--model.execution", *names]
    for field in fields(Execution):
        default = {None: "null"}.get(field.default, field.default)
        section = said.partition(f"--model.execution.{field.name} ")[2].partition("\n  --")[0]
        assert f"default: {default})" in " ".join(section.split())
    assert (
        page(subcommand, "--help=model.execution")
        == page(subcommand, "-h", "model.execution", "--data=MathData")
        == said
    )


@pytest.mark.parametrize("subcommand", SUBCOMMANDS)
def test_help_all_lists_every_option(subcommand, parsers, page):
    said = page(subcommand, "--help", "all")
    assert set(OPTION.findall(said)) >= {f"--{a.dest}" for a in parsers[subcommand]._actions if "." in a.dest}
    assert said.splitlines()[:3] == [
        f"usage: grail-lightning {subcommand} --config FILE [--OPTION=VALUE ...]",
        "",
        PURPOSE[subcommand],
    ]


def test_help_of_an_option_that_takes_a_class_lists_the_classes(page):
    said = page("fit", "--help", "model.credit")
    assert OPTION.findall(said) == ["--model.credit.help", "--model.credit"]
    listed = " ".join(said.partition("Classes, of which `--model.credit.help CLASS` lists the options:\n")[2].split())
    for name in choices("model.credit"):
        assert f"{name} {inspect.getdoc(class_of('model.credit', name)).splitlines()[0]}" in listed
    assert max(map(len, said.splitlines())) <= WIDTH


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("model.exection", "Did you mean `model.execution`"),
        ("execution", r"Did you mean `model.execution`\?"),
        ("evaluation.num_sample", r"Did you mean `evaluation.num_samples`"),
        ("al", r"Did you mean `all`"),
        ("data.num_train", "`--data.help CLASS` lists the options of a class, one of ArithmeticData, MathData"),
        ("model.credit.std", "`--model.credit.help CLASS` lists the options of a class, one of AdvantageReweighting, "),
        ("zzz", "The groups are trainer, model, model.sampling, "),
    ],
)
def test_a_name_that_is_no_group_is_one_line_with_the_nearest(name, hint, capsys):
    said = fails(capsys, "fit", "--help", name)
    assert f"`--help` must be followed by a group of options, an option or `all`, but got '{name}'." in said
    assert re.search(hint, said)


def test_a_reader_that_closes_the_pipe_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "grail_lightning", "fit", "--help"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_help_of_every_option_of_ours_is_whole_sentences(parsers):
    """Those of the Trainer are Lightning's."""
    seen = set()
    for parser in parsers.values():
        for action in parser._actions:
            if not action.dest.startswith("trainer.") and action.dest != "help":
                assert (action.help or "").endswith("."), action.dest
        titles = {name: group.title for name, group in parser.groups.items()}
        assert all(f"{titles[name]}." == text for name, text in GROUPS.items() if name in titles)
    for option in ("model.credit", "model.control", "model.engine", "data", "data.task", "data.task.answer"):
        for name in choices(option):
            _walk(class_of(option, name), seen)
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
