"""Models and rewards that a Python program gives, in real runs."""

import asyncio
import functools
import json
import threading
import time
from pathlib import Path

import pytest
import torch

from grail_lightning import GrailModule, MathData
from grail_lightning.policy import load_policy
from grail_lightning.step.options import Objective
from grail_lightning.tasks import ArithmeticTask
from grail_lightning.tasks.rewards import Reward, RewardSpec, correctness, overlong
from tests.runs import SAMPLING, batches, module, trainer, weights
from tests.shell import fails


class _Verdict:
    correct, status = True, "right"


ROWS = [{"problem": "7+5-3+8-9", "answer": 8}, {"problem": "9+9+6-5+7", "answer": 26}]


def test_a_policy_that_is_no_text_is_refused_with_what_to_do():
    for wrong in (Path("export"), (object(), object())):
        with pytest.raises(ValueError, match=r"must be a name, or a folder as text, but got .*Save a loaded model"):
            GrailModule(wrong, sampling=SAMPLING)


def test_a_second_fit_goes_on_and_a_late_reference_is_the_policy_of_the_start():
    run = module()
    trainer(1).fit(run, batches(1))
    once = weights(run)
    run.objective = Objective(kl_coefficient=0.1)
    trainer(1).fit(run, batches(1, seed=1))
    assert any(not torch.equal(once[name], p) for name, p in weights(run).items())
    fresh = load_policy("arithmetic").state_dict()
    assert all(torch.equal(fresh[name], p) for name, p in run.reference.policy.state_dict().items())


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
    data = MathData(train=ROWS, val=ROWS, task=ArithmeticTask([*rewards, correctness]), prompts_per_batch=2)
    assert [r.name for r in data.task.rewards] == ["half", "Length", "again", "third", "correctness"]
    fitted = trainer(1)
    fitted.fit(module(), data)
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

    started = time.monotonic()
    for _ in range(2):
        assert asyncio.run(in_a_notebook()) == {"one": [1.0, 1.0], "two": [1.0, 1.0]}
    assert len({id(loop) for loop in loops}) == 1
    assert time.monotonic() - started < 20

    async def broken(responses, references):
        await asyncio.sleep(0)
        raise KeyError("score")

    with pytest.raises(ValueError, match=r"The reward `broken given in Python` raised KeyError: 'score'\. It got 2 "):
        Reward(broken).start(["a", "b"], ["1", "2"], {})()


def test_a_record_of_what_a_program_gave_is_no_option(capsys):
    config = "--config=configs/quickstart.yaml"
    task = json.dumps([{"function": "Length given in Python"}])
    said = fails(capsys, "fit", config, "--data=MathData", "--data.train=2 rows given in Python")
    assert "cannot repeat. Run that program again" in " ".join(said.split())
    wrong = fails(capsys, "fit", config, "--data.task=ArithmeticTask", f"--data.task.rewards={task}")
    assert "Length given in Python" in wrong
