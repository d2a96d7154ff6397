"""Fixed work for benchmarks: seeded responses with given answers, random-weight models, programs that take turns.

The engine draws nothing from the policy, so that two sides of a comparison get the same rollouts; all later steps
(decoding, boxes, grading, rewards) are the package's own. Programs that take turns are processes of their own: the
driver writes a line to a worker's standard input when it is its turn, and reads one line of JSON after each step.
Other benchmarks use this module; it is not run by itself.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from grail_lightning.answers import find_boxes
from grail_lightning.batch import RolloutBatch, Sampling
from grail_lightning.engines import RolloutEngine
from grail_lightning.engines.base import build_batch
from grail_lightning.policy import Policy, load_tokenizer
from grail_lightning.tasks.base import Prompt, Task

RIGHT, WRONG = "1", "2"
SHAPES = {
    "0.6b": {"hidden": 1024, "layers": 28, "vocabulary": 151_936, "num_attention_heads": 16, "num_key_value_heads": 8,
             "head_dim": 128, "intermediate_size": 3072, "tie_word_embeddings": True},
    "4b": {"hidden": 2560, "layers": 36, "vocabulary": 151_936, "num_attention_heads": 32, "num_key_value_heads": 8,
           "head_dim": 128, "intermediate_size": 9728, "tie_word_embeddings": True},
    "wide": {"hidden": 512, "layers": 10, "vocabulary": 151_936, "tie_word_embeddings": True},
    "tiny": {"hidden": 128, "layers": 2, "vocabulary": 2048, "tie_word_embeddings": True},
}  # fmt: skip
"""Sizes of random-weight models, for `random_qwen3`: Qwen3-0.6B and Qwen3-4B, and two for CPUs."""


class StandInTask(Task):
    """A task whose answer is the content of the last box."""

    def prompt(self, row):
        return Prompt(messages=row["problem"], reference=RIGHT, task=self)

    def answer(self, text):
        boxes = find_boxes(text)
        return text[boxes[-1].content_start : boxes[-1].content_stop] if boxes else None

    def reward(self, texts, prompts, verdicts):
        return [float(verdict.correct) for verdict in verdicts]


class StandInEngine(RolloutEngine):
    r"""Seeded random tokens that end on a box and the end token; in each group the first half of the rows is right.

    Args:
        shortest: Least response length in tokens; the longest is the sampling limit.
        repeats: Calls in a row that get the same responses: the sides of a comparison.
        dead: Share of groups whose rows are all wrong.
    """

    def __init__(self, shortest: int, repeats: int = 1, dead: float = 0.0) -> None:
        self.shortest, self.repeats, self.dead = shortest, repeats, dead
        self.calls = 0
        self._policy: Policy | None = None

    def update_weights(self, policy: Policy) -> None:
        self._policy = policy

    def generate(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: int) -> RolloutBatch:
        assert self._policy is not None
        responses = stand_in_responses(
            self._policy.tokenizer,
            len(prompts),
            group_size,
            (self.shortest, sampling.max_response_length),
            seed=self.calls // self.repeats,
            dead=self.dead,
        )
        self.calls += 1
        return build_batch(self._policy, prompts, group_size, responses, [True] * len(responses))


def stand_in_responses(
    tokenizer, num_groups: int, group_size: int, lengths: tuple[int, int], seed: int, dead: float = 0.0
) -> list[list[int]]:
    """`num_groups × group_size` lists of token ids; the first ``dead · num_groups`` groups have no right row."""
    random = torch.Generator().manual_seed(seed)
    plain = plain_token_ids(tokenizer)
    made = []
    for number in range(num_groups * group_size):
        group, place = divmod(number, group_size)
        right = place < group_size // 2 and group >= round(dead * num_groups)
        box = tokenizer("\\boxed{" + (RIGHT if right else WRONG) + "}", add_special_tokens=False)["input_ids"]
        end = [*box, tokenizer.eos_token_id]
        length = int(torch.randint(lengths[0], lengths[1] + 1, (), generator=random)) - len(end)
        chosen = torch.randint(len(plain), (length,), generator=random)
        made.append([plain[k] for k in chosen.tolist()] + end)
    return made


def plain_token_ids(tokenizer) -> list[int]:
    """Ids of tokens that are letters or digits: they cannot open or close a box."""
    return [k for k in range(len(tokenizer)) if tokenizer.decode([k]).strip().isalnum()]


def random_qwen3(hidden: int, layers: int, vocabulary: int, **changes) -> Policy:
    """A random-weight Qwen3 behind the packaged tokenizer, whose ids are the first of the vocabulary."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer("arithmetic")
    sizes = {"num_attention_heads": hidden // 64, "num_key_value_heads": max(hidden // 128, 1), "head_dim": 64}
    sizes |= {"intermediate_size": 3 * hidden}
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        max_position_embeddings=4096,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **(sizes | changes),
    )
    return Policy(AutoModelForCausalLM.from_config(config), tokenizer)


# --- turns ---


class Turns:
    """The worker's end of the pipe: it waits for its turn and reports the seconds and the memory of its step.

    Peak memory is what PyTorch has allocated on a GPU. On a CPU it is the largest resident size over that before the
    first step (weights loaded, no gradients yet).
    """

    def __init__(self, device: str = "cpu") -> None:
        self._wire = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # The output of libraries must not get into the pipe.
        self._cuda = device == "cuda"
        self._before: float | None = None
        self._start = self._start_cpu = 0.0

    def begin(self) -> None:
        if not sys.stdin.readline():  # The driver has ended.
            os._exit(1)
        if self._before is None:
            self._before = self._first()
        self._start, self._start_cpu = self._now(), time.process_time()

    def end(self, *, sample: float, grade: float, tokens: int, reward: float) -> None:
        """Everything but sampling and grading is the update; credit is none on both sides."""
        seconds, cpu = self._now() - self._start, time.process_time() - self._start_cpu
        assert self._before is not None
        lap = {"step": seconds, "cpu": cpu, "sample": sample, "grade": grade, "update": seconds - sample - grade}
        lap |= {"tokens": tokens, "reward": reward, "peak": self._peak() - self._before}
        print(json.dumps(lap), file=self._wire, flush=True)

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _first(self) -> float:
        """Reset the peak of loading; MiB that do not count."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            return 0.0
        Path("/proc/self/clear_refs").write_text("5")
        return _resident("VmRSS")

    def _peak(self) -> float:
        return torch.cuda.max_memory_allocated() / 2**20 if self._cuda else _resident("VmHWM")


def _resident(field: str) -> float:
    """In MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


class Worker:
    """The driver's end of the pipe."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (it lives as long as the process)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )

    def step(self) -> dict[str, float]:
        """One step; a SystemExit with the end of what the program said, if it has stopped."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._log.seek(0)
            raise SystemExit(f"{self.name} stopped:\n{self._log.read()[-3000:]}")
        lap: dict[str, float] = json.loads(line)
        return lap

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=120)
        self._log.close()


def take_turns(workers: list[Worker], rounds: int, warm_up: int) -> list[list[dict[str, float]]]:
    """The laps of each worker, in rounds that begin with another one each time. Rounds to warm up do not count."""
    laps: list[list[dict[str, float]]] = [[] for _ in workers]
    for number in range(rounds + warm_up):
        turn = number % len(workers)
        for which in [*range(turn, len(workers)), *range(turn)]:
            lap = workers[which].step()
            if number >= warm_up:
                laps[which].append(lap)
    for worker in workers:
        worker.close()
    return laps
