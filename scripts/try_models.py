"""Take every decoder of Transformers, tiny and with random weights, through two training steps; list what came of it.

    python scripts/try_models.py                  # all of them; writes docs/results/models.csv and docs/models.md
    python scripts/try_models.py qwen3_5 lfm2     # these alone, on the terminal
    python scripts/try_models.py lfm2 --update    # the same, and these rows of the file anew, and the page
    python scripts/try_models.py --page           # docs/models.md from the file

A step is that of `GrailModule` under a `Trainer`: the policy is loaded with its checks, responses are sampled, graded
by a reward that differs, and trained on. Then GRAIL's saliency of other responses is computed.
"""

from __future__ import annotations

import argparse
import csv
import logging
import re
import warnings
from collections import defaultdict
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from page_parts import with_part
from tiny_models import tiny_config
from torch.optim import AdamW
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from grail_lightning import Execution, GrailModule, MathData, MathTask, RewardSpec, Sampling
from grail_lightning.core.engines.hf.decoding import why_generate
from grail_lightning.core.engines.hf.engine import HFEngine
from grail_lightning.core.policy.source import first_line, load_tokenizer
from grail_lightning.core.rollout.grading import grade_and_locate
from grail_lightning.credit import input_saliency

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "docs" / "results" / "models.csv", ROOT / "docs" / "models.md"
BEGIN, END = "<!-- models: python scripts/try_models.py --page -->\n", "<!-- end of models -->"
PROBLEMS = [{"problem": "7+5-3+8-9", "answer": 8}, {"problem": "4+9", "answer": 13}]
# What families are called, for those who look for one.
FAMILIES = {
    "Qwen2, Qwen2.5": "qwen2",
    "Qwen3": "qwen3",
    "Qwen3 (mixture of experts)": "qwen3_moe",
    "Qwen3-Next": "qwen3_next",
    "Qwen3.5": "qwen3_5",
    "Llama 2, 3": "llama",
    "Mistral": "mistral",
    "Ministral 3": "ministral3",
    "SmolLM2": "llama",
    "SmolLM3": "smollm3",
    "Gemma 2": "gemma2",
    "Gemma 3, text alone": "gemma3_text",
    "Gemma 3 with pictures (4B and larger)": "gemma3",
    "Gemma 4, text alone": "gemma4_text",
    "Gemma 4 with pictures": "gemma4",
    "Phi-3, Phi-4-mini": "phi3",
    "OLMo 3": "olmo3",
    "LFM2": "lfm2",
    "Granite 3": "granite",
    "Granite 4": "granitemoehybrid",
    "Falcon-H1": "falcon_h1",
    "gpt-oss": "gpt_oss",
    "DeepSeek-V3": "deepseek_v3",
    "GLM-4.5": "glm4_moe",
    "Nemotron-H": "nemotron_h",
    "Mamba 2": "mamba2",
}


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What came of one architecture."""

    model_type: str
    model: str  # The class of Transformers.
    outcome: str  # trains | refused | fails, with an error of Transformers | not tried: no tiny model could be built.
    sampled_by: str = ""  # compact | generate
    reason: str = ""  # Why by `generate`.
    shares: str = ""  # Whether common beginnings of rows are run once in the update.
    saliency: str = ""  # Whether GRAIL's saliency is finite and not zero.
    message: str = ""  # The first line of an error.


def variety(responses: list[str], references: list[str], *, lengths: list[int]) -> list[float]:
    """A reward that differs between responses of random models."""
    return [len(set(text)) + length / 100 for text, length in zip(responses, lengths, strict=True)]


def try_model(model_type: str) -> Tried:
    """Build a tiny model, train it for two optimiser steps, and compute a saliency."""
    tokenizer = load_tokenizer("arithmetic")
    ids = {"vocab_size": 448, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": tokenizer.eos_token_id}
    seed_everything(0, verbose=False)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    try:
        model = AutoModelForCausalLM.from_config(tiny_config(model_type, **ids))
        name = type(model).__name__
        assert sum(p.numel() for p in model.parameters()) < 5_000_000, "a size has another name"
    except Exception as error:
        return Tried(model_type=model_type, model=name, outcome="not tried", message=first_line(error))
    module = GrailModule(
        policy=(model, tokenizer),
        sampling=Sampling(max_response_length=6),
        execution=Execution(group_size=4),
        optimizer=partial(AdamW, lr=1e-2),
    )
    task = MathTask(instruction="", rewards=[RewardSpec(function=variety)])
    data = MathData(train=PROBLEMS, task=task, prompts_per_batch=2)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=2, max_epochs=-1, enable_model_summary=False, **quiet)
    before = [parameter.detach().clone() for parameter in model.get_decoder().parameters()]
    try:
        trainer.fit(module, data)
        policy = module.policy
        moved = [not torch.equal(old, new) for old, new in zip(before, policy.decoder.parameters(), strict=True)]
        assert trainer.global_step == 2, "no step was taken"
        assert sum(moved) > len(moved) / 2, "half of the weights did not move"
        assert all(parameter.isfinite().all() for parameter in policy.parameters()), "weights are not finite"
    except Exception as error:
        refused = isinstance(error, ValueError) and ("`policy`" in str(error) or "Policy.head" in str(error))
        said = first_line(error) if refused else f"{type(error).__name__}: {first_line(error)}"
        return Tried(model_type=model_type, model=name, outcome="refused" if refused else "fails", message=said)
    reason = why_generate(policy.model)
    return Tried(
        model_type=model_type,
        model=name,
        outcome="trains",
        sampled_by="generate" if reason else "compact",
        reason=reason or "",
        shares="yes" if policy.shares_prefixes else "no",
        saliency=_saliency(policy, task),
    )


def _saliency(policy: Any, task: MathTask) -> str:
    """Whether the saliency of responses is finite and not zero."""
    engine = HFEngine()
    engine.update_weights(policy)
    prompts = [task.prompt(row) for row in PROBLEMS]
    policy.eval()
    sampled = engine.generate(prompts, 2, Sampling(max_response_length=6), seed=0)
    try:
        with task.make_verifier() as verifier:
            batch = grade_and_locate(sampled, verifier, policy.tokenizer)
        scores = input_saliency(policy, batch, batch.response_mask)
    except Exception as error:
        return first_line(error)
    return "yes" if scores.isfinite().all() and scores.any() else "no"


def read_results(file: Path = RESULTS) -> list[Tried]:
    """What came of each architecture, from the file."""
    with file.open(newline="", encoding="utf-8") as lines:
        return [Tried(**row) for row in csv.DictReader(lines)]


def tables(tried: list[Tried]) -> str:
    """The tables of the page: families by name, and all architectures by what came of them."""
    of = {one.model_type: one for one in tried}
    lines = ["| family | architecture | sampled by | common beginnings run once |", "|---|---|---|---|"]
    lines += [
        f"| {family} | `{name}` | {_sampled(of[name])} | {of[name].shares or '-'} |"
        for family, name in FAMILIES.items()
    ]
    groups: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for one in tried:
        if one.outcome == "trains":
            groups[one.sampled_by, one.reason, one.shares].append(one.model_type)
    trained = sum(map(len, groups.values()))
    lines += ["", f"All {trained} that train:", ""]
    lines += ["| sampled by | common beginnings run once | | architectures |", "|---|---|--:|---|"]
    for (sampled_by, reason, shares), names in sorted(groups.items(), key=lambda group: (group[0][0], -len(group[1]))):
        cell = f"`{sampled_by}`" + (f": {reason}" if reason else "")
        lines.append(f"| {cell} | {shares} | {len(names)} | {', '.join(f'`{name}`' for name in names)} |")
    messages: defaultdict[str, list[str]] = defaultdict(list)
    for one in tried:
        if one.outcome in ("refused", "fails"):
            messages[_kind(one)].append(one.model_type)
    lines += ["", f"{sum(map(len, messages.values()))} are refused when they are loaded:", ""]
    lines += ["| message | | architectures |", "|---|--:|---|"]
    for message, names in sorted(messages.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {message} | {len(names)} | {', '.join(f'`{name}`' for name in names)} |")
    left = [f"`{one.model_type}`" for one in tried if one.outcome == "not tried"]
    lines += ["", f"Of {len(left)} no tiny model could be built from their configs: {', '.join(left)}."]
    return "\n".join(lines) + "\n"


def filled(page: str) -> str:
    """The text of the page with the present tables."""
    return with_part(page, BEGIN, END, tables(read_results()))


def _sampled(one: Tried) -> str:
    return f"`{one.sampled_by}`" if one.outcome == "trains" else one.outcome


def _kind(one: Tried) -> str:
    """The message without what is particular to an architecture."""
    return re.sub(r"(difference) [\d.]+", r"\1 …", one.message.replace(one.model, "…").replace("|", r"\|"))


def main() -> None:
    """Try the named architectures, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="model types of Transformers; all by default")
    parser.add_argument("--update", action="store_true", help="write what came of the named ones into the file, too")
    parser.add_argument("--page", action="store_true", help="fill the page from the file of results alone")
    options = parser.parse_args()
    if not options.page:
        tried = try_all(options.names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
        if options.names and not options.update:
            return
        known = {one.model_type: one for one in read_results()} if options.names else {}
        known |= {one.model_type: one for one in tried}
        with RESULTS.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Tried)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(known[name]) for name in sorted(known))
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def try_all(names: list[str]) -> list[Tried]:
    """Try architectures one after the other, and print what came of each."""
    for library in ("lightning.pytorch", "transformers", "lightning.fabric"):
        logging.getLogger(library).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    tried = []
    for name in names:
        tried.append(one := try_model(name))
        said = one.reason or one.message
        print(
            f"{name:26} {one.model:34} {one.outcome:8} {one.sampled_by:8} {one.shares:3} {one.saliency:3} {said}",
            flush=True,
        )
    return tried


if __name__ == "__main__":
    main()
