"""What is traced on tensors without data is what real steps allocate."""

from dataclasses import replace

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from grail_lightning.batch import Sampling
from grail_lightning.credit import GRAIL, HighEntropy, OARGradient, SaliencyOptions
from grail_lightning.distributed.gradients import Gradients
from grail_lightning.engines import HFEngine
from grail_lightning.engines import cache as caching
from grail_lightning.engines.base import build_batch
from grail_lightning.plan.capacity import own_pass
from grail_lightning.plan.live import Live
from grail_lightning.plan.settings import Credit
from grail_lightning.policy import Loading, LoRA, load_policy
from grail_lightning.step.options import Execution
from tests.batches import rollouts
from tests.plan.plans import planner, settings
from tests.runs import problems
from tests.steps import context_for, update_of

LENGTH, GROUP = 200, 4


def _batch(policy, groups):
    """Groups of responses of the full length that differ from their first token on."""
    torch.manual_seed(1)
    prompts = problems(groups)
    ids = torch.randint(3, 12, (groups * GROUP, LENGTH))
    ids[:, 0] = torch.arange(groups * GROUP) % GROUP + 3
    responses = ids.tolist()
    sampled = build_batch(policy, prompts, GROUP, responses, [True] * len(ids), [[0.0] * LENGTH] * len(ids))
    return rollouts(sampled, torch.tensor([1.0, 0.0] * (groups * GROUP // 2)), tokenizer=policy.tokenizer)


CASES = {
    "float32": {},
    "checkpointed": {"loading": Loading(gradient_checkpointing=True)},
    "adapters": {"loading": Loading(lora=LoRA())},
    "masters": {"loading": Loading(dtype="bfloat16")},
    "autocast": {"precision": "bf16-mixed"},
    "separate rows": {"execution": Execution(group_size=GROUP, token_budget=1024, share_prefixes=False)},
}


@pytest.mark.parametrize("case", CASES)
def test_the_peak_of_an_update_is_that_of_a_real_one(case):
    """Weights, gradients and activations of an optimiser step of several micro-batches, within a twelfth."""
    groups = 2
    execution = Execution(group_size=GROUP, token_budget=1024)
    chosen = settings(
        **{"execution": execution} | CASES[case],
        sampling=Sampling(max_response_length=LENGTH),
        prompts_per_batch=groups,
    )
    policy = load_policy("arithmetic", chosen.loading).train()
    assert policy.supports_prefix_trees
    strategy = SingleDeviceStrategy("cpu")
    strategy._lightning_module = strategy._model = policy
    gradients = Gradients(policy, strategy)
    for weight in gradients.weights:
        weight.grad = torch.zeros_like(weight)
    options = {"token_budget": 1024, "share_prefixes": chosen.execution.share_prefixes, "mask_truncated": False}
    with torch.autocast("cpu", torch.bfloat16, enabled=chosen.autocast, cache_enabled=False):
        update = update_of(policy, _batch(policy, groups), limit=LENGTH, **options)

        def backward(loss, last):
            with gradients.accumulating(last=last):
                loss.backward()

        with Live() as live:
            update.accumulate(0, backward, in_place=gradients.in_place)
    prompt = len(policy.encode(problems(1)[0].messages))
    parts = planner().plan(replace(chosen, prompt_tokens=prompt), 1).phases["update"].parts
    kept = {"weights", "master weights", "optimizer state", "rollouts", "gradients"}
    planned = sum(size for name, size in parts.items() if name not in kept)
    assert planned == pytest.approx(live.peak, rel=1 / 12)
    weights = {id(p): p.nbytes for p in [*policy.parameters(), *gradients.weights]}
    assert parts["weights"] + parts.get("master weights", 0) == sum(weights.values())
    assert parts["gradients"] == sum(w.grad.nbytes for w in gradients.weights)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_cache_of_a_real_call_is_the_planned_one(precision, monkeypatch):
    """Keys may be wider than values: Qwen3 normalises them with weights in float32."""
    chosen = settings(precision=precision, sampling=Sampling(max_response_length=LENGTH), prompts_per_batch=2)
    policy = load_policy("arithmetic")
    caches, made = [], caching.GrowingCache
    monkeypatch.setattr(
        caching, "GrowingCache", lambda *sizes, **named: caches.append(made(*sizes, **named)) or caches[-1]
    )
    engine = HFEngine()
    engine.update_weights(policy)
    with torch.autocast("cpu", torch.bfloat16, enabled=chosen.autocast, cache_enabled=False):
        engine.generate(problems(2), GROUP, chosen.sampling, seed=0)
    layers = caches[-1].layers
    found = sum(t.shape[1] * t.shape[-1] * t.element_size() for layer in layers for t in (layer.keys, layer.values))
    plan = planner().plan(chosen, 1).phases["sampling"].parts
    rows = 2 * GROUP
    assert plan["KV cache"] == rows * chosen.width * found * (len(layers) + 1) // len(layers)


def test_the_peak_of_sampling_is_that_of_a_real_call():
    """Rows of a real call end early, so that the plan is an upper bound, here no more than a third above."""
    chosen = settings(sampling=Sampling(max_response_length=40), prompts_per_batch=8)
    policy = load_policy("arithmetic")
    engine = HFEngine()
    engine.update_weights(policy)
    with Live() as live:
        engine.generate(problems(8), 4, chosen.sampling, seed=0)
    parts = planner().plan(chosen, 1).phases["sampling"].parts
    planned = parts["KV cache"] + parts["decoding"]
    assert live.peak <= planned < 1.34 * live.peak


PASSES = {
    "GRAIL": (GRAIL(gate="all", saliency=SaliencyOptions(fuse=False)), {"forwards": 1, "backwards": 1}),
    "OARGradient": (OARGradient(), {"forwards": 2, "backwards": 1}),
    "HighEntropy": (HighEntropy(), {"forwards": 1}),
}


@pytest.mark.parametrize("name", PASSES)
def test_the_peak_of_credit_is_that_of_a_real_pass(name):
    credit, passes = PASSES[name]
    chosen = settings(
        credit=Credit(name=name, **passes),
        execution=Execution(group_size=GROUP, token_budget=1024),
        sampling=Sampling(max_response_length=LENGTH),
        prompts_per_batch=2,
    )
    assert own_pass(chosen)
    policy = load_policy("arithmetic").train()
    assert policy.supports_prefix_trees
    batch = _batch(policy, 2)
    last = torch.zeros_like(batch.response_mask)
    last[:, -6:] = True  # The box ends the response.
    batch = batch.replace(answer=type(batch.answer)(whole=last, content=last, marker=~last & last, after=~last & last))
    with Live() as live:
        credit(policy, batch, context_for(policy, 1024))
    planned = planner().plan(chosen, 1).phases["credit"].parts["activations"]
    assert planned == pytest.approx(live.peak, rel=0.1)
