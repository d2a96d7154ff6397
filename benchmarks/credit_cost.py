"""The cost of token credit: complete training steps of GRAIL and of Dr. GRPO, which alternate in one run.

    OMP_NUM_THREADS=1 python benchmarks/credit_cost.py --case quickstart
    OMP_NUM_THREADS=1 python benchmarks/credit_cost.py --case 34m

The steps are those of the module: sampling, grading, credit, update, optimiser. `quickstart` is the packaged
policy sampling as in configs/quickstart.yaml (same prompts and same random numbers on all sides; the learning rate is 0
so that they stay the same policy). `34m` is a random-weight Qwen3 of 34 million parameters on seeded responses of
256-512 tokens: every group mixed, half of the rows boxed with a negative advantage. `0.6b` and `4b`, for `--device
cuda`: Qwen3's shapes with random weights in bfloat16 and masters, 2 × 4 responses of 2,048 tokens, `4b` with
checkpointed blocks; `tiny` is a small version. On a GPU three columns more: tokens a second of the update, the peak of
what PyTorch has allocated, and MFU = 6 · parameters · tokens that were run / (seconds of the update · peak FLOP/s).

The default sides are Dr. GRPO (`Uniform`); GRAIL with its defaults; GRAIL with a separate saliency pass; GRAIL with
`refresh: step`; and GRAIL as in published code: before every optimiser step, with all rows, whole sequences, all
logits and parameter gradients. `--sides` chooses others, such as the methods of the group's prefix tree (`tree`),
PRIME, also with a second forward pass (`PRIME, twice`), or SDPG's loss beside Dr. GRPO.
Prints medians, ratios to Dr. GRPO with the same number of updates, with and without sampling.

The stand-ins of this module, random-weight models and an engine that hands out seeded responses, are those of
step_vs_trl.py and gpu_check.py, too. The engine draws nothing from the policy, so that two sides of a comparison get
the same rollouts; all later steps (decoding, boxes, grading, rewards) are the package's own.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import lightning.pytorch as pl
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from grail_lightning import (
    SDPG,
    ArithmeticData,
    DrGRPO,
    Execution,
    GrailModule,
    Loading,
    Policy,
    Prompt,
    RolloutBatch,
    RolloutEngine,
    Sampling,
    Task,
    build_batch,
    credit,
)
from grail_lightning.answers import find_boxes
from grail_lightning.core.credit.service import Owner, RunParts, Services
from grail_lightning.core.policy.source import load_tokenizer
from grail_lightning.functional import grail_map

RIGHT, WRONG = "1", "2"
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "A10": 125, "4090": 165, "B200": 2250}
"""Dense products in bfloat16, 10¹² operations a second."""
LENGTHS = {"34m": (256, 512), "0.6b": (2048, 2048), "4b": (2048, 2048), "tiny": (64, 64)}
SHAPES = {
    "0.6b": {"hidden": 1024, "layers": 28, "vocabulary": 151_936, "num_attention_heads": 16, "num_key_value_heads": 8,
             "head_dim": 128, "intermediate_size": 3072, "tie_word_embeddings": True},
    "4b": {"hidden": 2560, "layers": 36, "vocabulary": 151_936, "num_attention_heads": 32, "num_key_value_heads": 8,
           "head_dim": 128, "intermediate_size": 9728, "tie_word_embeddings": True},
    "wide": {"hidden": 512, "layers": 10, "vocabulary": 151_936, "tie_word_embeddings": True},
    "34m": {"hidden": 512, "layers": 8, "vocabulary": 8192},
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
    """Seeded random tokens that end on a box and the end token; in each group the first half of the rows is right.

    They have at least `shortest` tokens. As many calls in a row as `repeats` get the same responses: the sides of a
    comparison. In the share `dead` of the groups all rows are wrong.
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
    # Letters and digits cannot open or close a box.
    plain = [k for k in range(len(tokenizer)) if tokenizer.decode([k]).strip().isalnum()]
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


# --- sides ------------------------------------------------------------------------------------------------------------


class Published(credit.TokenCredit):
    """GRAIL's weights, computed as in published code: before every optimiser step."""

    refresh = "step"

    def __call__(self, policy, batch, context):
        embeds = policy.embed(batch.input_ids)
        embeds.retain_grad()
        logits = policy.model(inputs_embeds=embeds, attention_mask=batch.attention_mask.long(), use_cache=False).logits
        width = batch.response_mask.shape[1]
        chosen = logits[:, -width - 1 : -1].float().log_softmax(-1).gather(-1, batch.response_ids[..., None])
        (-(chosen.squeeze(-1) * batch.answer.whole).sum()).backward()
        scores = (embeds.grad * embeds.detach()).norm(dim=-1)[:, -width - 1 : -1].masked_fill(~batch.response_mask, 0)
        policy.zero_grad(set_to_none=True)
        values = grail_map(scores, batch.response_mask)
        return credit.TokenWeights(values=values, fallback=torch.zeros(len(batch), dtype=torch.bool), scores=scores)


CREDITS: dict[str, credit.TokenCredit] = {
    "DrGRPO": credit.Uniform(),
    "GRAIL": credit.GRAIL(),
    "own pass": credit.GRAIL(saliency=credit.SaliencyOptions(fuse=False)),
    "every update": credit.GRAIL(saliency=credit.SaliencyOptions(refresh="step")),
    "published way": Published(),
    "tree": credit.TreeAdvantage(),
    "optimal baseline": credit.OptimalBaseline(),
    "DGPO": credit.DGPO(),
    "rhythm": credit.AttentionRhythm(),
    "resampled": credit.Resampled(),
    "PRIME": credit.PRIME(),
    "PRIME, twice": credit.PRIME(double_forward=True),
    "SDPG": credit.Uniform(),
}
OBJECTIVE = DrGRPO(clip_high=0.28, mask_truncated=True)
OBJECTIVES = {"SDPG": SDPG(mask_truncated=True)}  # Of other sides it is the one above.


class Alternate(pl.Callback):
    """Gives the batches to the sides in turn, in a new order every round, and keeps the seconds of the phases."""

    def __init__(self, sides: list[tuple[str, int]], clock: Callable[[], float], device: str, until: int) -> None:
        self.sides, self.clock, self.cuda, self.until = sides, clock, device == "cuda", until
        self.laps: dict = defaultdict(lambda: defaultdict(list))
        self.profiler: torch.profiler.profile | None = None
        self.eligible: list[float] = []
        self._start = self._sampling = 0.0
        self._round = 0  # Of which all sides get the same responses.

    def now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return self.clock()

    def on_train_start(self, trainer, pl_module):
        generate = pl_module.engine.generate

        def timed(prompts, group_size, sampling, seed):
            start = self.now()
            batch = generate(prompts, group_size, sampling, self._round)
            self._sampling = self.now() - start
            return batch

        pl_module.engine.generate = timed

    def side(self, number: int) -> tuple[str, int]:
        turn, place = divmod(number, len(self.sides))
        return self.sides[(place + turn) % len(self.sides)]

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._round, (name, updates) = batch_idx // len(self.sides), self.side(batch_idx)
        pl_module.credit = CREDITS[name]
        pl_module.objective = OBJECTIVES.get(name, OBJECTIVE)
        pl_module.execution = replace(pl_module.execution, num_iterations=updates)
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        if batch_idx >= self.until:  # One step more, whose kernels are listed.
            self.profiler = torch.profiler.profile()
            self.profiler.start()
        self._start = self.now()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        seconds = self.now() - self._start
        if self.profiler is not None:
            self.profiler.stop()
        if batch_idx < len(self.sides) or self.profiler is not None:
            return  # The first round warms up.
        laps, metrics = self.laps[self.side(batch_idx)], outputs["output"].metrics
        laps["step"].append(seconds)
        laps["without sampling"].append(seconds - self._sampling)
        for phase in ("sample", "credit", "update"):
            laps[phase].append(metrics[f"time/{phase}"])
        laps["tokens"].append(int(outputs["output"].batch.lengths.sum()) * (1 - metrics.get("shared_tokens", 0.0)))
        laps["peak"].append(torch.cuda.max_memory_allocated() / 2**30 if self.cuda else 0.0)
        if "credit/eligible" in metrics:
            self.eligible.append(metrics["credit/eligible"])


class Copied(Services):
    """Services whose models are copies of the policy, which no name can load."""

    def open(self, stage: str, owners: Sequence[Owner], run: RunParts) -> None:
        def load(source: object, *, trainable: bool) -> Policy:
            return copy.deepcopy(run.policy).requires_grad_(trainable)

        super().open(stage, owners, replace(run, load_model=load))


def stand_in_policy(case: str, device: str) -> Policy:
    """Random weights, in bfloat16 but for `34m`; those of 4 billion parameters with checkpointed blocks."""
    with torch.device(device):
        policy = random_qwen3(**SHAPES[case])
    if case != "34m":
        policy = policy.to(torch.bfloat16)
        policy.loading = Loading(gradient_checkpointing=case == "4b", dtype="bfloat16")
    if policy.loading.gradient_checkpointing:
        policy.model.activation_checkpointing_enable({"use_reentrant": False})
    if device == "cuda":
        torch.cuda.empty_cache()  # They were made in float32.
    return policy.train()


def build(case: str, repeats: int, mini_batches: int, sides: Sequence[str], device: str) -> tuple[GrailModule, list]:
    """The module, with what the sides need beside it, and the prompts of a batch for any number of rounds."""

    def still(parameters):
        return torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0, fused=device == "cuda")

    if case == "quickstart":
        execution, sampling = Execution(group_size=8, mini_batches=mini_batches), Sampling(max_response_length=64)
        (problems,) = ArithmeticData(num_train=512).load("train")
        made = GrailModule("arithmetic", sampling, execution=execution, optimizer=still)
        _add_services(made, sides)
        return made, [problems.prompts[16 * k : 16 * k + 16] for k in range(32)]
    shortest, longest = LENGTHS[case]
    engine, sampling = StandInEngine(shortest, repeats), Sampling(max_response_length=longest)
    policy = stand_in_policy(case, device)
    execution = Execution(group_size=4, **({} if case == "34m" else {"token_budget": 4 * (longest + 52)}))
    loading = policy.loading
    made = GrailModule("arithmetic", sampling, loading, engine=engine, execution=execution, optimizer=still)
    made.policy = policy
    made.services = Copied()
    _add_services(made, sides)
    return made, [[StandInTask().prompt({"problem": f"{k}+{k}\n"}) for k in (11, 12)]]


def _add_services(module: GrailModule, sides: Sequence[str]) -> None:
    """The run opens what any side uses, since each takes its turn."""
    for name in sides:
        for part in (CREDITS[name], OBJECTIVES.get(name, OBJECTIVE)):
            module.services.add(part)


def alternate(options: argparse.Namespace, sides: list[tuple[str, int]]) -> None:
    """Run all sides in turn; print their medians and ratios."""
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    cuda, rounds = options.device == "cuda", options.rounds
    module, prompts = build(options.case, len(sides), options.mini_batches, options.sides, options.device)
    number = (rounds + 1) * len(sides)
    watch = Alternate(sides, clock, options.device, number)
    batches = [prompts[k // len(sides) % len(prompts)] for k in range(number + options.profile)]
    pl.Trainer(
        max_epochs=1, accelerator="gpu" if cuda else "cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[watch],
        precision="32-true" if options.case in ("quickstart", "34m") else "bf16-true",
    ).fit(module, torch.utils.data.DataLoader(batches, batch_size=None))  # fmt: skip
    size = sum(p.numel() for p in module.policy.parameters()) / 1e6
    eligible = f", eligible rows {statistics.mean(watch.eligible):.2f}" if watch.eligible else ""
    print(f"{size:.1f} M parameters, {rounds} rounds{eligible}; prefix trees by {module.policy.tree_kernel}")
    more = ["tokens/s of update", "peak GiB", "MFU"] if cuda else []
    heads = ["step, s", "sample", "credit", "update", "step / DrGRPO", "without sampling", "credit / update", *more]
    print(f"| side | updates | {' | '.join(heads)} |\n|---|{'--:|' * (1 + len(heads))}")
    known = [peak for name, peak in PEAK_TFLOPS.items() if cuda and name in torch.cuda.get_device_name()]
    flops = options.peak_tflops or (known or [math.nan])[0]
    for name, updates in sides:
        laps, base = watch.laps[name, updates], watch.laps["DrGRPO", updates]
        median = {phase: statistics.median(values) for phase, values in laps.items()}
        # Ratios are taken within a round, so that a slow minute of the machine affects both sides.
        whole, bare = (
            statistics.median(a / b for a, b in zip(laps[phase], base[phase], strict=True))
            for phase in ("step", "without sampling")
        )
        cells = [f"{median[phase]:.2f}" for phase in ("step", "sample", "credit", "update")]
        cells += [f"{whole:.3f}", f"{bare:.3f}", f"{median['credit'] / median['update']:.2f}"]
        speed = updates * median["tokens"] / median["update"]
        cells += [f"{speed:.0f}", f"{max(laps['peak']):.1f}", f"{6 * size * speed / (flops * 1e6):.1%}"] if cuda else []
        print(f"| {name} | {updates} | {' | '.join(cells)} |")
    if watch.profiler is not None:
        kernels = watch.profiler.key_averages()
        where = "cuda" if cuda else "cpu"
        print(f"\nOne step of {watch.side(number)[0]}:\n")
        print(kernels.table(f"self_{where}_time_total", row_limit=25, max_name_column_width=60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=["quickstart", *LENGTHS], default="quickstart")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--updates", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--mini-batches", type=int, default=1, help="of the quickstart; its config has 2")
    parser.add_argument("--sides", nargs="+", choices=list(CREDITS), default=list(CREDITS)[:5], help="with DrGRPO")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu where others use the machine")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--peak-tflops", type=float, help="dense bfloat16, of GPUs that are not known")
    parser.add_argument("--profile", action="store_true", help="list the kernels of one step more")
    options = parser.parse_args()
    torch.set_num_threads(1)
    alternate(options, [(name, updates) for updates in options.updates for name in options.sides])


if __name__ == "__main__":
    main()
