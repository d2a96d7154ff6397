"""The package on CUDA, without a GPU: whole steps on tensors that say they are there (`tests/fake_cuda`).

Tensors of two devices in one operator are errors, as on CUDA, and so is an index on the CPU into a table on CUDA.
Kernels and waits of the host are counted. Budgets stand here: what exceeds one costs time on every GPU.
"""

import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from inspect import isabstract
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths, library_paths

from grail_lightning import credit
from tests.benchmark_modules import benchmark

ROOT = Path(__file__).parents[1]
MADE_FOR = "2.13"
"""The release of torch whose insides the device uses."""

OF_TRANSFORMERS = "policy/model.py:_run_decoder"
"""It looks in each pass of padded rows whether there is padding."""
KERNELS_OF_A_TOKEN = 200
PLAIN = {"loading": {"master_weights": False}}
APART, FOUR_LAYERS = {"execution": {"share_prefixes": False}}, {"layers": 4}
STEPS = {
    "trees": PLAIN,
    "trees, four layers": PLAIN | FOUR_LAYERS,
    "rows": PLAIN | APART,
    "rows, four layers": PLAIN | APART | FOUR_LAYERS,
    "bf16-mixed": {"precision": "mixed", "credit_method": "GRAIL()"},
    "float32": {
        "precision": "full",
        "loading": {"lora": 4, "gradient_checkpointing": True},
        "objective": {"kl_coefficient": 0.05, "entropy_coefficient": 0.01},
        "execution": {"mini_batches": 2, "num_iterations": 2},
    },
    "packed": {"loading": {"packing": True}, "objective": {"algorithm": "SDPG", "coefficient": 0.1}, "batches": 1},
    "long": {"lengths": (150, 160), "execution": {"token_budget": 700}, "batches": 1},
    **{
        f"{method}{more}": {"sampled": method, "lengths": (1, tokens), "batches": 1, "precision": "full"}
        for method in ("compact", "static", "auto")
        for more, tokens in (("", 12), (", longer", 28))
    },
    "static, waits": {"sampled": "auto", "lengths": (1, 12), "batches": 1, "precision": "full", "waits": True},
    "generate": {"sampled": "generate", "lengths": (1, 4), "batches": 1},
}


@pytest.fixture(scope="session")
def on_fake_cuda(tmp_path_factory):
    """Runs a module of `tests.fake_cuda` in a process of its own, and returns what it has printed."""
    compiler = shutil.which("g++")
    if compiler is None or not version("torch").startswith(f"{MADE_FOR}."):
        pytest.skip(f"it needs g++, and torch {MADE_FOR}")
    source = ROOT / "tests" / "fake_cuda" / "guard.cpp"
    key = hashlib.sha256(f"{version('torch')}{source.read_text()}".encode()).hexdigest()[:16]
    guard = tmp_path_factory.getbasetemp().parent / f"fake_cuda_{key}.so"  # Later runs find it, too.
    if not guard.exists():
        (folder,) = library_paths("cpu")
        paths = [*(f"-I{path}" for path in include_paths("cpu")), f"-L{folder}", f"-Wl,-rpath,{folder}"]
        made = guard.with_suffix(f".{os.getpid()}")
        options = ["-shared", "-fPIC", "-std=c++20", "-O1", "-ltorch_cpu", "-lc10", "-o", str(made)]
        subprocess.run([compiler, str(source), *paths, *options], check=True)
        made.replace(guard)

    def run(module, *arguments):
        command = [sys.executable, "-m", f"tests.fake_cuda.{module}", *arguments]
        # Torch's compiler does not know the device.
        env = os.environ | {"FAKE_CUDA_GUARD": str(guard), "TORCHDYNAMO_DISABLE": "1"}
        ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert not ended.returncode, ended.stderr[-3000:]
        return ended.stdout

    return run


@pytest.fixture(scope="module")
def steps(on_fake_cuda):
    """What each of the cases `STEPS` has shown in its last batch."""
    return json.loads(on_fake_cuda("steps", json.dumps(STEPS | {"resumed": {}})).splitlines()[-1])


def kernels(found, window, at=""):
    """The number of kernels in a window, at places that match an expression."""
    return sum(number for place, number in found["windows"][window]["kernels"].items() if re.search(at, place))


def waits(found, window, but="^$"):
    """The number of waits in a window, without those at places that match an expression."""
    return sum(number for place, number in found["windows"][window]["waits"].items() if not re.search(but, place))


@pytest.mark.parametrize("name", STEPS)
def test_no_operator_of_a_step_has_tensors_of_two_devices(steps, name):
    assert "error" not in steps[name], steps[name]
    assert steps[name]["windows"]["training_step"]["calls"] == 1


def test_flash_attention_computes_trees_where_half_precision_allows_it(steps):
    found = {name: steps[name]["tree_kernel"] for name in ("trees", "bf16-mixed", "float32")}
    assert found == {"trees": "varlen", "bf16-mixed": "varlen", "float32": "sdpa"}


def test_rows_with_little_in_common_copy_no_keys(steps):
    copies = "policy/trees.py:forward"
    assert kernels(steps["trees"], "_run_passes", at=copies) > 0
    assert kernels(steps["long"], "_run_passes", at="varlen") > 0
    assert kernels(steps["long"], "_run_passes", at=copies) == 0


@pytest.mark.parametrize(("layout", "a_layer", "outside"), [("trees", 380, 450), ("rows", 405, 470)])
def test_the_kernels_of_a_step_of_two_micro_batches_are_within_their_budget(steps, layout, a_layer, outside):
    two, four = (steps[name] for name in (layout, f"{layout}, four layers"))
    assert two["windows"]["micro_batch_loss"]["calls"] == four["windows"]["micro_batch_loss"]["calls"] == 2
    each = (kernels(four, "training_step") - kernels(two, "training_step")) / 2
    assert each <= a_layer
    assert kernels(two, "training_step") - 2 * each <= outside


@pytest.mark.parametrize("name", ["trees", "long", "rows"])
def test_the_host_does_not_wait_between_the_first_forward_pass_of_a_step_and_its_clip(steps, name):
    found = steps[name]
    assert waits(found, "_run_passes", but=OF_TRANSFORMERS) == 0, found["windows"]["_run_passes"]["waits"]


def test_waits_of_an_optimiser_step_and_of_a_batch_are_within_their_budget(steps):
    found = steps["trees"]
    assert waits(found, "take_steps") <= 6
    assert waits(found, "training_step") <= 70


def test_waits_of_a_decoded_token_are_within_their_budget(steps):
    shorter, longer = steps["compact"], steps["compact, longer"]
    tokens = longer["windows"]["_forward"]["calls"] - shorter["windows"]["_forward"]["calls"]
    assert tokens > 4
    assert waits(longer, "collect") - waits(shorter, "collect") <= 2 * tokens, "1, and more where rows part or end"


def test_a_token_of_a_static_cache_is_one_graph_without_a_wait(steps):
    """On CUDA it is the default. Every eighth token the host looks how many rows are left."""
    shorter, longer = steps["static"], steps["static, longer"]
    tokens = 28 - 12
    assert kernels(longer, "_run_bucket", at="^graph ") - kernels(shorter, "_run_bucket", at="^graph ") == tokens
    assert kernels(longer, "_run_bucket") - kernels(shorter, "_run_bucket") <= tokens + tokens / 8
    assert waits(longer, "collect") - waits(shorter, "collect") <= tokens / 8
    assert longer["captured"] / longer["windows"]["_run_bucket"]["calls"] <= KERNELS_OF_A_TOKEN
    for name in ("static, longer", "auto, longer"):
        assert steps[name]["responses"] == steps["compact, longer"]["responses"]
        assert steps[name]["windows"]["_run_bucket"]["kernels"] == longer["windows"]["_run_bucket"]["kernels"]


def test_a_model_that_waits_for_the_device_is_decoded_without_graphs(steps):
    """CUDA refuses to capture it. A trial finds that out."""
    assert steps["static, waits"]["responses"] == steps["compact"]["responses"]
    assert steps["static, waits"]["windows"]["_forward"]["calls"] == steps["compact"]["windows"]["_forward"]["calls"]


def test_adamw_is_fused_also_after_a_resume_from_a_checkpoint_of_a_cpu(steps):
    assert steps["trees"]["fused"] is True
    assert steps["resumed"] == {"steps": 2, "fused": True}


# --- every method, control and world, through the command line --------------------------------------------------------


def commands():
    """The cases of `benchmarks/same_results.py` on one device, each with another precision and layout."""
    half = "trainer.precision=bf16-true model.loading.dtype=bfloat16"
    precisions = itertools.cycle(["trainer.precision=bf16-mixed", half, ""])
    small = "model.execution.token_budget=300"
    layouts = itertools.cycle(
        ["", small, "model.loading.gradient_checkpointing=true", f"model.execution.share_prefixes=false {small}"]
    )
    cases = benchmark("same_results").CASES
    chosen = [name for name, what in cases.items() if "trainer.devices" not in what and not name.endswith("_resumed")]
    further = ["search model.credit=TurnRewards", "code model.credit=ExecutedMask", "grpo model.credit=RandomSubset"]
    return [" ".join([name, next(precisions), next(layouts)]) for name in [*chosen, *further]]


def test_every_credit_method_is_among_the_commands():
    shown = " ".join([*commands(), *benchmark("same_results").CASES.values()])
    classes = {name: kind for name in credit.__all__ if isinstance(kind := getattr(credit, name), type)}
    methods = {name for name, kind in classes.items() if issubclass(kind, credit.TokenCredit) and not isabstract(kind)}
    lacking = {name for name in methods if not re.search(rf"\b{name}\b", shown)}
    assert lacking == {"Uniform", "CriticSearch"}, "the last one asks a model on a server"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_every_method_control_and_world_trains_through_the_command_line(on_fake_cuda, part):
    lines = on_fake_cuda("commands", *commands()[part::6]).splitlines()
    ended = dict(json.loads(line) for line in lines if line.startswith("["))
    assert len(ended) == len(commands()[part::6])
    assert not {case: error for case, error in ended.items() if error}
