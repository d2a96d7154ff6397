"""How tests run the command line: as the shell would, in this process, on a shortened quickstart."""

from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI

from grail_lightning.app.cli.app import GrailCLI
from grail_lightning.app.cli.app import main as entry_point

SHORT = [
    "--config=configs/quickstart.yaml",
    "--trainer.max_steps=2",
    "--trainer.val_check_interval=1",
    "--trainer.enable_progress_bar=false",
    "--pictures.every_n_batches=0",
    "--model.sampling.max_response_length=44",
    "--model.execution.group_size=4",
    "--evaluation.sampling.max_response_length=44",
    "--data.num_train=32",
    "--data.num_val=8",
    "--data.num_test=8",
    "--data.prompts_per_batch=4",
]
EVALUATED = [option for option in SHORT if not option.startswith(("--trainer.max_steps", "--trainer.val_check"))]
RUN = Path("runs/quickstart")


MADE = {}


def make_parser_once(cli, *settings):
    """Make each subcommand's parser once: that takes longer than to use it, and it keeps nothing that it has parsed."""
    before, (name,) = vars(cli).copy(), cli.subcommands()
    if name not in MADE:
        LightningCLI.setup_parser(cli, *settings)
        MADE[name] = {name: value for name, value in vars(cli).items() if name not in before}
    vars(cli).update(MADE[name])


def main(args):
    """As the shell would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["grail-lightning", *args])
        entry_point()


def fails(capsys, *args):
    """The one line that a user sees."""
    with pytest.raises(SystemExit) as stop:
        main([*args])
    assert stop.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(lines) == 1
    return lines[0]


def fails_early(capsys, *args):
    """The one line that a user sees before a model is loaded."""
    with pytest.MonkeyPatch.context() as patch:
        loaded = "grail_lightning.core.distributed.sharding.load_policy"
        patch.setattr(loaded, lambda *_, **__: pytest.fail("a model was loaded"))
        return fails(capsys, *args)


def refusal(capsys, program, *arguments):
    """The one line of a program beside the command line, which prints nothing else."""
    with pytest.raises(SystemExit) as stop:
        program([*map(str, arguments)])
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    return line


def built(*args, subcommand="fit"):
    """The command line's module, data and trainer, without a run."""
    made = []

    class Built(GrailCLI):
        def _run_subcommand(self, subcommand):
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grail_lightning.app.cli.app.GrailCLI", Built)
        main([subcommand, *args])
    return made[0]
