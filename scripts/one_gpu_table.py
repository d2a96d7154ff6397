"""Fill the table of memory in docs/one_gpu.md: what fits one GPU of 24, 48 and 80 GiB, by `grail_lightning.plan`.

    python scripts/one_gpu_table.py

Each cell is planned from `configs/gsm8k.yaml` (all weights) or `configs/gsm8k_lora.yaml` (adapters) with the sizes of a
Qwen3. Where that does not fit, the cell has the changes with which it does, of those that leave a run what it is:
`grail_lightning.app.plan.advice` finds them. No weights and no network are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from page_parts import with_part
from transformers import Qwen3Config

from grail_lightning.app.cli.app import FitOptions
from grail_lightning.app.plan.advice import Change, applied, fitting, levers
from grail_lightning.app.plan.main import SHARE, Planner, peak

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "one_gpu.md"
BEGIN, END = "<!-- memory: python scripts/one_gpu_table.py -->\n", "<!-- end of memory -->"
# Sizes as in the config.json of each model.
COMMON = {"vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    | {"tie_word_embeddings": False},
}
CONFIGS = {"all weights": "gsm8k.yaml", "adapters": "gsm8k_lora.yaml"}
GIB = (24, 48, 80)
KEPT = ("model.loading.lora", "model.sampling.max_response_length")  # These changes would make it another run.


def rows() -> Iterator[tuple[str, str, list[str]]]:
    """Model, what is trained, and a cell for each size of memory."""
    options = FitOptions()
    for model, sizes in MODELS.items():
        config = Qwen3Config(**COMMON | sizes)
        for trained, file in CONFIGS.items():
            fit = options.parse([f"--config={ROOT / 'configs' / file}"])
            plan = Planner(fit, config, fit.data.init_args.max_prompt_length)
            yield model, trained, [_cell(fit, lambda changed, plan=plan: plan(changed, 1), gib) for gib in GIB]


def _cell(fit: Any, plan: Any, gib: int) -> str:
    row = fit.data.init_args.max_prompt_length + fit.model.sampling.max_response_length
    ways = [lever for lever in levers(fit, row, 1) if not {*KEPT} & lever.changes[0].values.keys()]
    room = SHARE * gib * 2**30
    changes = fitting(fit, ways, plan, room)
    if changes is None:
        return f"no ({peak(plan(fit))[0] / 2**30:.0f})"
    needed = f"{peak(plan(applied(fit, changes)))[0] / 2**30:.1f}"
    return f"{needed} with {', '.join(map(_short, changes))}" if changes else f"**{needed}**"


def _short(change: Change) -> str:
    """The last part of each option, and its value; an 8-bit optimiser by its name."""
    (name, value), *_ = change.values.items()
    if name == "model.engine":
        return f"`cache_tokens` {value.init_args.cache_tokens:,}"
    if name == "model.optimizer":
        return "`AdamW8bit`"
    return f"`{name.rpartition('.')[2]}`" + (f" {value:,}" if value is not True else "")


def table() -> str:
    """The table in Markdown."""
    lines = ["| Qwen3 | trained | 24 GiB | 48 GiB | 80 GiB |", "|---|---|---|---|---|"]
    lines += [f"| {model} | {trained} | {' | '.join(cells)} |" for model, trained, cells in rows()]
    return "\n".join(lines) + "\n"


def filled(page: str) -> str:
    """The text of the page with the present table."""
    return with_part(page, BEGIN, END, table())


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
