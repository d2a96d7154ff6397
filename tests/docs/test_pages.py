"""What the documentation says about commands, options, metrics and columns is so."""

import inspect
import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from grail_lightning._version import __version__
from grail_lightning.answers.records import STATUSES
from grail_lightning.app.cli.classes import choices
from grail_lightning.app.cli.config_files import as_arguments, merged
from grail_lightning.app.cli.help import SUBCOMMANDS
from grail_lightning.core.records.columns import COLUMNS, PREDICTION, SAMPLE, TRAINING
from tests.benchmark_modules import script
from tests.shell import SHORT, main

ROOT = Path(__file__).parents[2]
DOCS, EXAMPLES = ROOT / "docs", ROOT / "docs" / "examples"
PAGES = {str(page.relative_to(DOCS)): page.read_text() for page in sorted(DOCS.rglob("*.md"))} | {
    "README": (ROOT / "README.md").read_text()
}


USER_PAGES = ("index", "getting_started", "first_task", "problems", "running", "one_gpu", "models", "which_method")
USER_PAGES += ("benchmark", "trl", "metrics", "compare", "your_credit", "environments", "programs", "pictures")


def test_users_have_sixteen_pages_that_are_short_and_say_what_one_can_do_after_them():
    pages = {name: text for name, text in PAGES.items() if "/" not in name and name != "README"}
    assert {name.removesuffix(".md") for name in pages} <= {*USER_PAGES}
    written = [re.sub(r"<!-- (?!end).*?<!-- end of .*?-->", "", text, flags=re.DOTALL) for text in pages.values()]
    assert sum(len(text.split()) for text in written) <= 35_000, "tables that programs make do not count"
    for name, text in pages.items():
        first = text.split("\n\n")[1]
        assert "fter this page you " in first or name == "index.md", name


def test_the_changes_are_one_page_of_which_the_newest_version_is_the_packages():
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert len(changes.split()) < 1000
    assert re.findall(r"^## (\S+)", changes, re.MULTILINE)[0] == __version__


def test_every_packaged_policy_stands_in_the_table_of_what_it_can_do():
    assets = ROOT / "grail_lightning" / "worlds" / "assets"
    names = [config.parent.name for config in assets.glob("*/config.json")]
    assert len(names) == 8
    for name in names:
        assert f"\n| `{name}` | " in PAGES["getting_started.md"], name


def test_messages_name_pages_that_are_installed_with_the_package():
    package = ROOT / "grail_lightning"
    texts = [file.read_text() for file in package.rglob("*.py")]
    named = {name for text in texts for name in re.findall(r"\bpage\([\"'](\S+?\.md)[\"']\)", text)}
    assert len(named) > 5
    for name in named:
        assert (package / "docs" / name).is_file(), name
    assert not [cited for text in texts for cited in re.findall(r"\bdocs/[\w/]+\.md", text)]
    patterns = (ROOT / "setup.cfg").read_text().partition("[options.package_data]")[2].partition("\n[")[0].split()
    assert {"docs/**/*.md", "README.md"} <= {*patterns}


@pytest.fixture(scope="module")
def hook():
    """The program that makes the page of options."""
    return script("options_page")


@pytest.fixture(scope="module")
def pages_script():
    """The program that fills the examples into the pages."""
    return script("fill_pages")


@pytest.fixture(scope="module")
def parsers(hook):
    """The parsers of the subcommands."""
    return {name: hook.parser_of(name) for name in SUBCOMMANDS}


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
                said = re.sub(r"(^| )--(gpus|gpu_memory_gib) [\d ]+", " ", arguments) if plan else arguments
                yield page, subcommand or "fit", [w for w in shlex.split(said, comments=True) if not w.startswith("$")]


def test_every_command_and_config_on_the_pages_is_one_that_the_parser_takes(parsers, monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    found = {(subcommand, *arguments): page for page, subcommand, arguments in commands()}
    assert len(found) > 40
    named = {word for command in found for word in command}
    for name in {file.name for file in EXAMPLES.glob("*.yaml")} - named:
        # A part of a config is parsed as one, on top of a whole one.
        found["fit", "--config", "first_run.yaml", "--config", name] = name
    for (subcommand, *arguments), page in found.items():
        if any({subcommand, *arguments} < set(longer) for longer in found):
            continue  # Another command has these options, and more.
        try:
            parsers[subcommand].parse_args(as_arguments(*merged(arguments)))
        except (ArgumentError, ValueError) as error:
            pytest.fail(f"{page}: {subcommand} {' '.join(arguments)}: {error}")


def test_every_example_is_on_a_page_as_it_is_and_pages_have_no_other_python(pages_script):
    blocks = [block for page in PAGES.values() for block in pages_script.BLOCK.findall(page)]
    files = {file.name for file in EXAMPLES.iterdir() if file.suffix in (".py", ".yaml")}
    assert files <= {name for _, name in blocks}
    for page, text in PAGES.items():
        if page == "reference/options.md":
            continue  # It is made of docstrings, examples of YAML among them.
        assert text == pages_script.filled(text), f"{page}: run python scripts/fill_pages.py"
        for block in re.findall(r"^```(?:python|yaml).*", text, re.MULTILINE):
            assert "title=" in block or page == "reference/methods.md", (page, block)
    stale = 'Before\n\n```yaml title="warm_up.yaml"\nother: text\n```\n\nAfter\n'
    wanted = (EXAMPLES / "warm_up.yaml").read_text()
    assert pages_script.filled(stale) == f'Before\n\n```yaml title="warm_up.yaml"\n{wanted}```\n\nAfter\n'


def test_the_table_of_kinds_of_answers_is_that_of_the_labelled_pairs():
    kinds = script("grading_kinds")
    assert kinds.filled(PAGES["reference/grading.md"]) == PAGES["reference/grading.md"], (
        "run python scripts/grading_kinds.py"
    )
    pairs = [json.loads(line) for line in (ROOT / "tests/answers/kinds.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {pair["subject"] for pair in pairs} == kinds.KINDS.keys()
    assert f"before{kinds.BEGIN}stale{kinds.END}after" != kinds.filled(f"before{kinds.BEGIN}stale{kinds.END}after")


def names_in_table():
    """The rows of the table of option names: TRL's, verl's and ours, and the note."""
    section = PAGES["reference/other_packages.md"].partition("\n## Names of options\n")[2]
    rows = [line.split("|")[1:] for line in section.splitlines() if line.startswith("| ")]
    return [(re.findall(r"(argument )?`(\w+)`", row[0]), re.findall("`([\\w.]+)`", row[2])) for row in rows[1:]]


def test_the_names_of_trl_in_the_table_of_options_exist():
    trl = pytest.importorskip("trl", minversion="1.16")
    settings = {field.name for field in fields(trl.GRPOConfig)}
    methods = (trl.GRPOTrainer.__init__, trl.GRPOTrainer.train)
    arguments = {name for method in methods for name in inspect.signature(method).parameters}
    found = [name for row, _ in names_in_table() for name in row]
    assert len(found) > 40
    for argument, name in found:
        assert name in (arguments if argument else settings), name


def test_our_names_in_the_table_of_options_exist(hook, parsers):
    options = {action.dest for action in hook.real_options(parsers["fit"])}
    found = [name for _, row in names_in_table() for name in row]
    assert len(found) > 40
    for name in found:
        option, _, leaf = name.rpartition(".")
        names = choices(option) if option in hook.BASES else []
        classes = [hook._imported(known, hook.BASES[option][1]) for known in names]
        assert name in options or any(leaf in inspect.signature(cls).parameters for cls in classes), name


def test_the_options_on_the_page_of_methods_are_ones_that_the_parser_takes(parsers, tmp_path):
    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGES["reference/methods.md"], re.MULTILINE | re.DOTALL)
    assert len(blocks) > 1
    for block in blocks:
        file = tmp_path / "method.yaml"
        file.write_text(yaml.safe_dump({"model": yaml.safe_load(block)}))
        given = [f"--config={EXAMPLES / 'first_run.yaml'}", f"--config={file}"]
        parsers["fit"].parse_args(as_arguments(*merged(given)))


def test_every_option_of_the_parser_stands_on_the_page_of_options(hook, parsers):
    page = hook.options_page()
    assert page in PAGES["reference/options.md"], "run python scripts/fill_pages.py"
    for action in hook.real_options(parsers["fit"]):
        (row,) = [line for line in page.splitlines() if line.startswith(f'| <a id="{action.dest}"></a>')]
        assert row.count("`") >= 4
        if action.dest not in ("config",):
            assert row.rstrip("| ").rpartition("| ")[2], f"{action.dest} has no meaning"
    of_tasks = ("data.task", "data.task.answer", "data.task.isolation")
    for option in ("model.credit", "model.control", "model.engine", "data", *of_tasks):
        for name in choices(option):
            assert f"### {name} {{#" in page
    assert "`saliency.leaf`" in page, "groups inside a class"
    assert "## FewShot" in page, "groups inside an option"
    assert "SUPPRESS" not in page


@pytest.mark.parametrize(("world", "dataset"), [("quickstart", "arithmetic"), ("quickstart_search", "search")])
def test_every_logged_figure_stands_on_the_page_of_metrics(world, dataset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more = ["--model.objective.kl_coefficient=0.01", "--model.execution.refill_rounds=1", "--evaluation.num_samples=2"]
    more += ["--evaluation.pass_at=[1,2]", "--evaluation.maj_at=[2]", "--trainer.max_steps=1"]
    more += ["--evaluation.at_start=false", "--data.num_val=4", "--data.num_train=16"]
    main(["fit", f"--config=configs/{world}.yaml", *SHORT[1:], *more])
    tags = EventAccumulator(f"runs/{world}").Reload().Tags()["scalars"]
    assert len(tags) > 60
    for tag in tags:
        name = re.sub(rf"verdict/({'|'.join(STATUSES)})$", "verdict/<status>", tag)
        name = re.sub(r"(pass|maj)_at_\d+", r"\1_at_<k>", name)
        name = re.sub(r"rewards/\w+/mean", "rewards/<name>/mean", name).replace(f"val/{dataset}/", "val/<dataset>/")
        assert f"`{name}`" in PAGES["metrics.md"], f"{tag} as `{name}`"


def test_every_entry_of_a_kept_evaluation_stands_on_the_page_of_files():
    section = PAGES["reference/files.md"].partition("\n## samples\n")[2].partition("\n## ")[0]
    for entry in ("model", "engine", "sampling", "num_samples", "seed", "datasets", "grading", "created", "finished"):
        assert f"`{entry}`" in section, entry


def test_every_column_stands_on_the_page_of_files_with_its_type_and_its_files():
    section = PAGES["reference/files.md"].partition("\n## Columns\n")[2]
    rows = [[cell.strip() for cell in line.split(" | ")] for line in section.splitlines() if line.startswith("| `")]
    assert [name.strip("|` ") for name, *_ in rows] == [*COLUMNS]
    assert {*TRAINING, *SAMPLE, *PREDICTION} == COLUMNS.keys(), "every column is in a file"
    for name, kind, files, _ in rows:
        column = name.strip("|` ")
        assert kind.replace("list of ", "list<") == COLUMNS[column].kind.removesuffix(">")
        there = {"rollouts": TRAINING, "samples": SAMPLE, "predictions": PREDICTION}
        assert files == ", ".join(file for file, names in there.items() if column in names)


def test_every_credit_method_stands_on_the_pages_that_compare_them():
    for name in choices("model.credit"):
        assert f"`{name}`" in PAGES["which_method.md"], name
        assert f"`{name}`" in PAGES["reference/methods.md"] or name == "Uniform", name


@pytest.mark.parametrize(
    ("page", "column", "intervals", "heading", "row", "figure"),
    [
        ("training_studies", "minus Dr. GRPO, points", 4, "Sums of five terms", "GRAIL", (-1.8, 1.0)),
        ("one_step", "share, Adam", 5, "In one step: five terms", "GRAIL", (-0.36, 0.07)),
    ],
)
def test_the_pictures_of_a_study_have_every_figure_of_the_tables(page, column, intervals, heading, row, figure):
    text = PAGES[f"research/{page}.md"]
    tables = script("plot_study").differences(text, column)
    sections = re.findall(r"^### (.+?)\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    rows = {name: [line for line in text.splitlines() if line.startswith("|")] for name, text in sections}
    drawn = {name: sum(line.count(" ±") >= intervals for line in lines) for name, lines in rows.items()}
    assert {name: len(table) for name, table in tables.items()} == {
        name: number for name, number in drawn.items() if name in tables and number
    }
    assert tables[heading][row] == figure


def test_the_curves_of_a_study_are_means_over_its_finished_seeds(tmp_path):
    for seed, values in enumerate(((0.25, 0.5), (0.5, 1.0))):
        folder = tmp_path / f"GRPO_{seed}"
        with SummaryWriter(str(folder)) as writer:
            for step, value in enumerate(values):
                writer.add_scalar("val/accuracy", value, 10 * step)
        record = {"state": "finished", "task": "sums", "method": "Dr. GRPO", "seed": seed}
        (folder / "sweep.json").write_text(json.dumps(record))
    plot_study = script("plot_study")
    plot_study.draw_curves(tmp_path, ["Dr. GRPO"], tmp_path / "curves.png")
    (drawn,) = (container.lines[0].get_ydata().tolist() for container in plot_study.plt.gca().containers)
    plot_study.plt.close("all")
    assert drawn == [0.375, 0.75]
    assert (tmp_path / "curves.png").stat().st_size
