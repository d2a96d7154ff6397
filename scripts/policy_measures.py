"""What a packaged policy can do, and the README beside its weights.

This module belongs to the scripts make_…_policy.py and is not run by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
import transformers
from policy_making import Training

from grail_lightning import HFEngine, Policy, Prompt, SampledBatch, Sampling, grade_answers
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.rollout.grading import TaskVerifiers
from grail_lightning.core.step.episodes import play

PASS_AT = 8


def measure(policy: Policy, prompts: list[Prompt], max_response_length: int) -> dict[str, float]:
    """What the policy can do on held-out problems."""
    engine, verifiers = HFEngine(), TaskVerifiers()
    engine.update_weights(policy)

    def respond(number: int, temperature: float) -> tuple[SampledBatch, list[bool]]:
        sampling = Sampling(max_response_length=max_response_length, temperature=temperature)
        if prompts[0].task.has_environment:
            batch = play(engine, policy, prompts, number, sampling, range(number * len(prompts)))
        else:
            batch = engine.generate(prompts, number, sampling, seed=0)
        return batch, [verdict.correct for verdict in grade_answers(batch.texts, batch.prompts, verifiers)]

    greedily, (batch, correct) = respond(1, 0.0)[1], respond(PASS_AT, 1.0)
    verifiers.close()
    groups = [correct[k : k + PASS_AT] for k in range(0, len(correct), PASS_AT)]
    lengths = batch.response_mask.sum(1)
    return {
        "accuracy at temperature 1": sum(correct) / len(correct),
        "greedy accuracy": sum(greedily) / len(prompts),
        f"pass@{PASS_AT}": sum(map(any, groups)) / len(groups),
        f"share of groups of {PASS_AT} with both outcomes": sum(any(g) and not all(g) for g in groups) / len(groups),
        "entropy of a sampled token (nats)": -float(batch.sampling_logprobs[batch.response_mask].mean()),
        **(of_steps(batch) if batch.turn is None else of_turns(batch)),
        "mean number of sampled tokens": float(lengths.float().mean()),
        "largest number of sampled tokens": int(lengths.max()),
    }


def of_steps(batch: SampledBatch) -> dict[str, float]:
    """The kinds of the labelled steps; nothing where a task labels none."""
    kinds: Counter[str] = Counter()
    for text, prompt in zip(batch.texts, batch.prompts, strict=True):
        kinds.update(step.kind for step in prompt.task.label_steps(text, prompt) or [] if step.kind != "filler")
    if not kinds:
        return {}
    return {
        f"share of {kind} among steps": kinds[kind] / kinds.total() for kind in ("slip", "misconception", "inherited")
    }


def of_turns(batch: SampledBatch) -> dict[str, float]:
    """The scores of turns, and how rollouts end."""
    scores = [turn.score for episode in batch.episodes for turn in episode.turns if turn.score is not None]
    return {
        "scored turns a rollout": len(scores) / len(batch),
        "share of scored turns that score 1": sum(scores) / max(len(scores), 1),
        "share of rollouts that end with an answer": sum(e.end == "answered" for e in batch.episodes) / len(batch),
        "largest number of tokens, results included": int(batch.valid_lengths.max()),
    }


def table(figures: Mapping[str, Mapping[str, float]]) -> str:
    """Figures as a table with a column for each kind of problems."""
    names = list(next(iter(figures.values())))
    head = "| figure | " + " | ".join(figures) + " |\n|---|" + "--:|" * len(figures)
    return "\n".join([head, *(f"| {n} | " + " | ".join(f"{f[n]:.4g}" for f in figures.values()) + " |" for n in names)])


@dataclass(frozen=True, kw_only=True)
class Page:
    """The parts of a README that differ between policies."""

    output: Path  # The folder of the policy.
    recipe: Training
    script: str  # The name of the script that made it.
    what: str  # What it is and does, after its number of parameters.
    example: tuple[str, str]  # A problem and a right response.
    errors: str  # What its errors are.
    beginning: str = ""  # What it began from, if from another policy.


def write_card(page: Page, held_out: Mapping[str, Sequence[Prompt]], max_response_length: int, minutes: float) -> None:
    """Measure the saved policy on held-out problems and write the README beside its weights."""
    policy = load_policy(str(page.output)).eval()
    figures = {name: measure(policy, list(prompts), max_response_length) for name, prompts in held_out.items()}
    values = {k: " ".join(map(str, v)) if isinstance(v, tuple) else v for k, v in vars(page.recipe).items() if v != ""}
    number = len(next(iter(held_out.values())))
    versions = ", ".join(f"{one.__name__} {one.__version__}" for one in (torch, transformers, tokenizers))
    settings = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in values.items())
    (page.output / "README.md").write_text(f"""# The packaged policy `{page.output.name}`

{page.what.format(policy.model.num_parameters())} It is made for trying reinforcement
learning on a laptop and knows nothing else. A problem and a right response:

~~~
{page.example[0]}

{page.example[1]}
~~~

Made in {minutes:.0f} minutes by

```
python scripts/{page.script} --threads {torch.get_num_threads()} {settings}
```

{page.beginning}with {versions}.

On {number} held-out problems of each kind (split `validation`, seed 0), {PASS_AT} samples each at temperature 1:

{table(figures)}

{page.errors}
""")
    print(f"wrote {page.output} after {minutes:.0f} minutes\n{table(figures)}")
