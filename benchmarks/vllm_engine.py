"""`VLLMEngine` beside `HFEngine`: texts, log-probabilities, the time of a push, a changed weight, 30 training steps.

    python benchmarks/vllm_engine.py                          # every part, each in a process of its own
    python benchmarks/vllm_engine.py agree arithmetic float32
    python benchmarks/vllm_engine.py push wide
    python benchmarks/vllm_engine.py changed arithmetic
    python benchmarks/vllm_engine.py steps --seeds 5          # needs nothing but time: a minute a run

It runs in an environment with vLLM (`make test-vllm` makes one for CPUs). A policy is the packaged one, a folder, or a
random-weight model of `benchmarks/stand_in.py`.

- agree: greedy responses of both engines to the same prompts, and where they part; then the difference between the
  sampler's log-probabilities and the trainer's, of responses that vLLM samples at temperature 1.
- push: CPU seconds to hand over all weights after each has changed, and to compare the probe; the least of three.
- changed: the gap that the probe finds after one scale of one normalisation is changed in vLLM alone.
- steps: held-out accuracy after 30 steps of the quickstart with each engine, for the same seeds.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from scipy.stats import t as student
from stand_in import SHAPES, random_qwen3

from grail_lightning.batch import Sampling
from grail_lightning.engines import HFEngine, VLLMEngine
from grail_lightning.engines.vllm.probe import Bound, measure_gap, probe_requests
from grail_lightning.policy import Loading, Policy, load_policy
from grail_lightning.tasks import ArithmeticTask
from grail_lightning.tasks.arithmetic import ProblemSpace
from grail_lightning.tasks.base import Prompt

ROOT = Path(__file__).resolve().parents[1]
LOOSE = Bound(mean=1e9, largest=1e9)
TEXTS = (
    *("How many legs do three spiders have?", "Name the capital of France.", "What is 17 times 6?"),
    *("Write one sentence about rain.", "A train leaves at 9 and arrives at 11. How long is the ride?"),
    *("Which is larger, 2/3 or 3/5?", "List four prime numbers.", "Why is the sky blue?"),
)
HELD_OUT = re.compile(r"held-out accuracy: ([\d.]+) -> ([\d.]+)")


def policy_of(name: str, dtype: str = "float32") -> Policy:
    if name in SHAPES:
        shape = dict(SHAPES[name])
        made = random_qwen3(shape.pop("hidden"), shape.pop("layers"), shape.pop("vocabulary"), **shape)
        return made.to(getattr(torch, dtype)).eval()
    return load_policy(name, Loading(dtype=dtype)).eval()


def prompts_of(policy: Policy, number: int) -> list[Prompt]:
    task = ArithmeticTask()
    if policy.tokenizer.chat_template:
        return [Prompt(messages=[{"role": "user", "content": text}], reference="", task=task) for text in TEXTS]
    return [task.prompt({"problem": p.expression}) for p in ProblemSpace().sample(number, "test", 0)]


def millions(policy: Policy) -> float:
    return sum(p.numel() for p in policy.parameters()) / 1e6


def agree(name: str, dtype: str) -> None:
    policy = policy_of(name, dtype)
    engines = {"vllm": VLLMEngine(bound=LOOSE), "hf": HFEngine()}
    prompts, greedy = prompts_of(policy, 128), Sampling(max_response_length=64, temperature=0.0)
    for engine in engines.values():
        engine.update_weights(policy)
    found, own = (engine.generate(prompts, 1, greedy, seed=0) for engine in engines.values())
    same = [one == other for one, other in zip(found.texts, own.texts, strict=True)]
    print(f"agree {name} {dtype}: {sum(same)} of {len(same)} greedy responses are equal", end="")
    print("".join(f"; one parts at a tie within {tie:.1e} nats" for tie in ties(policy, found, own)))
    batch = engines["vllm"].generate(prompts, 8, Sampling(max_response_length=64), seed=1)
    with torch.no_grad():
        trained = policy(policy.layout(batch)).logprobs.float()
    gaps = (trained - batch.sampling_logprobs).abs()[batch.response_mask]
    print(
        f"agree {name} {dtype}: log-probabilities differ by {gaps.mean():.2e} nats on average, {gaps.max():.2e} at "
        f"most, {gaps.quantile(0.999):.2e} at the quantile 0.999 ({len(gaps)} tokens)"
    )
    gap = measure_gap(policy, requests := probe_requests(policy), engines["vllm"]._send(requests))
    print(f"agree {name} {dtype}: probe {gap.mean:.2e} on average, {gap.largest:.2e} at most ({gap.tokens} tokens)")


def ties(policy: Policy, found, own) -> list[float]:
    """For rows that differ: how far apart the trainer has the two tokens at the first difference."""
    apart = []
    width = min(found.response_ids.shape[1], own.response_ids.shape[1])
    for row in range(len(found)):
        one, other = found.response_ids[row, :width], own.response_ids[row, :width]
        differs = (one != other) & found.response_mask[row, :width] & own.response_mask[row, :width]
        if not differs.any():
            continue
        place = int(differs.nonzero()[0])
        stop = found.prompt_width + place
        ids, mask = found.input_ids[row : row + 1, :stop].long(), found.attention_mask[row : row + 1, :stop]
        with torch.no_grad():
            logits = policy.head(policy.hidden(mask, input_ids=ids)[:, -1]).float()[0]
        apart.append(float((logits[int(one[place])] - logits[int(other[place])]).abs()))
    return apart


def push(name: str, dtype: str) -> None:
    policy, engine = policy_of(name, dtype), VLLMEngine(bound=LOOSE, max_model_len=2048)
    engine.update_weights(policy)
    pushes, whole, prints = [], [], []
    for _ in range(3):
        for parameter in policy.parameters():
            parameter.data.mul_(1.0001)
        for seconds, act in (
            (whole, lambda: engine.update_weights(policy)),
            (pushes, lambda: engine._push(policy)),
            (prints, lambda: engine.update_weights(policy)),  # Nothing has changed, so it compares fingerprints alone.
        ):
            begun = time.process_time()
            act()
            seconds.append(time.process_time() - begun)
    print(
        f"push {name} {dtype}: {millions(policy):.1f} M parameters, {min(pushes):.3f} s; with fingerprint and probe "
        f"{min(whole):.3f} s; unchanged weights {min(prints):.3f} s (CPU time)"
    )


def changed(name: str) -> None:
    policy, engine = policy_of(name), VLLMEngine(bound=LOOSE)
    engine.update_weights(policy)
    requests = probe_requests(policy)
    for factor in (1.0, 1.01, 1.1, 2.0):

        def spoil(worker, factor=factor):
            worker.model_runner.get_model().model.layers[1].input_layernorm.weight.data[5] *= factor

        engine._push(policy)
        engine._llm.collective_rpc(spoil)
        engine._llm.reset_prefix_cache()
        gap = measure_gap(policy, requests, engine._send(requests))
        red = "stops the run" if gap.mean > 1e-4 or gap.largest > 1e-3 else "passes"
        print(f"changed {name}: one scale times {factor}: {gap.mean:.1e} on average, {gap.largest:.1e} at most: {red}")


def steps(seeds: int, number: int) -> None:
    outcomes = {"HFEngine": [], "VLLMEngine": []}
    for seed in range(seeds):
        for engine, found in outcomes.items():
            with tempfile.TemporaryDirectory() as folder:
                before, after, seconds = train(engine, seed, number, folder)
            found.append(after)
            print(
                f"steps seed {seed} {engine}: held-out accuracy {before:.3f} -> {after:.3f} ({seconds:.0f} s)",
                flush=True,
            )
    gains = [b - a for a, b in zip(outcomes["HFEngine"], outcomes["VLLMEngine"], strict=True)]
    mean = sum(gains) / seeds
    error = (sum((gain - mean) ** 2 for gain in gains) / (seeds - 1) / seeds) ** 0.5
    half = student.ppf(0.975, seeds - 1) * error
    print(
        f"steps: VLLMEngine minus HFEngine after {number} steps: {mean:+.4f} ± {half:.4f} (95 %, {seeds} paired seeds)"
    )


def train(engine: str, seed: int, number: int, folder: str) -> tuple[float, float, float]:
    command = [
        *(sys.executable, "-m", "grail_lightning", "fit", f"--config={ROOT}/configs/quickstart.yaml"),
        *(f"--model.engine={engine}", f"--seed_everything={seed}", f"--trainer.max_steps={number}"),
        *("--trainer.val_check_interval=1000", "--data.num_val=1024", "--trainer.enable_progress_bar=false"),
        f"--trainer.logger.init_args.save_dir={folder}",
    ]
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    before, after = map(float, HELD_OUT.search(done.stdout + done.stderr).groups())
    return before, after, time.perf_counter() - begun


def everything() -> None:
    smollm2 = [os.environ["SMOLLM2"]] if "SMOLLM2" in os.environ else []
    parts = [
        *(["agree", name, dtype] for name in ["arithmetic", *smollm2] for dtype in ("float32", "bfloat16")),
        *(["push", name, "float32"] for name in ["arithmetic", "wide", *smollm2]),
        *(["changed", name] for name in ["arithmetic", *smollm2]),
        ["steps"],
    ]
    for part in parts:
        subprocess.run([sys.executable, __file__, *part], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["agree", "push", "changed", "steps"])
    parser.add_argument("policy", nargs="?", default="arithmetic")
    parser.add_argument("dtype", nargs="?", default="float32")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    match options.part:
        case "agree":
            agree(options.policy, options.dtype)
        case "push":
            push(options.policy, options.dtype)
        case "changed":
            changed(options.policy)
        case "steps":
            steps(options.seeds, options.steps)
        case _:
            everything()


if __name__ == "__main__":
    main()
