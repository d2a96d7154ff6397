"""Rollouts as plain rows, for tables that people read and for Parquet files.

Text from a model is untrusted. It is escaped here so that it breaks neither a Markdown page nor a file.
"""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING, Any

from grail_lightning.step.outputs import StepOutput
from grail_lightning.tasks.base import Prompt

if TYPE_CHECKING:
    import pyarrow as pa

# The types are pyarrow's names; the schema is fixed so that files of different batches can be read as one table.
ROLLOUT_COLUMNS = {
    "dataset": "string",
    "prompt": "string",
    "reference": "string",
    "response": "string",
    "reward": "float32",
    "correct": "bool",
    "status": "string",
    "advantage": "float32",
    "finished": "bool",
    "num_tokens": "int32",
    "group": "int64",
}


def prompt_text(prompt: Prompt) -> str:
    """A prompt as people read it: plain text as it is, a conversation as ``role: content`` lines."""
    if isinstance(prompt.messages, str):
        return prompt.messages
    return "\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in prompt.messages)


def rollout_facts(output: StepOutput, row: int) -> str:
    """A rollout's verdict, reward, advantage and length in one line."""
    batch = output.batch
    facts = [re.sub(r"\W", " ", batch.verdicts[row].status), f"reward {batch.rewards[row]:.3g}"]
    if output.advantages is not None:
        facts.append(f"advantage {output.advantages[row]:+.3g}")
    return ", ".join([*facts, f"{int(batch.response_lengths[row])} tokens"])


def encodable(text: str) -> str:
    """The text with lone surrogates replaced, which JSON can hold but UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def cut(text: str, max_characters: int) -> str:
    """The text; if it is longer than `max_characters`, a line in place of its middle says how much was left out."""
    if len(text) <= max_characters:
        return text
    half = max_characters // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[len(text) - half :]}"


def code_block(text: str, max_characters: int) -> str:
    """Any text as an indented Markdown code block that shows it unchanged.

    Every line is indented by four spaces, so no line can end the block, whereas a text could close a fence.
    Control characters, which TensorBoard's Markdown renderer uses as internal marks, are replaced by U+FFFD.

    Args:
        text: The text.
        max_characters: The length above which the middle is replaced by a note of how much was left out.
    """
    lines = [
        "".join(c if c == "\t" or unicodedata.category(c)[0] != "C" else "\ufffd" for c in line)
        for line in cut(text, max_characters).splitlines()
    ]
    return "\n".join(f"    {line}" for line in lines) if "".join(lines).strip() else "    (empty)"


def rollout_columns(output: StepOutput) -> dict[str, list[Any]]:
    """The `ROLLOUT_COLUMNS` of a step's rollouts, ``B`` values each."""
    batch = output.batch
    return {
        "dataset": [encodable(prompt.dataset) for prompt in batch.prompts],
        "prompt": [encodable(prompt_text(prompt)) for prompt in batch.prompts],
        "reference": [encodable(prompt.reference) for prompt in batch.prompts],
        "response": [encodable(text) for text in batch.texts],
        "reward": batch.rewards.tolist(),
        "correct": batch.correct.tolist(),
        "status": [verdict.status for verdict in batch.verdicts],
        "advantage": [None] * len(batch) if output.advantages is None else output.advantages.tolist(),
        "finished": batch.finished.tolist(),
        "num_tokens": batch.response_lengths.tolist(),
        "group": batch.group.tolist(),
    }


def response_ids(output: StepOutput) -> list[list[int]]:
    """The tokens of each response, without padding."""
    lengths = output.batch.response_lengths.tolist()
    return [row[:n] for row, n in zip(output.batch.response_ids.tolist(), lengths, strict=True)]


def arrow_table(columns: dict[str, list[Any]], types: dict[str, str]) -> pa.Table:
    """Columns as a `pyarrow.Table` of the given types; ``list<…>`` for lists."""
    import pyarrow as pa

    def typed(name: str) -> pa.DataType:
        inner = name.removeprefix("list<").removesuffix(">")
        found = pa.bool_() if inner == "bool" else getattr(pa, inner)()
        return pa.list_(found) if name.startswith("list<") else found

    schema = pa.schema([(column, typed(name)) for column, name in types.items()])
    return pa.table({column: columns[column] for column in types}, schema=schema)
