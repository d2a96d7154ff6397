r"""Make the packaged policy `grail_lightning/assets/arithmetic`: a tiny language model that errs on purpose.

A Qwen3 of 0.8 M parameters learns from demonstrations that hold two kinds of mistakes: slips (rare and random, so the
flawed token is unlikely) and misconceptions (the carry is forgotten in about half of the cases, so the flawed token is
likely). It then knows format and arithmetic but errs at random, which is what reinforcement learning needs to find
something. A model made on clean demonstrations errs deterministically and learns nothing from its own samples.

    python scripts/make_arithmetic_policy.py

The same seed, thread count and library versions give the same weights.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from grail_lightning.tasks.arithmetic import ArithmeticTask
from grail_lightning.tasks.problems import FILLERS, Problem, ProblemSpace, demonstration

ASSET = Path(__file__).parents[1] / "grail_lightning" / "assets" / "arithmetic"
PAD, END = "<pad>", "<end>"
MAX_RESPONSE_LENGTH = 64
PASS_AT = 8
EXAMPLE = "7+5-3+8-9"

# Ordinary words and LaTeX, so that other texts need not be spelled byte by byte throughout.
PROSE = r"""
What is the value of the sum of the two numbers? Find the number of ways that this can be done. Let us first see how
the answer is to be found, then compute it. Please reason step by step, and put your final answer within the box.
We have that the function of the other point is equal to one, so there are three of them for each of the others.
Therefore the result is the following: \frac{1}{2}, \sqrt{2}, \text{ and }, \left( \right), \cdot, \begin{align*}
\end{align*}, $x = y$, \\, If in the given triangle the length of each side is an integer, what is the area?
"""


@dataclass(frozen=True)
class Recipe:
    """How the policy is made.

    Attributes:
        seed: Of weights and demonstrations.
        num_batches: Optimiser steps.
        batch_size: Demonstrations a step.
        learning_rate: Peak of the cosine schedule.
        slip_rate: Probability of a slip on a line.
        misconception_rate: Probability that a carry that can be forgotten is forgotten.
        filler_rate: Probability of a line without content in front of a line.
    """

    seed: int = 0
    num_batches: int = 800
    batch_size: int = 64
    learning_rate: float = 3e-3
    slip_rate: float = 0.1
    misconception_rate: float = 0.5
    filler_rate: float = 0.05


def make_tokenizer() -> PreTrainedTokenizerFast:
    r"""A byte-level BPE: any text round-trips; digits and signs stand alone; `\boxed` is one token."""
    bpe = Tokenizer(models.BPE())
    # A word owns the blank behind it, so that "Compute " is one token in front of a digit.
    pieces = Regex(r"\\?\p{L}+ ?|\p{N}|[+\-=.{}]|\s+|[^\s\p{L}\p{N}+\-=.{}\\]+|\\")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pieces, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=448,
        special_tokens=[AddedToken(PAD, normalized=False), AddedToken(END, normalized=False)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # The world's own words come often enough to become one token each.
    own = [text for text in ("Compute ", r"\boxed", *FILLERS) for _ in range(100)]
    bpe.train_from_iterator([*own, PROSE], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_model(vocab_size: int, pad: int, end: int) -> Qwen3ForCausalLM:
    """Four layers of width 128 with random weights."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=pad,
        eos_token_id=end,
        bos_token_id=None,
    )
    config.dtype = torch.float32
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad, do_sample=True)
    return model


def demonstrations(tokenizer: Any, recipe: Recipe) -> tuple[list[list[int]], list[int]]:
    """Token ids of prompt, demonstration and end token, and how many of them are the prompt's."""
    rng = random.Random(recipe.seed)
    problems = ProblemSpace().sample(recipe.num_batches * recipe.batch_size, "train", recipe.seed)
    task = ArithmeticTask()
    prompts = [str(task.prompt({"problem": p.expression}).messages) for p in problems]
    solutions = [
        demonstration(p, rng, recipe.slip_rate, recipe.misconception_rate, recipe.filler_rate) for p in problems
    ]
    heads, tails = tokenizer(prompts)["input_ids"], tokenizer(solutions)["input_ids"]
    rows = [head + tail + [tokenizer.eos_token_id] for head, tail in zip(heads, tails, strict=True)]
    return rows, [len(head) for head in heads]


def imitate(model: Qwen3ForCausalLM, tokenizer: Any, recipe: Recipe) -> None:
    """Maximise the likelihood of the demonstrations, prompts left out."""
    rows, prompt_lengths = demonstrations(tokenizer, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: shape(step / recipe.num_batches))
    model.train()
    for step in range(recipe.num_batches):
        chosen = slice(step * recipe.batch_size, (step + 1) * recipe.batch_size)
        ids, targets = pad_right(rows[chosen], prompt_lengths[chosen], tokenizer.pad_token_id)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"batch {step + 1}: loss {loss.item():.3f}", flush=True)


def shape(progress: float, warmup: float = 0.05) -> float:
    """Learning rate as a share of its peak: up linearly, down along a cosine."""
    return min(progress / warmup + 0.01, 0.5 + 0.5 * math.cos(math.pi * progress))


def pad_right(rows: list[list[int]], prompt_lengths: list[int], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``ids [B, L]``, and ``targets [B, L]`` that are -100 on prompts and padding."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    targets = torch.tensor(
        [
            [-100] * head + row[head:] + [-100] * (width - len(row))
            for row, head in zip(rows, prompt_lengths, strict=True)
        ]
    )
    return ids, targets


@torch.no_grad()
def respond(
    model: Any, tokenizer: Any, problems: list[Problem], *, sample: bool, batch_size: int = 256
) -> tuple[list[str], float]:
    """A response to each problem, and the mean entropy of a response token in nats (at temperature 1)."""
    task, texts, entropy, tokens = ArithmeticTask(), [], 0.0, 0
    model.eval()
    for start in range(0, len(problems), batch_size):
        prompts = [str(task.prompt({"problem": p.expression}).messages) for p in problems[start : start + batch_size]]
        encoded = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        out = model.generate(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            max_new_tokens=MAX_RESPONSE_LENGTH,
            do_sample=sample,
            top_k=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        responses = out.sequences[:, encoded["input_ids"].shape[1] :]
        # The end token counts, the padding behind it does not.
        mask = (responses == tokenizer.eos_token_id).cumsum(1) - (responses == tokenizer.eos_token_id).long() == 0
        logprobs = torch.stack(out.logits, 1).log_softmax(-1)
        entropy += float((-(logprobs.exp() * logprobs).sum(-1) * mask).sum())
        tokens += int(mask.sum())
        texts += tokenizer.batch_decode(responses, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return texts, entropy / tokens


def measure(model: Any, tokenizer: Any, num_problems: int = 512) -> dict[str, float]:
    """What the policy can do on held-out problems."""
    task, problems = ArithmeticTask(), ProblemSpace().sample(num_problems, "validation")
    greedy, _ = respond(model, tokenizer, problems, sample=False)
    repeated = [problem for problem in problems for _ in range(PASS_AT)]
    sampled, entropy = respond(model, tokenizer, repeated, sample=True)
    right = [task.answer(text) == str(problem.answer) for text, problem in zip(sampled, repeated, strict=True)]
    kinds: Counter[str] = Counter()
    for text, problem in zip(sampled, repeated, strict=True):
        steps = task.label_steps(text, task.prompt({"problem": problem.expression}))
        kinds.update(step.kind for step in steps if step.kind != "filler")
    # The end token counts where there is one.
    lengths = [min(len(ids) + 1, MAX_RESPONSE_LENGTH) for ids in tokenizer(sampled)["input_ids"]]
    groups = [right[k : k + PASS_AT] for k in range(0, len(right), PASS_AT)]
    return {
        "accuracy at temperature 1": sum(right) / len(right),
        "greedy accuracy": sum(task.answer(t) == str(p.answer) for t, p in zip(greedy, problems, strict=True))
        / num_problems,
        f"pass@{PASS_AT}": sum(map(any, groups)) / len(groups),
        "share of groups of 8 with both outcomes": sum(any(g) and not all(g) for g in groups) / len(groups),
        "entropy of a response token (nats)": entropy,
        **{f"share of {k} among steps": kinds[k] / kinds.total() for k in ("slip", "misconception", "inherited")},
        "mean response length (tokens)": sum(lengths) / len(lengths),
        "longest response (tokens)": max(lengths),
    }


def card(recipe: Recipe, figures: dict[str, float], example: str, seconds: float, parameters: int) -> str:
    """The README beside the weights."""
    settings = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in vars(recipe).items())
    rows = "\n".join(f"| {name} | {value:.4g} |" for name, value in figures.items())
    return f"""# The packaged policy `arithmetic`

A Qwen3 of {parameters:,} parameters with a byte-level tokenizer of its own, which works out problems such as
`Compute 7+5-3+8.` line by line and errs on purpose. It is made for trying reinforcement learning on a laptop and knows
nothing else. A response to `Compute {EXAMPLE}.`:

```
{example}
```

Made in {seconds / 60:.1f} minutes by

```
python scripts/make_arithmetic_policy.py --threads {torch.get_num_threads()} {settings}
```

with torch {torch.__version__}, transformers {transformers.__version__}, tokenizers {tokenizers.__version__}.

On 512 held-out problems of 5 single-digit terms (split `validation`, seed 0), {PASS_AT} samples each at temperature 1:

| figure | value |
|---|--:|
{rows}

Slips are random wrong results. Misconceptions forget the carry: `7+5=2`. Inherited steps go on from a wrong result.
"""


def parse_arguments() -> argparse.Namespace:
    """One flag for each field of `Recipe`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=ASSET, help="folder to write to")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; part of what makes a run repeatable")
    for name, value in vars(Recipe()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser.parse_args()


def main() -> None:
    """Make, measure and save."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.use_deterministic_algorithms(True)
    recipe = Recipe(**{name: getattr(arguments, name) for name in vars(Recipe())})
    torch.manual_seed(recipe.seed)
    start = time.perf_counter()
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id)
    imitate(model, tokenizer, recipe)
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    # safetensors writes files that only their owner may read.
    (arguments.output / "model.safetensors").chmod(0o644)
    figures = measure(model, tokenizer)
    print(json.dumps(figures, indent=2))
    example = respond(model, tokenizer, [Problem.parse(EXAMPLE)], sample=True)[0][0]
    seconds = time.perf_counter() - start
    (arguments.output / "README.md").write_text(card(recipe, figures, example, seconds, model.num_parameters()))
    print(f"wrote {arguments.output} in {seconds:.0f} s")


if __name__ == "__main__":
    main()
