"""`--help` as people meet it: a first screen without torch, and every option in whole sentences."""

import re
import shlex
import subprocess
import sys

import pytest

from grail_lightning._version import __version__
from grail_lightning.app.cli.help import SCREEN, SUBCOMMANDS
from tests.shell import MADE, fails, main

OPTION = re.compile(r"^  (--[\w.]+)(?!\.help)[ ,\n]", re.MULTILINE)


def page(capsys, *arguments):
    """What the command line prints before it ends without an error."""
    with pytest.raises(SystemExit) as end:
        main([*arguments])
    assert not end.value.code
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def loaded_by(code):
    """What a process that runs the code prints at the end: the modules that it has loaded."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_first_screen_the_version_and_a_mistyped_subcommand_need_no_torch():
    code = (
        "import sys, grail_lightning, grail_lightning.answers\nfrom grail_lightning.__main__ import main\n"
        "for word in ('--help', '--version', 'fti'):\n"
        "    sys.argv[1:] = [word]\n"
        "    try: main()\n    except SystemExit as end: print(end.code)\n"
        "print('torch' in sys.modules)"
    )
    assert loaded_by(code) == [*SCREEN.splitlines(), "0", f"grail-lightning {__version__}", "0", "2", "False"]


@pytest.mark.slow
def test_help_loads_nothing_heavy_that_lightning_and_transformers_do_not_load_themselves():
    code = (
        "import lightning.pytorch.cli, transformers\n"
        "import sys, contextlib, io\nbase = set(sys.modules)\nfrom grail_lightning.app.cli.app import main\n"
        "for args in (['--help'], ['fit', '--help']):\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): main(args)\n"
        "ours = {m.partition('.')[0] for m in sys.modules.keys() - base} - {m.partition('.')[0] for m in base}\n"
        "print(*ours, sep='\\n')"
    )
    heavy = {"vllm", "datasets", "matplotlib", "sympy", "math_verify", "peft", "scipy"}
    assert "grail_lightning" in (ours := {*loaded_by(code)})
    assert not ours & heavy


def test_what_the_first_screen_names_exists_and_help_lists_every_option(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert max(map(len, SCREEN.splitlines())) <= 105
    listed = {name: {*OPTION.findall(page(capsys, name, "--help"))} for name in SUBCOMMANDS}
    assert {*OPTION.findall(SCREEN)} - {"--version", "--model.optimizer.lr"} <= listed["fit"]
    for name in SUBCOMMANDS:
        parser = MADE[name]["_subcommand_parsers"][name]
        assert listed[name] >= {f"--{action.dest}" for action in parser._actions if "." in action.dest}
    assert "--model.credit.w_min" in page(capsys, "fit", "--model.credit.help", "GRAIL")
    for example in re.findall(r"grail-lightning (\w+ --config configs/.*)", SCREEN):
        assert "policy:" in page(capsys, *shlex.split(example), "--print_config")


def test_a_subcommand_that_is_none_is_named(capsys):
    for given in ([], ["fti", "--config=quickstart.yaml"]):
        assert "must be followed by fit, validate, test, predict or --help, but got" in fails(capsys, *given)
