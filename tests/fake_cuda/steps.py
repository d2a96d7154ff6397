"""Whole steps of the real module on a CUDA device that is none: ``python -m tests.fake_cuda.steps '{"name": {...}}'``.

The argument is JSON: the options of each case by its name, see `run`. What the cases have found is printed as JSON.
"""

import ctypes
import os

ctypes.CDLL(os.environ["FAKE_CUDA_GUARD"], ctypes.RTLD_GLOBAL)  # Before torch.

import contextlib
import functools
import io
import json
import logging
import sys
import traceback
import warnings

import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader
from transformers import Qwen3Config, Qwen3ForCausalLM

import grail_lightning as gl
from grail_lightning import credit
from grail_lightning.core import module as module_file
from grail_lightning.core.distributed.gradients import Gradients
from grail_lightning.core.engines.hf.decoding import Decoding
from grail_lightning.core.engines.hf.static import StaticDecoding
from grail_lightning.core.policy.model import Policy
from grail_lightning.core.policy.source import load_tokenizer
from grail_lightning.core.step import update
from grail_lightning.core.step.optimizer import ConfiguredOptions
from tests import runs
from tests.benchmark_modules import benchmark
from tests.fake_cuda import device

credit_cost = benchmark("credit_cost")
PRECISIONS = {"mixed": ("bf16-mixed", "float32"), "half": ("bf16-true", "bfloat16"), "full": ("32-true", "float32")}
WINDOWS = {
    "training_step": gl.GrailModule,
    "collect": module_file,
    "assign_credit": module_file.assign,
    "take_steps": gl.GrailModule,
    "accumulate": module_file.Update,
    "_run_passes": module_file.Update,
    "micro_batch_loss": update,
    "take_step": module_file,
    "batch_figures": module_file,
    "_forward": Decoding,
    "_run_bucket": StaticDecoding,
}
"""Functions that are watched, by the module or class in which they are found."""


class Watched(Callback):
    """Kernels and waits of the last batch inside each of the watched functions, summed over their calls."""

    def __init__(self):
        self.windows = {}
        self._before = {name: getattr(owner, name) for name, owner in WINDOWS.items()}
        for name, owner in WINDOWS.items():
            setattr(owner, name, self._watch(name, self._before[name]))

    def on_train_batch_start(self, *_):
        device.LOG.clear()
        self.windows |= {name: {"calls": 0, "kernels": {}, "waits": {}} for name in WINDOWS}

    def on_train_batch_end(self, trainer, pl_module, outputs, *_):
        self.captured = device.LOG.captured.total()
        self.responses = outputs["output"].batch.texts

    def teardown(self, trainer, pl_module, stage):
        for name, owner in WINDOWS.items():
            setattr(owner, name, self._before[name])

    def _watch(self, name, function):
        @functools.wraps(function)
        def watched(*args, **kwargs):
            window = self.windows[name]
            before = {"kernels": device.LOG.kernels.copy(), "waits": device.LOG.waits.copy()}
            result = function(*args, **kwargs)
            window["calls"] += 1
            for what, earlier in before.items():
                for place, number in (getattr(device.LOG, what) - earlier).items():
                    window[what][str(place)] = window[what].get(str(place), 0) + number
            return result

        return watched


def small_model(layers):
    """A Qwen3 with random weights behind the packaged tokenizer, with grouped queries."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer("arithmetic")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Qwen3ForCausalLM(config), tokenizer


def run(
    credit_method="Uniform()",
    precision="half",
    layers=2,
    lengths=(20, 28),
    sampled=None,
    objective=None,
    execution=None,
    loading=None,
    batches=2,
    waits=False,
):
    """Take the optimiser steps of some batches, and return what was seen in the last one.

    `credit_method` is a Python expression in `grail_lightning.credit`. Responses are random ones with `lengths`, unless
    `sampled` is a method of `HFEngine`. A model that `waits` reads a number from the device in each pass.
    """
    trainer_precision, dtype = PRECISIONS[precision]
    loading, objective = {"dtype": dtype, "compile": False} | (loading or {}), dict(objective or {})
    if "lora" in loading:
        loading["lora"] = gl.LoRA(rank=loading["lora"])
    task = credit_cost.StandInTask()
    prompts = [[task.prompt({"problem": f"{k}+{k}\n"}) for k in (10, 11)] for _ in range(batches)]
    if sampled:
        prompts = [runs.problems(2, seed=k) for k in range(batches)]
    seed_everything(0, verbose=False)
    model, tokenizer = small_model(layers)
    if waits:
        model.register_forward_pre_hook(_wait, with_kwargs=True)
    module = gl.GrailModule(
        (model, tokenizer),
        gl.Sampling(max_response_length=lengths[1]),
        gl.Loading(**loading),
        gl.HFEngine(method=sampled, compile=False) if sampled else credit_cost.StandInEngine(lengths[0]),
        getattr(gl, objective.pop("algorithm", "DrGRPO"))(**objective),
        gl.Execution(**{"group_size": 4, "token_budget": 160} | (execution or {})),
        credit=eval(credit_method, {}, _Names()),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-5),
    )
    trainer = runs.trainer(-1, watched := Watched(), accelerator="gpu", precision=trainer_precision, max_epochs=1)
    trainer.fit(module, DataLoader(prompts, batch_size=None))
    fused = trainer.optimizers[0].param_groups[0]["fused"]
    seen = {name: getattr(watched, name) for name in ("windows", "captured", "responses")}
    return seen | {"tree_kernel": vars(module.policy).get("tree_kernel"), "fused": fused}


def _wait(module, args, options):
    options["input_ids"].sum().item()


def resume_on_cuda():
    """Steps of AdamW on the CPU and, after a resume from its checkpoint, on CUDA; returns the number of steps there."""
    saved = None
    for place in ("cpu", "cuda"):
        policy = Policy(*small_model(1)).to(place)
        gradients = Gradients(policy, SingleDeviceStrategy(torch.device(place)))
        optimizer = gradients.make_optimizer(torch.optim.AdamW)
        configured = ConfiguredOptions(optimizer, None)
        if saved is not None:
            optimizer.load_state_dict(saved)
            configured.apply(optimizer, None, 1)
        for weight in gradients.weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        saved = optimizer.state_dict()
    return {"steps": saved["state"][0]["step"].item(), "fused": saved["param_groups"][0]["fused"]}


class _Names(dict):
    def __missing__(self, name):
        return getattr(credit, name)


def main(cases):
    """Run the cases, and print a line of JSON."""
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    device.install()
    found = {}
    for name, options in cases.items():
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                found[name] = resume_on_cuda() if name == "resumed" else run(**options)
        except Exception as error:
            lines = traceback.format_exc().splitlines()
            found[name] = {"error": f"{type(error).__name__}: {str(error)[:600]}", "traceback": lines[-60:]}
        finally:
            torch.use_deterministic_algorithms(False)
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
