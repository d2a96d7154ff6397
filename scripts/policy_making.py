r"""What the scripts that make packaged policies share: tiny language models that err on purpose.

This module belongs to the scripts make_…_policy.py and is not run by itself. What a policy can do is measured by
policy_measures.py.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from grail_lightning import Prompt
from grail_lightning.core.policy.encode import encode_prompt

ASSETS = Path(__file__).parents[1] / "grail_lightning" / "worlds" / "assets"
PAD, END = "<pad>", "<end>"
R = TypeVar("R", bound="Training")

# Ordinary words and LaTeX, so that other texts need not be spelled byte by byte throughout.
PROSE = r"""
What is the value of the sum of the two numbers? Find the number of ways that this can be done. Let us first see how
the answer is to be found, then compute it. Please reason step by step, and put your final answer within the box.
We have that the function of the other point is equal to one, so there are three of them for each of the others.
Therefore the result is the following: \frac{1}{2}, \sqrt{2}, \text{ and }, \left( \right), \cdot, \begin{align*}
\end{align*}, $x = y$, \\, If in the given triangle the length of each side is an integer, what is the area?
"""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a policy is trained."""

    seed: int = 0  # Of weights and demonstrations.
    num_batches: int = 800  # Optimiser steps.
    batch_size: int = 64  # Demonstrations a step.
    learning_rate: float = 3e-3  # The peak of the cosine schedule.


@dataclass(frozen=True, kw_only=True)
class Recipe(Training):
    """How a policy that computes is made: probabilities of what goes wrong."""

    slip_rate: float = 0.1  # On a line.
    misconception_rate: float = 0.5  # Where one is possible.
    filler_rate: float = 0.05  # Of a line without content in front of a line.


@dataclass(frozen=True, kw_only=True)
class World:
    """What a policy is made for."""

    prompt: Callable[[Any], Prompt]  # Of a problem.
    train: Callable[[Any], list[Any]]  # The training problems of a recipe, in the order of the batches.
    # A solution with mistakes, by a recipe; or turns, each with what is answered to it.
    demonstrate: Callable[[Any, random.Random, Any], str | list[tuple[str, str]]]


# A word owns the blank behind it, so that "Compute " is one token in front of a digit.
PIECES = r"\\?\p{L}+ ?|\p{N}|[+\-=.{}]|\s+|[^\s\p{L}\p{N}+\-=.{}\\]+|\\"


def make_tokenizer(own: list[str], vocab_size: int = 448, pieces: str = PIECES) -> PreTrainedTokenizerFast:
    r"""A byte-level BPE: any text round-trips; digits and signs stand alone; `\boxed` is one token.

    Args:
        own: Texts of the world, whose words become one token each.
        vocab_size: The number of tokens.
        pieces: A pattern of the pieces of a text, none of which shares a token with another one.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(PAD, normalized=False), AddedToken(END, normalized=False)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # The world's own words come often enough to become one token each.
    bpe.train_from_iterator([*(text for text in own for _ in range(100)), PROSE], trainer)
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


def demonstrations(tokenizer: Any, world: World, recipe: Training) -> list[tuple[list[int], list[int]]]:
    """Token ids of prompt, demonstration and end token, and their targets: -100 on what a policy does not sample."""
    rng = random.Random(recipe.seed)
    rows = []
    for problem in world.train(recipe):
        ids = encode_prompt(tokenizer, world.prompt(problem).messages)
        targets = [-100] * len(ids)
        shown = world.demonstrate(problem, rng, recipe)
        for turn, answered in [(shown, "")] if isinstance(shown, str) else shown:
            # Each part is encoded by itself, as in a rollout.
            sampled, given = tokenizer([turn, answered])["input_ids"]
            ids, targets = ids + sampled + given, targets + sampled + [-100] * len(given)
        rows.append(([*ids, tokenizer.eos_token_id], [*targets, tokenizer.eos_token_id]))
    return rows


def imitate(model: Qwen3ForCausalLM, tokenizer: Any, world: World, recipe: Training) -> None:
    """Maximise the likelihood of what is sampled in the demonstrations."""
    rows = demonstrations(tokenizer, world, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: shape(step / recipe.num_batches))
    model.train()
    for step in range(recipe.num_batches):
        ids, targets = pad_right(rows[step * recipe.batch_size :][: recipe.batch_size], tokenizer.pad_token_id)
        hidden, learnt = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1], targets[:, 1:] != -100
        loss = F.cross_entropy(model.lm_head(hidden[learnt]), targets[:, 1:][learnt])
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


def pad_right(rows: list[tuple[list[int], list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``ids [B, L]``, and ``targets [B, L]`` that are -100 on prompts, answers of an environment and padding."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [pad] * (width - len(row)) for row, _ in rows])
    targets = torch.tensor([row + [-100] * (width - len(row)) for _, row in rows])
    return ids, targets


def parse_arguments(description: str | None, defaults: R, output: Path) -> tuple[argparse.Namespace, R]:
    """The options `--output` and `--threads`, and one for each field of the recipe."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=output, help="folder to write to")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; part of what makes a run repeatable")
    for name, value in vars(defaults).items():
        numbers = len(value) if isinstance(value, tuple) else None
        kind = type(value[0]) if isinstance(value, tuple) else type(value)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, nargs=numbers, default=value)
    options = parser.parse_args()
    chosen = {name: getattr(options, name) for name in vars(defaults)}
    return options, type(defaults)(**{k: tuple(v) if isinstance(v, list) else v for k, v in chosen.items()})


def make_repeatable(recipe: Training, threads: int) -> None:
    """Set what the weights depend on beside the recipe and the versions of libraries."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(recipe.seed)


def save(model: Any, tokenizer: Any, output: Path, dtype: torch.dtype) -> None:
    """Write a policy; the second one is its tokenizer or its processor."""
    model.to(dtype).save_pretrained(output)
    tokenizer.save_pretrained(output)
    # safetensors writes files that only their owner may read.
    (output / "model.safetensors").chmod(0o644)


def make(
    world: World,
    tokenizer: Any,
    recipe: Training,
    options: argparse.Namespace,
    *,
    start: str = "",
    dtype: torch.dtype = torch.bfloat16,
) -> float:
    """Make and save a policy; returns the minutes that it took.

    `start` is the folder of a policy with the same tokenizer, whose weights are the beginning; random ones without.
    """
    make_repeatable(recipe, options.threads)
    begun = time.perf_counter()
    if start:
        model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    else:
        model = make_model(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id)
    imitate(model, tokenizer, world, recipe)
    save(model, tokenizer, options.output, dtype)
    return (time.perf_counter() - begun) / 60
