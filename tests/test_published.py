"""The configs of the published runs: a file of a model and one of a method, on one base."""

from itertools import cycle
from pathlib import Path

import pytest
import torch
import yaml

from grail_lightning.app.cli.app import FitOptions
from grail_lightning.app.cli.config_files import expand_configs
from grail_lightning.core.runtime.run_folder import RunFolder
from grail_lightning.credit import OARGradient
from tests.shell import built, fails

pytestmark = pytest.mark.usefixtures("empty_folder")

ROOT = Path(__file__).parents[1]
MODELS = {
    "qwen3_4b": "Qwen/Qwen3-4B",
    "qwen3_8b": "Qwen/Qwen3-8B",
    "octothinker_3b": "OctoThinker/OctoThinker-3B-Short-Base",
    "octothinker_8b": "OctoThinker/OctoThinker-8B-Short-Base",
    "r1_distill_llama_8b": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
}
METHODS = {"grpo": "Uniform", "grail": "GRAIL", "oar_g": "OARGradient"}
SMALL = [
    "--model.policy=arithmetic",
    "--model.sampling.max_response_length=64",
    "--model.loading.attention=sdpa",
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.strategy=auto",
]


def _files(model, method):
    return [f"--config=configs/published/{name}.yaml" for name in (model, method)]


@pytest.mark.parametrize(("model", "method"), list(zip(MODELS, cycle(METHODS), strict=False)))
def test_each_run_has_the_published_options(model, method):
    assert {file.stem for file in (ROOT / "configs" / "published").glob("*.yaml")} == {"base", *MODELS, *METHODS}
    options = FitOptions().parse(_files(model, method))
    assert options.model.policy == MODELS[model]
    assert options.model.credit.class_path.endswith(f".{METHODS[method]}")
    assert options.trainer.strategy.init_args.data_parallel_size == options.trainer.devices == 4
    assert options.trainer.precision == "bf16-mixed"
    objective, execution, sampling = options.model.objective.init_args, options.model.execution, options.model.sampling
    assert (execution.num_iterations, execution.group_size, objective.aggregation) == (4, 8, "dr_grpo")
    assert (objective.clip_low, objective.clip_high, objective.kl_coefficient, sampling.top_k) == (0.2, 0.28, 0.0, 50)
    assert options.data.init_args.prompts_per_batch == 32


@pytest.mark.parametrize("config", ["published/base.yaml", "eval_math.yaml"])
def test_boxes_in_the_thinking_count_as_in_the_published_graders(config):
    task = yaml.safe_load((ROOT / "configs" / config).read_text())["data"]["init_args"]["task"]
    assert task["init_args"]["answer"] == {"class_path": "Boxed", "init_args": {"in_thinking": True}}


def test_a_run_is_instantiated():
    """The packaged policy and a CPU stand in for the model and the GPUs alone."""
    made = built(*_files("qwen3_8b", "oar_g"), *SMALL)
    assert type(made.model.credit) is OARGradient
    (group,) = made.model.optimizer([torch.nn.Parameter(torch.ones(1))]).param_groups
    assert (group["lr"], group["weight_decay"]) == (1e-6, 0.0)
    assert RunFolder(made.trainer).path == Path("runs", "qwen3_8b", "oar_g")


def test_the_order_of_files_does_not_matter_and_the_runs_of_qwen3_4b_have_files_of_their_own():
    parser, files = FitOptions(), _files("qwen3_8b", "grail")
    one, other = parser.parse(files), parser.parse(files[::-1])
    assert (one.model, one.trainer.logger) == (other.model, other.trainer.logger)
    for method in METHODS:
        *read, _, own = expand_configs([f"--config=configs/qwen3_4b_{method}.yaml"])
        assert read == expand_configs(_files("qwen3_4b", method))
        assert yaml.safe_load(Path(own).read_text()).keys() == {"config"}


def test_a_file_that_several_build_on_is_read_once(tmp_path):
    """Read again it would undo what the first of them changes."""
    (tmp_path / "base.yaml").write_text("config: configs/quickstart.yaml\nseed_everything: 1")  # The package's.
    (tmp_path / "one.yaml").write_text("config: base.yaml\nseed_everything: 2")
    (tmp_path / "two.yaml").write_text("config: base.yaml")
    (tmp_path / "both.yaml").write_text("config: [one.yaml, two.yaml]")
    names = ["base.yaml", "one.yaml", "two.yaml"]
    for given, read in ((["one.yaml", "two.yaml"], names), (["both.yaml"], [*names, "both.yaml"])):
        arguments = expand_configs([part for file in given for part in ("--config", file)])
        assert arguments[2:] == [part for file in read for part in ("--config", file)]
        options = FitOptions().parse([f"--config={file}" for file in given])
        assert (options.seed_everything, options.model.policy, options.trainer.max_steps) == (2, "arithmetic", 120)
    # A file that is given twice is meant twice.
    assert expand_configs(["--config=base.yaml", "--config=base.yaml"])[2:] == ["--config", "base.yaml"] * 2


def test_a_method_without_a_model_is_one_line(capsys):
    assert "`model.policy` must be given" in fails(capsys, "fit", "--config=configs/published/grail.yaml")
