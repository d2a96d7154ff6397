"""Models and rewards that a Python program gives, in real runs."""

import asyncio
import functools
import threading
from pathlib import Path

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from transformers import AutoModelForCausalLM, AutoTokenizer

from grail_lightning import (
    ArithmeticTask,
    DrGRPO,
    ExportPolicy,
    GrailModule,
    Loading,
    LoRA,
    MathData,
    RewardSpec,
    Sampling,
    correctness,
    resolve_policy,
)
from grail_lightning.core.tasks.rewards import Reward, overlong
from grail_lightning.credit import GRAIL, FrozenReference
from tests.processes import on_ranks
from tests.runs import batches, module, strategy_of, trainer, weights


class _Verdict:
    correct, status = True, "right"


ROWS = [{"problem": "7+5-3+8-9", "answer": 8}, {"problem": "9+9+6-5+7", "answer": 26}]


def loaded():
    folder = resolve_policy("arithmetic")
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


BRIEF = Sampling(max_response_length=3)
ALWAYS = {"entropy_coefficient": 0.1, "mask_truncated": False}  # Every row has a gradient.


def of(policy, kl_coefficient=0.0, **changes):
    """A module on a policy that is by name or given."""
    objective = DrGRPO(kl_coefficient=kl_coefficient, **ALWAYS)
    options = {"sampling": BRIEF, "optimizer": lambda p: torch.optim.AdamW(p, lr=1e-4), "objective": objective}
    return GrailModule(policy, **options | changes)


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)], ids=["all weights", "LoRA"])
def test_a_loaded_model_is_trained_as_one_by_its_name_and_stays_as_it_is(lora, tmp_path):
    pair = loaded()
    before = {name: p.clone() for name, p in pair[0].state_dict().items()}
    trained = []
    for name, policy in (("name", "arithmetic"), ("pair", pair)):
        torch.manual_seed(0)
        run = of(policy, 0.1, loading=Loading(lora=lora))
        trainer(2, ExportPolicy(folder=str(tmp_path / name))).fit(run, batches(2, size=1))
        trained.append(weights(run))
    assert all(torch.equal(trained[0][name], p) for name, p in trained[1].items())
    new = {n.removeprefix("model."): p for n, p in trained[1].items() if lora is None or "lora_B" in n}
    assert any(not torch.equal(p, before.get(n, torch.zeros_like(p))) for n, p in new.items())
    assert all(torch.equal(before[name], p) for name, p in pair[0].state_dict().items())
    exported = [AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("name", "pair")]
    assert all(torch.equal(exported[0][name], p) for name, p in exported[1].items())
    assert AutoTokenizer.from_pretrained(tmp_path / "pair").get_vocab() == pair[1].get_vocab()


def test_a_second_fit_goes_on_and_a_late_reference_is_the_model_that_was_given():
    run = of(loaded())
    trainer(1).fit(run, batches(1, size=1))
    once = weights(run)
    run.objective = DrGRPO(kl_coefficient=0.1, **ALWAYS)
    trainer(1).fit(run, batches(1, size=1))
    assert any(not torch.equal(once[name], p) for name, p in weights(run).items())
    fresh = loaded()[0].state_dict()
    assert all(
        torch.equal(fresh[name], p)
        for name, p in run.services.opened("fit")[FrozenReference].policy.model.state_dict().items()
    )


def test_the_options_of_loading_hold_for_a_loaded_model():
    model, tokenizer = loaded()
    frequencies = model.bfloat16().model.rotary_emb.inv_freq.dtype
    for dtype, expected in (("auto", torch.bfloat16), ("float32", torch.float32)):
        run = of((model, tokenizer), loading=Loading(dtype=dtype))
        run.policy = None
        trainer(1).validate(run, batches(1, size=1), verbose=False)
        assert run.policy.model.dtype == expected
        assert run.policy.model.model.rotary_emb.inv_freq.dtype == frequencies


def test_what_cannot_be_copied_or_is_no_model_is_refused():
    model, tokenizer = loaded()
    (hooked, _), (adapted, _) = loaded(), loaded()
    add_hook_to_module(hooked.model.layers[0], ModelHook())
    adapted.add_adapter(__import__("peft").LoraConfig(target_modules=["q_proj"]))
    for wrong in (model, (model,), (tokenizer, model), (model, tokenizer, 1), Path("export")):
        with pytest.raises(ValueError, match="`policy` must be a name, a folder, or a Transformers model with its tok"):
            of(wrong)
    for other in (hooked, adapted):
        with pytest.raises(ValueError, match="without adapters or `device_map`"):
            of((other, tokenizer))
    with pytest.raises(ValueError, match=r"must leave room for a prompt .* of Qwen3ForCausalLM given in Python, but"):
        of((model, tokenizer), sampling=Sampling(max_response_length=10**6))


class Length:
    """An object as a reward."""

    def __call__(self, responses, references, *, lengths):
        return [float(length) for length in lengths]


def test_callables_of_every_kind_are_rewards():
    def half(responses, references):
        return [0.5] * len(responses)

    async def third(responses, references, *, scale):
        return await asyncio.gather(*(asyncio.sleep(0, scale / 3) for _ in responses))

    rewards = [half, Length(), functools.partial(half), RewardSpec(function=third, weight=3, arguments={"scale": 1})]
    with pytest.raises(ValueError, match="different names"):
        ArithmeticTask(rewards)
    rewards[2] = RewardSpec(function=rewards[2], name="again")
    data = MathData(train=ROWS, val=ROWS, task=ArithmeticTask([*rewards, correctness]), prompts_per_batch=16)
    assert [r.name for r in data.task.rewards] == ["half", "Length", "again", "third", "correctness"]
    fitted = trainer(1)
    with pytest.warns(UserWarning, match="`data.prompts_per_batch` is 16, but there are only 2 training prompts"):
        fitted.fit(module(sampling=BRIEF), data)
    assert float(fitted.callback_metrics["train/reward"]) > 2.5, "0.5 + tokens + 0.5 + 3/3"
    # A built-in function is itself, and one of the same name is not.
    assert Reward(RewardSpec(function=overlong, arguments={"limit": 9, "buffer": 2})).path == "overlong"
    half.__name__ = "overlong"
    task = ArithmeticTask([half])
    task.check_length(4)
    assert task.rewards[0].path == "overlong given in Python"


def test_async_rewards_wait_side_by_side_in_one_loop_beside_a_running_one():
    met, loops = threading.Barrier(2, timeout=20), []

    def meeting(name):
        async def reward(responses, references):
            loops.append(asyncio.get_running_loop())
            await asyncio.to_thread(met.wait)  # Returns when the other reward is waiting, too.
            return [1.0] * len(responses)

        return RewardSpec(function=reward, name=name)

    task = ArithmeticTask([meeting("one"), meeting("two")])
    prompt = task.prompt(ROWS[0])

    async def in_a_notebook():
        return task.reward_values(["a", "b"], [prompt] * 2, [_Verdict()] * 2, [1, 1])

    for _ in range(2):
        assert asyncio.run(in_a_notebook()) == {"one": [1.0, 1.0], "two": [1.0, 1.0]}
    assert len({id(loop) for loop in loops}) == 1

    async def broken(responses, references):
        await asyncio.sleep(0)
        raise KeyError("score")

    with pytest.raises(ValueError, match=r"The reward `broken given in Python` raised KeyError: 'score'\. It got 2 "):
        Reward(broken).start(["a", "b"], ["1", "2"], {})()


def _train_both(strategy, folder):
    torch.manual_seed(0)
    for name, policy in (("name", "arithmetic"), ("pair", loaded())):
        ranks = {"devices": 2, "strategy": strategy_of(strategy)}
        trainer(1, ExportPolicy(folder=f"{folder}/{name}"), **ranks).fit(of(policy), batches(1, size=2))


@pytest.mark.slow
def test_two_ranks_train_a_loaded_model_as_one_by_its_name(tmp_path):
    on_ranks(_train_both, "fsdp2", tmp_path)
    exported = [AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("name", "pair")]
    assert all(torch.equal(exported[0][name], p) for name, p in exported[1].items())
    fresh = loaded()[0].state_dict()
    assert any(not torch.equal(fresh[name], p) for name, p in exported[1].items())


@pytest.mark.parametrize("credit", ["GRAIL", GRAIL])
def test_a_name_or_a_class_in_place_of_an_object_is_told(credit):
    with pytest.raises(ValueError, match=r"`credit` must be an object, .* but got .*GRAIL"):
        GrailModule("arithmetic", BRIEF, credit=credit)
