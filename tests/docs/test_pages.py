"""What the documentation says about commands, options, metrics and columns is so."""

import importlib.util
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grail_lightning.callbacks.choices import choices
from grail_lightning.callbacks.prediction_columns import prediction_types
from grail_lightning.callbacks.rollouts import _TRAINING_COLUMNS
from grail_lightning.cli.config_files import expand_configs
from grail_lightning.evaluation import Sample
from grail_lightning.metrics import STATUSES
from tests.shell import RUN, SHORT, main

ROOT = Path(__file__).parents[2]
DOCS, EXAMPLES = ROOT / "docs", ROOT / "docs" / "examples"
PAGES = {page.name: page.read_text() for page in sorted(DOCS.glob("*.md"))} | {
    "README": (ROOT / "README.md").read_text()
}


@pytest.fixture(scope="module")
def hook():
    """The hook of mkdocs.yml, which makes the page of options."""
    spec = importlib.util.spec_from_file_location("docs_hook", ROOT / "scripts" / "docs_hook.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def parsers(hook):
    """The parsers of the subcommands."""
    return hook.parsers()


COMMAND = re.compile(
    r"^ *(?:\$ |srun )?(?:grail-lightning (fit|validate|test|predict)|python -m grail_lightning\.(plan)) (.*)$",
    re.MULTILINE,
)


def commands():
    """Every command line of `grail-lightning` on the pages: page, subcommand and arguments."""
    for page, text in PAGES.items():
        for subcommand, plan, arguments in COMMAND.findall(text):
            if "…" not in arguments and "--help" not in arguments:
                # A plan takes the options of `fit`, and more.
                said = re.sub(r" --gpus [\d ]+", "", arguments) if plan else arguments
                yield page, subcommand or "fit", [w for w in shlex.split(said, comments=True) if not w.startswith("$")]


def test_every_command_on_the_pages_is_one_that_the_parser_takes(parsers, monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    found = list(commands())
    assert len(found) > 40
    for page, subcommand, arguments in found:
        try:
            parsers[subcommand].parse_args(expand_configs(arguments))
        except (ArgumentError, ValueError) as error:
            pytest.fail(f"{page}: {subcommand} {' '.join(arguments)}: {error}")


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.name)
def test_every_config_of_the_examples_is_one_that_the_parser_takes(example, parsers, monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    # A part of a config is parsed as one, on top of a whole one.
    found = parsers["fit"].parse_args(expand_configs(["--config=first_run.yaml", f"--config={example.name}"]))
    given = yaml.safe_load(example.read_text())
    assert given
    assert all(found[group] is not None for group in given.keys() - {"config"})


def test_every_example_is_on_a_page_and_pages_have_no_other_python():
    shown = set(re.findall(r'^ *--8<-- "([\w.]+)"', "\n".join(PAGES.values()), re.MULTILINE))
    files = {file.name for file in EXAMPLES.iterdir() if file.suffix in (".py", ".yaml")}
    for page, text in PAGES.items():
        for title, block in re.findall(
            r'^```(?:python|yaml)(?: title="([^"]*)")?\n(.*?)^```', text, re.MULTILINE | re.DOTALL
        ):
            assert title or block.startswith("--8<--") or page == "methods.md", (page, block)
            assert not title or block == (EXAMPLES / title).read_text(), f"{page} must show the present {title}"
            shown.add(title)
    assert files <= shown


def test_the_options_on_the_page_of_methods_are_ones_that_the_parser_takes(parsers, tmp_path):
    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGES["methods.md"], re.MULTILINE | re.DOTALL)
    assert len(blocks) > 1
    for block in blocks:
        file = tmp_path / "method.yaml"
        file.write_text(yaml.safe_dump({"model": yaml.safe_load(block)}))
        parsers["fit"].parse_args(expand_configs([f"--config={EXAMPLES / 'first_run.yaml'}", f"--config={file}"]))


def test_every_option_of_the_parser_stands_on_the_page_of_options(hook, parsers):
    page = hook.options_page()
    for action in hook.real_options(parsers["fit"]):
        (row,) = [line for line in page.splitlines() if line.startswith(f'| <a id="{action.dest}"></a>')]
        assert row.count("`") >= 4
        if action.dest not in ("config",):
            assert row.rstrip("| ").rpartition("| ")[2], f"{action.dest} has no meaning"
    for option in ("model.credit", "model.control", "model.engine", "data", "data.task", "data.task.answer"):
        for name in choices(option):
            assert f"### {name} {{#" in page
    assert "`saliency.leaf`" in page, "groups inside a class"
    assert "## FewShot" in page, "groups inside an option"
    assert "SUPPRESS" not in page


def test_every_logged_figure_stands_on_the_page_of_metrics(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more = ["--model.objective.kl_coefficient=0.01", "--model.execution.refill_rounds=1", "--evaluation.num_samples=2"]
    main(["fit", *SHORT, *more, "--evaluation.pass_at=[1,2]", "--evaluation.maj_at=[2]", "--trainer.max_steps=1"])
    tags = EventAccumulator(str(RUN)).Reload().Tags()["scalars"]
    assert len(tags) > 60
    for tag in tags:
        name = re.sub(rf"verdict/({'|'.join(STATUSES)})$", "verdict/<status>", tag)
        name = re.sub(r"(pass|maj)_at_\d+", r"\1_at_<k>", name)
        name = re.sub(r"rewards/\w+/mean", "rewards/<name>/mean", name).replace("val/arithmetic/", "val/<dataset>/")
        assert f"`{name}`" in PAGES["metrics.md"], f"{tag} as `{name}`"


def test_every_field_of_a_kept_sample_stands_on_the_page_of_files():
    section = PAGES["files.md"].partition("\n## samples\n")[2].partition("\n## ")[0]
    for field in fields(Sample):
        assert f"`{field.name}`" in section, field.name
    for entry in ("model", "engine", "sampling", "num_samples", "seed", "datasets", "grading", "created", "finished"):
        assert f"`{entry}`" in section, entry


@pytest.mark.parametrize("columns", [_TRAINING_COLUMNS, prediction_types([])])
def test_every_column_stands_on_the_page_of_files_with_its_type(columns):
    rows = [line for line in PAGES["files.md"].splitlines() if line.startswith("| `")]
    for name, kind in columns.items():
        (row,) = [line for line in rows if f"`{name}`" in line.split("|")[1]]
        inner = kind.removeprefix("list<").removesuffix(">")
        assert inner in row.split("|")[2]
        assert kind.startswith("list<") == ("list" in row.split("|")[2])


def test_every_credit_method_stands_on_the_pages_that_compare_them():
    for name in choices("model.credit"):
        assert f"`{name}`" in PAGES["which_method.md"], name
        assert f"`{name}`" in PAGES["methods.md"] or name == "Uniform", name
