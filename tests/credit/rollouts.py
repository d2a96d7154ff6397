"""The golden rows as two groups of three with real prompts, and the model's own logits, one row at a time."""

import copy
import json
import os
from contextlib import contextmanager

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from grail_lightning.credit import CreditContext
from grail_lightning.credit.base import Continuations, Training
from grail_lightning.policy.reference import Reference
from grail_lightning.step.second_model import TrainedModel
from grail_lightning.tasks import ArithmeticTask
from grail_lightning.tasks.base import Prompt, Step
from tests.conftest import GOLDEN
from tests.tolerance import roundings


class ByText(Continuations):
    """Continuations whose outcome follows from the tokens that are kept."""

    def draw(self, batch, places, number, budget):
        found = []
        for row, length in places:
            right = int(batch.response_ids[row, :length].sum()) % (number + 1)
            found.append([1.0] * right + [0.0] * (number - right))
        return found, number * len(places)


def second_model(begun, make=lambda p: torch.optim.SGD(p, lr=0.1), schedule=None, max_grad_norm=None):
    """A model that is trained beside a policy and begins as a copy of another one."""
    copied = copy.deepcopy(begun).requires_grad_(True).train()
    options = Training(model=None, optimizer=make, scheduler=schedule)
    return TrainedModel(copied, options, SingleDeviceStrategy("cpu"), max_grad_norm)


def context(step=0, budget=900, temperature=1.0, seed=0, reference=None, continuations=None, second=None):
    """A context whose budget cuts the six rows into several micro-batches."""
    return CreditContext(
        step=step,
        generator=torch.Generator().manual_seed(seed),
        token_budget=budget,
        temperature=temperature,
        reference=None if reference is None else Reference(reference),
        continuations=continuations,
        second=second,
    )


@contextmanager
def no_pass(policy, allowed=False):
    """Fails if the policy makes a forward pass in it, unless that is allowed."""

    def refused(*_):
        assert allowed, "a forward pass"

    hook = policy.decoder.register_forward_pre_hook(refused)
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def elsewhere(policy):
    """A copy of the policy with other weights in its last block."""
    other = copy.deepcopy(policy)
    for parameter in other.blocks[-1].parameters():
        parameter.mul_(1.3)
    return other


class Labelled(ArithmeticTask):
    """Labels some characters of any text, since golden texts are no chains."""

    def label_steps(self, text, prompt):
        return [Step(start=3, stop=9, kind="slip")] if len(text) > 8 else []


def in_groups(batch):
    """Two groups of three; one right and two wrong in the first, two right and one wrong in the second."""
    texts = json.loads((GOLDEN / "texts.json").read_text())["prompts"]
    correct, task = torch.tensor([True, False, False, False, True, True]), Labelled()
    return batch.replace(
        group=torch.tensor([0, 0, 0, 1, 1, 1]),
        correct=correct,
        rewards=correct.float(),
        advantages=torch.tensor([0.7, -0.3, -0.4, -1.1, 0.5, 0.0]),
        prompts=[Prompt(messages=text, reference=str(10 * k), task=task) for k, text in enumerate(texts)],
    )


@torch.no_grad()
def row_logits(policy, batch, row):
    """``[n, V]``: what the whole model, unpadded, says before each response token of a row."""
    ids = batch.input_ids[row][batch.attention_mask[row]]
    length = int(batch.response_mask[row].sum())
    return policy.model(ids[None], use_cache=False).logits[0, -length - 1 : -1].double()


def golden_error(found, golden, mask):
    """The largest difference on valid tokens, as a share of its row's maximum; see tests/golden/README.md.

    ``pytest -s tests/credit -k golden`` prints the largest differences.
    """
    scale = (golden.abs() * mask).amax(1, keepdim=True).clamp(min=1e-30)
    share, largest = ((found - golden).abs() / scale)[mask].max().item(), (found - golden).abs()[mask].max().item()
    name = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition("::")[2].removesuffix(" (call)")
    print(f"\ngolden: {name}: largest difference {largest:.1e}, as a share of the row's maximum {share:.1e}")
    return share


def assert_golden(found, golden, mask, number=100):
    """The largest difference is below this number of roundings in float32."""
    assert golden_error(found, golden, mask) < roundings(number, torch.float32)
