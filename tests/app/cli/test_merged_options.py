"""Config files and arguments become one mapping of options, and classes of other names keep what is meant to stay."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from grail_lightning.app.cli.app import FitOptions
from grail_lightning.app.cli.config_files import DEFAULTS, NO_VALUE, as_arguments, merged, with_arguments

OAR = {"class_path": "OARGradient", "init_args": {"bilevel": {"boost": 7.0}}}
# The default as it is given to jsonargparse: classes have their import paths.
WITH_PATHS = {"model": {"objective": {"class_path": "grail_lightning.DrGRPO"}}}
QUICKSTART = "--config=quickstart.yaml"


@pytest.fixture(scope="module")
def options():
    return FitOptions()


@pytest.fixture
def written(tmp_path, monkeypatch):
    """The arguments that name files with these contents."""
    monkeypatch.chdir(tmp_path)

    def arguments(*contents):
        for number, content in enumerate(contents):
            Path(f"{number}.yaml").write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return [f"--config={number}.yaml" for number in range(len(contents))]

    return arguments


def test_mappings_are_merged_lists_replaced_and_a_plus_sign_adds(written):
    files = written(
        {"a": {"x": 1, "y": [1, 2]}, "b": [1], "c": [1]},
        {"a": {"y": [3], "z": 4}, "b+": [2], "c+": 2, "d+": 1},
        {"config": "0.yaml", "a": {"x": None}, "d+": [2]},
    )
    found, rest = merged(["fit", *files, "--e=1", "--print_config"])
    assert found == DEFAULTS | {"a": {"x": None, "y": [3], "z": 4}, "b": [1, 2], "c": [1, 2], "d+": [1, 2]}
    assert rest == ["fit", "--e=1", "--print_config"]
    subcommand, config, *others = as_arguments(found, rest)
    assert (subcommand, others) == ("fit", ["--e=1", "--print_config"])
    assert yaml.safe_load(config.removeprefix("--config=")) == found | WITH_PATHS
    assert as_arguments({}, rest) == rest


@pytest.mark.parametrize(
    "another",
    [
        "--config=1.yaml",
        "--config=2.yaml",
        "--model.credit=OARPerturbation",
        "--model.credit\tOARPerturbation",
        "--model.credit.class_path=OARPerturbation",
        "--model.credit={class_path: OARPerturbation}",
        "--model.credit=grail_lightning.credit.OARPerturbation",
    ],
)
def test_another_credit_method_begins_with_its_own_options(another, options, written):
    name = "OARPerturbation"
    first, *_ = written(*({"model": {"credit": credit}} for credit in (OAR, name, {"class_path": name})))
    default = options.parse([QUICKSTART, f"--model.credit={name}"]).model.credit
    given = [["--model.credit=OARGradient", "--model.credit.bilevel.boost=7"]] * (not another.startswith("--config"))
    for before in ([first], *given):
        assert options.parse([QUICKSTART, *before]).model.credit.init_args.bilevel.boost == 7
        assert options.parse([QUICKSTART, *before, *another.split("\t")]).model.credit == default
    assert default.init_args.bilevel.boost != 7


@pytest.mark.parametrize("same", ["OARGradient", "grail_lightning.credit.OARGradient"])
def test_the_same_class_keeps_its_options(same, options, written):
    for later in ({"model": {"credit": same}}, {"model": {"credit": {"class_path": same}}}):
        files = written({"model": {"credit": OAR}}, later)
        assert options.parse([QUICKSTART, *files]).model.credit.init_args.bilevel.boost == 7
    assert options.parse([QUICKSTART, files[0], f"--model.credit={same}"]).model.credit.init_args.bilevel.boost == 7


def test_another_optimiser_logger_or_data_module_keeps_the_options_that_both_have(options, written):
    later = {
        "model": {"optimizer": "SGD"},
        "trainer": {"logger": {"class_path": "CSVLogger"}},
        "data": {"class_path": "MathData", "init_args": {"train": "train.jsonl"}},
    }
    given = ["--model.optimizer=SGD", "--trainer.logger=CSVLogger", "--data=MathData", "--data.train=train.jsonl"]
    for arguments in (written(later), given):
        found = options.parse([QUICKSTART, *arguments])
        assert found.model.optimizer.init_args.lr == 1e-4  # The quickstart's; betas are none of SGD's.
        assert (found.trainer.logger.init_args.save_dir, found.trainer.logger.init_args.name) == ("runs", "quickstart")
        assert found.data.init_args.prompts_per_batch == 16


def test_a_kept_option_has_a_value_that_the_other_class_accepts(options, written):
    """The problems of both are other options: sums have terms."""
    sums = {"data": {"class_path": "ArithmeticData", "init_args": {"problems": {"max_terms": 6}, "num_val": 9}}}
    found = options.parse([QUICKSTART, *written(sums, {"data": {"class_path": "SearchData"}})]).data
    default = options.parse([QUICKSTART, "--data=SearchData"]).data
    assert (found.init_args.problems, found.init_args.num_val) == (default.init_args.problems, 9)


def test_a_list_on_the_command_line_replaces_one_of_class_names_too(options, written):
    monitor = {"class_path": "LearningRateMonitor", "init_args": {"logging_interval": "step"}}
    files = written({"trainer": {"callbacks": [monitor]}})
    (found,) = options.parse([QUICKSTART, *files, "--trainer.callbacks=[LearningRateMonitor]"]).trainer.callbacks
    assert found.init_args.logging_interval is None


def test_numbers_and_texts_of_a_file_are_read_as_jsonargparse_reads_them(written):
    (file,) = written("a: 1e-4\nb: '1e-4'\nc: 2024-01-01\nd: .inf\ne: 'null'\nf: 'http://x:1'\n")
    found, rest = merged([file])
    assert found == DEFAULTS | {
        "a": 1e-4,
        "b": "1e-4",
        "c": "2024-01-01",
        "d": float("inf"),
        "e": "null",
        "f": "http://x:1",
    }
    (config,) = as_arguments(found, rest)
    assert merged(written("trainer:\n"))[0] == DEFAULTS | {"trainer": None}
    Path("1.yaml").write_text(config.removeprefix("--config="))
    assert merged(["--config=1.yaml"])[0] == found | WITH_PATHS


def test_classes_are_handed_to_the_parser_by_their_import_paths(written):
    credit = "grail_lightning.credit.GRAIL"
    task = {"class_path": "MathTask", "init_args": {"answer": "Marker", "instruction": "GRAIL"}}
    callbacks = [{"class_path": "KeepRollouts"}, "EarlyStopping", "mine.Own", "Unknown"]
    files = written({"model": {"credit": "GRAIL"}, "data": {"class_path": "MathData", "init_args": {"task": task}}})
    given = ["--model.credit.class_path=GRAIL", "--model.credit.help=GRAIL", "--model.policy=GRAIL"]
    given += [f"--trainer.callbacks={callbacks}", "--model.control={class_path: Random}"]
    _, config, *rest = as_arguments(*merged(["fit", *files, *given]))
    options = yaml.safe_load(config.removeprefix("--config="))
    of_task = options["data"]["init_args"]["task"]
    assert (options["model"]["credit"], options["data"]["class_path"]) == (credit, "grail_lightning.MathData")
    assert of_task["class_path"] == "grail_lightning.MathTask"
    assert of_task["init_args"] == {"answer": "grail_lightning.answers.Marker", "instruction": "GRAIL"}
    values = dict(argument.split("=", 1) for argument in rest)
    assert (values["--model.credit.class_path"], values["--model.credit.help"]) == (credit, credit)
    assert values["--model.policy"] == "GRAIL"
    assert yaml.safe_load(values["--model.control"]) == {"class_path": "grail_lightning.credit.Random"}
    assert yaml.safe_load(values["--trainer.callbacks"]) == [
        {"class_path": "grail_lightning.KeepRollouts"},
        *("lightning.pytorch.callbacks.EarlyStopping", "mine.Own", "Unknown"),
    ]


def test_files_and_arguments_are_one_mapping_as_the_parser_reads_them(written):
    files = written({"model": {"credit": OAR, "optimizer": "SGD"}, "d": [{"x": 1}], "d+": [{"x": 2}]})
    given = ["--model.credit.rest=3", "--model.optimizer.lr", "-1", "--d+={x: 3}", "--d.y=4", "--flag"]
    found = with_arguments(*merged(["fit", *files, *given]))
    assert found["model"]["credit"] == OAR | {"init_args": OAR["init_args"] | {"rest": "3"}}
    assert found["model"]["optimizer"] == {"class_path": "SGD", "init_args": {"lr": "-1"}}
    assert found["d"] == [{"x": 1}, {"x": 2}, {"x": 3, "y": "4"}]
    assert found["flag"] is NO_VALUE


def test_a_name_with_points_and_a_group_in_a_file_of_its_own_are_merged(options, written, tmp_path):
    (tmp_path / "sampling.yaml").write_text("temperature: 0.25\n")
    files = written("trainer.max_steps: 3\nmodel: {sampling: sampling.yaml}\ntrainer: {max_epochs: 4}\n")
    found = options.parse([QUICKSTART, *files])
    assert (found.trainer.max_steps, found.trainer.max_epochs) == (3, 4)
    assert (found.model.sampling.temperature, found.model.sampling.max_response_length) == (0.25, 64)


def test_short_names_are_known_wherever_a_class_is_an_option():
    """jsonargparse knows the short names of classes that are imported, and ours are imported where they are named."""
    inner = "--model.credit.inner"
    options = [
        "--model.credit=PermutedRewards",
        f"{inner}=PermutedRewards",
        f"{inner}.inner=AttentionRhythm",
    ]
    parsed = f"FitOptions().parse({[QUICKSTART, *options]}).model.credit"
    code = f"from grail_lightning.app.cli.app import FitOptions; print({parsed})"
    end = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "AttentionRhythm" in end.stdout, end.stderr


@pytest.mark.parametrize(
    ("content", "option", "value"),
    [
        ({"model": {"objective": {"clip_high": 0.3}}}, "model.objective.clip_high", 0.3),
        ({"model.objective.clip_high": 0.3, "model": {"objective": "GRPO"}}, "model.objective.clip_high", 0.3),
        ({"model.optimizer.lr": 0.3, "model.optimizer": "SGD"}, "model.optimizer.lr", 0.3),
        ({"model": {"credit": {"saliency": {"leaf": "embeddings"}, "std": 0.3}}}, "model.credit.std", 0.3),
        ({"model": {"credit": {"class_path": "LESS"}}, "model.credit.share": 0.3}, "model.credit.share", 0.3),
        ({"model.advantage": "GroupMean", "model.advantage.share": 0.3}, "model.advantage.share", 0.3),
        ({"data": {"num_val": 3}}, "data.num_val", 3),
    ],
)
def test_options_of_a_class_in_a_file_need_neither_its_name_nor_init_args(content, option, value, options, written):
    """As on the command line."""
    found = options.parse([QUICKSTART, *written(content)])
    *group, name = option.split(".")
    for part in group:
        found = found[part].get("init_args", found[part])
    assert found[name] == value


def test_a_file_before_may_have_options_of_the_default_class_alone(options, written):
    alone, named = {"model": {"credit": {"std": 0.3}}}, {"model": {"credit": {"class_path": "GRAIL"}}}
    for files in (written(alone, named), [*written(alone), "--model.credit=GRAIL"]):
        assert options.parse([QUICKSTART, *files]).model.credit.init_args.std == 0.3
    assert (
        "std" not in options.parse([QUICKSTART, *written(alone, {"model": {"credit": "LESS"}})]).model.credit.init_args
    )
