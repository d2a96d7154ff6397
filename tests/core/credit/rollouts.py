"""The golden rows as two groups of three with real prompts; and what methods compute, one row at a time."""

import copy
import json
import os
from contextlib import contextmanager

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from grail_lightning import ArithmeticTask, Prompt, Step
from grail_lightning.credit import CreditContext, ModelTraining, SampledContinuations, TrainedModel
from tests.conftest import GOLDEN
from tests.steps import opened
from tests.tolerance import roundings


class ByText(SampledContinuations):
    """Continuations whose outcome follows from the tokens that are kept."""

    def __init__(self):
        pass

    def draw(self, batch, places, number, budget):
        found = []
        for row, length in places:
            right = int(batch.response_ids[row, :length].sum()) % (number + 1)
            found.append([1.0] * right + [0.0] * (number - right))
        return found, number * len(places)


def second_model(begun, make=lambda p: torch.optim.SGD(p, lr=0.1), schedule=None, max_grad_norm=None):
    """A model that is trained beside a policy and begins as a copy of another one."""
    copied = copy.deepcopy(begun).requires_grad_(True).train()
    options = ModelTraining(model=None, optimizer=make, scheduler=schedule)
    return TrainedModel(copied, options, SingleDeviceStrategy("cpu"), max_grad_norm)


def context(step=0, budget=900, temperature=1.0, seed=0, reference=None, continuations=None, second=None):
    """A context whose budget cuts the six rows into several micro-batches."""
    return CreditContext(
        step=step,
        generator=torch.Generator().manual_seed(seed),
        token_budget=budget,
        temperature=temperature,
        services=opened(reference, continuations, second),
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


# --- the whole model as Transformers calls it, on one row without padding ---------------------------------------------


def row_ids(batch, row):
    """A row's ids ``[1, n]`` and where its response begins."""
    return batch.input_ids[row][batch.attention_mask[row]][None].long(), int(batch.prompt_lengths[row])


@torch.no_grad()
def row_logits(policy, batch, row):
    """``[n, V]``: what is said before each response token."""
    ids, begun = row_ids(batch, row)
    return policy.model(ids, use_cache=False).logits[0, begun - 1 : -1].double()


def logits_and_leaf(policy, ids, number=0, noise=None):
    """All logits ``[n, V]``; and the output ``[n, D]`` of the embedding (0) or of a block, noise added, as a leaf."""
    stack, caught = policy.model.get_decoder(), []

    def catch(module, inputs, output):
        tensor = output[0] if isinstance(output, tuple) else output
        caught.append((tensor if noise is None else tensor + noise.to(tensor)).detach().requires_grad_())
        return (caught[0], *output[1:]) if isinstance(output, tuple) else caught[0]

    hook = (stack.embed_tokens if number == 0 else stack.layers[number - 1]).register_forward_hook(catch)
    try:
        logits = policy.model(input_ids=ids, use_cache=False).logits[0]
    finally:
        hook.remove()
    return logits, caught[0]


def row_saliency(policy, batch, row, number=0, read_at="predictor", temperature=1.0):
    """``[T]``: gradient times activation of the answer's likelihood at each sampled token."""
    ids, begun = row_ids(batch, row)
    logits, leaf = logits_and_leaf(policy, ids, number)
    answer = begun + batch.answer.whole[row].nonzero().flatten()
    phi = -(logits[answer - 1] / temperature).log_softmax(-1)[range(len(answer)), ids[0, answer]].sum()
    (gradient,) = torch.autograd.grad(phi, leaf)
    norms = (gradient * leaf)[0].detach().double().norm(dim=-1)
    found = torch.zeros(batch.response_mask.shape[1], dtype=torch.float64)
    sampled = batch.response_mask[row].nonzero().flatten()
    found[sampled] = norms[begun + sampled - int(read_at == "predictor")]
    return found


@torch.no_grad()
def row_perturbation(policy, batch, row, token, distribution="answer_mean"):
    """The divergence of the answer's distribution that padding in the place of one token causes."""
    ids, begun = row_ids(batch, row)
    answer = begun + batch.answer.whole[row].nonzero().flatten()
    changed, found = ids.clone(), []
    changed[0, begun + token] = policy.tokenizer.pad_token_id
    for sequence in (ids, changed):
        before = policy.model(sequence, use_cache=False).logits[0, answer - 1].double()
        if distribution == "answer_joint":
            found.append(before.log_softmax(1)[range(len(answer)), ids[0, answer]].mean())
        else:
            found.append((before[0] if distribution == "last" else before.mean(0)).log_softmax(0))
    gap = found[0] - found[1]
    return (gap if distribution == "answer_joint" else (found[0].exp() * gap).sum()).item()


# --- golden tensors ---------------------------------------------------------------------------------------------------


def golden_error(found, golden, mask):
    """The largest difference on valid tokens, as a share of its row's maximum; see tests/golden/README.md.

    ``pytest -s tests/core/credit -k golden`` prints the largest differences.
    """
    scale = (golden.abs() * mask).amax(1, keepdim=True).clamp(min=1e-30)
    share, largest = ((found - golden).abs() / scale)[mask].max().item(), (found - golden).abs()[mask].max().item()
    name = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition("::")[2].removesuffix(" (call)")
    print(f"\ngolden: {name}: largest difference {largest:.1e}, as a share of the row's maximum {share:.1e}")
    return share


def assert_golden(found, golden, mask, number=100):
    """The largest difference is below this number of roundings in float32."""
    assert golden_error(found, golden, mask) < roundings(number, torch.float32)
