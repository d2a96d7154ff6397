"""What a packaged policy can do, and the README beside its weights.

This module belongs to the scripts make_…_policy.py and is not run by itself.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from policy_making import Recipe, Training, World

from grail_lightning.batch import SampledBatch, Sampling
from grail_lightning.engines import HFEngine
from grail_lightning.grading import TaskVerifiers, grade_answers
from grail_lightning.policy import Policy
from grail_lightning.policy.tokenizer import encode_prompt
from grail_lightning.step.episodes import play
from grail_lightning.tasks.base import Prompt

PASS_AT = 8


@torch.no_grad()
def respond(
    model: Any, tokenizer: Any, world: World, problems: list[Any], *, sample: bool, batch_size: int = 256
) -> tuple[list[str], float]:
    """A response to each problem, and the mean entropy of a response token in nats (at temperature 1)."""
    texts, entropy, tokens = [], 0.0, 0
    model.eval()
    for start in range(0, len(problems), batch_size):
        prompts = [encode_prompt(tokenizer, world.prompt(p).messages) for p in problems[start : start + batch_size]]
        encoded = tokenizer.pad({"input_ids": prompts}, return_tensors="pt", padding_side="left")
        out = model.generate(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            max_new_tokens=world.max_response_length,
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


def measure(model: Any, tokenizer: Any, world: World, problems: list[Any]) -> dict[str, float]:
    """What the policy can do on held-out problems."""
    task, longest, verifiers = world.task, world.max_response_length, TaskVerifiers()
    greedy, _ = respond(model, tokenizer, world, problems, sample=False)
    repeated = [problem for problem in problems for _ in range(PASS_AT)]
    sampled, entropy = respond(model, tokenizer, world, repeated, sample=True)

    def right(texts: list[str], asked: list[Any]) -> list[bool]:
        verdicts = grade_answers(texts, [world.prompt(one) for one in asked], verifiers)
        return [verdict.correct for verdict in verdicts]

    kinds: Counter[str] = Counter()
    for text, problem in zip(sampled, repeated, strict=True):
        steps = task.label_steps(text, world.prompt(problem)) or []
        kinds.update(step.kind for step in steps if step.kind != "filler")
    # The end token counts where there is one.
    lengths = [min(len(ids) + 1, longest) for ids in tokenizer(sampled)["input_ids"]]
    correct = right(sampled, repeated)
    greedily = right(greedy, problems)
    verifiers.close()
    groups = [correct[k : k + PASS_AT] for k in range(0, len(correct), PASS_AT)]
    return {
        "accuracy at temperature 1": sum(correct) / len(correct),
        "greedy accuracy": sum(greedily) / len(problems),
        f"pass@{PASS_AT}": sum(map(any, groups)) / len(groups),
        f"share of groups of {PASS_AT} with both outcomes": sum(any(g) and not all(g) for g in groups) / len(groups),
        "entropy of a response token (nats)": entropy,
        **{f"share of {k} among steps": kinds[k] / kinds.total() for k in ("slip", "misconception", "inherited")},
        "mean response length (tokens)": sum(lengths) / len(lengths),
        "longest response (tokens)": max(lengths),
    }


def measure_turns(policy: Policy, prompts: list[Prompt], max_response_length: int) -> dict[str, float]:
    """What a policy that acts in turns can do on held-out questions."""
    engine, sampling = HFEngine(), Sampling(max_response_length=max_response_length)
    engine.update_weights(policy)
    greedy = play(engine, policy, prompts, 1, replace(sampling, temperature=0.0), range(len(prompts)))
    batch = play(engine, policy, prompts, PASS_AT, sampling, range(PASS_AT * len(prompts)))

    def right(batch: SampledBatch) -> list[bool]:
        return [p.task.answer(text) == p.reference for text, p in zip(batch.texts, batch.prompts, strict=True)]

    correct = right(batch)
    groups = [correct[k : k + PASS_AT] for k in range(0, len(correct), PASS_AT)]
    scores = [turn.score for episode in batch.episodes for turn in episode.turns if turn.score is not None]
    lengths = batch.response_mask.sum(1)
    return {
        "accuracy at temperature 1": sum(correct) / len(correct),
        "greedy accuracy": sum(right(greedy)) / len(prompts),
        f"pass@{PASS_AT}": sum(map(any, groups)) / len(groups),
        f"share of groups of {PASS_AT} with both outcomes": sum(any(g) and not all(g) for g in groups) / len(groups),
        "entropy of a sampled token (nats)": -float(batch.sampling_logprobs[batch.response_mask].mean()),
        "scored turns a rollout": len(scores) / len(correct),
        "share of scored turns that score 1": sum(scores) / len(scores),
        "share of rollouts that end with an answer": sum(e.end == "answered" for e in batch.episodes) / len(correct),
        "mean number of sampled tokens": float(lengths.float().mean()),
        "largest number of sampled tokens": int(lengths.max()),
        "largest number of tokens, results included": int(batch.valid_lengths.max()),
    }


def command(script: str, recipe: Training) -> str:
    """The command that makes the policy again."""
    values = {name: " ".join(map(str, v)) if isinstance(v, tuple) else v for name, v in vars(recipe).items() if v != ""}
    settings = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in values.items())
    return f"python scripts/{script} --threads {torch.get_num_threads()} {settings}"


def _text(prompt: Prompt) -> str:
    """A prompt as text."""
    messages = prompt.messages
    return messages if isinstance(messages, str) else "\n".join(message["content"] for message in messages)


def table(figures: dict[str, dict[str, float]]) -> str:
    """Figures as a table with a column for each kind of problems."""
    names = list(next(iter(figures.values())))
    head = "| figure | " + " | ".join(figures) + " |\n|---|" + "--:|" * len(figures)
    return "\n".join([head, *(f"| {n} | " + " | ".join(f"{f[n]:.4g}" for f in figures.values()) + " |" for n in names)])


@dataclass(frozen=True, kw_only=True)
class Page:
    """The parts of a README that differ between policies.

    Attributes:
        output: The folder of the policy.
        script: The name of the script that made it.
        errors: What its errors are.
        num_problems: The number of held-out problems of each kind.
    """

    output: Path
    script: str
    errors: str
    num_problems: int = 512


def write_card(
    model: Any, tokenizer: Any, world: World, example: Any, recipe: Recipe, page: Page, begun: float
) -> None:
    """Measure the policy on held-out problems and write the README beside its weights.

    Args:
        model: The policy.
        tokenizer: Its tokenizer.
        world: What it was made for.
        example: The problem whose response is shown.
        recipe: How it was made.
        page: The folder and the texts of the README.
        begun: When the work began, by `time.perf_counter`.
    """
    figures = {
        name: measure(model, tokenizer, world, draw(page.num_problems, "validation"))
        for name, draw in world.held_out.items()
    }
    print(json.dumps(figures, indent=2))
    response = respond(model, tokenizer, world, [example], sample=True)[0][0]
    seconds = time.perf_counter() - begun
    (page.output / "README.md").write_text(f"""# The packaged policy `{page.output.name}`

A Qwen3 of {model.num_parameters():,} parameters with a byte-level tokenizer of its own, which solves problems line by
line and errs on purpose. It is made for trying reinforcement learning on a laptop and knows nothing else. A problem and
a response:

~~~
{_text(world.prompt(example))}

{response}
~~~

Made in {seconds / 60:.1f} minutes by

```
{command(page.script, recipe)}
```

with torch {torch.__version__}, transformers {transformers.__version__}, tokenizers {tokenizers.__version__}.

On {page.num_problems} held-out problems (split `validation`, seed 0), {PASS_AT} samples each at temperature 1:

{table(figures)}

{page.errors}
""")
    print(f"wrote {page.output} in {seconds:.0f} s")
