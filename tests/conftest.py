"""Small real things that many tests share. Nothing here is a double."""

import gc
import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The packaged policy's matrices are too small for threads, and the tests' processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from grail_lightning import ArithmeticTask, Prompt, SampledBatch
from grail_lightning.app.cli.app import GrailCLI
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.rollout.batch import AnswerMasks
from grail_lightning.worlds.programs.executor import Executor
from tests.batches import rollouts
from tests.shell import make_parser_once

gc.freeze()  # Each full collection would look at all that libraries keep for ever, twice as long as at the rest.

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def _no_leaks_between_tests():
    """Seeds travel through the environment; a test that sets one must not seed the next, nor its module's fixtures."""
    os.environ.pop("PL_GLOBAL_SEED", None)
    torch.manual_seed(0)
    yield
    os.environ.pop("PL_GLOBAL_SEED", None)


@pytest.fixture(autouse=True, scope="session")
def _parsers_are_made_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrailCLI, "setup_parser", make_parser_once)
        yield


@pytest.fixture(autouse=True, scope="session")
def _interrupts_reach_the_programs_that_tests_start():
    """A shell lets what it starts in the background ignore Ctrl-C, and programs inherit that from pytest."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """The working folder of the test, which is empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def programs_run():
    """Skips a test where nothing isolates programs; what it says names the reasons."""
    try:
        Executor().close()
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def golden():
    """The published maths, evaluated once; see tests/golden/README.md."""
    return load_file(GOLDEN / "golden.safetensors")


@pytest.fixture(scope="session")
def golden_policy():
    """The model of the golden tensors, in float64."""
    return load_policy(str(GOLDEN / "model")).double().eval()


@pytest.fixture(scope="session")
def golden_batch(golden):
    """The golden rows as a batch, with the (shifted) answer masks that the tensors were made with."""
    mask = golden["completion_mask"].bool()
    answer = AnswerMasks(
        whole=golden["mask.answer"].bool(),
        content=golden["mask.content"].bool(),
        marker=golden["mask.boundary"].bool(),
        after=golden["mask.post"].bool(),
    )
    task = ArithmeticTask()
    sampled = SampledBatch(
        input_ids=golden["input_ids"],
        attention_mask=golden["attention_mask"].bool(),
        response_ids=golden["completion_ids"],
        response_mask=mask,
        group=torch.arange(len(mask)),
        row=torch.arange(len(mask)),
        finished=torch.ones(len(mask), dtype=torch.bool),
        prompts=[Prompt(messages="", reference="", task=task) for _ in mask],
        texts=[""] * len(mask),
    )
    return rollouts(sampled, advantages=golden["advantages"], answer=answer)


@pytest.fixture(scope="session")
def arithmetic():
    """The packaged policy."""
    return load_policy("arithmetic").eval()
