"""The states that the rollouts of a group pass through: prefixes, sets of numbers, or states of the user's.

Shapes: ``B`` rows, ``T`` response tokens.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from grail_lightning.batch import RolloutBatch
from grail_lightning.grading import align_rows
from grail_lightning.policy import Policy
from grail_lightning.policy.aligned import response_nodes
from grail_lightning.tasks.import_path import import_function

Marks = Sequence[tuple[int, str]]
"""Where a text reaches a new state: the number of characters after which it does, and the key of the state."""

_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")


@dataclass(frozen=True, kw_only=True)
class States:
    """The states of the rows of a batch, on the CPU.

    Attributes:
        after: ``[B, T]`` long, the number of the state after each token; −1 on padding. Rows of different groups have
            no state in common.
        roots: ``[B]`` long, the number of the state before the first token.
        number: The number of states.
    """

    after: Tensor
    roots: Tensor
    number: int


def numbers(text: str) -> Marks:
    """The states of a text by the set of numbers that it has completed, in any order.

    A number is complete when the character after it has been read. Numbers have no sign, since ``12-3`` is no −3.

    Source: Numca, arXiv 2605.29782.
    """
    seen: set[str] = set()
    # The sum of the numbers' digests stands for their set: the keys of a text of n numbers have n, not n², characters.
    total, marks = 0, []
    for match in _NUMBER.finditer(text):
        if match[0] in seen or match.end() == len(text):
            continue
        seen.add(match[0])
        total = (total + int.from_bytes(hashlib.blake2b(match[0].encode(), digest_size=8).digest(), "big")) % 2**64
        marks.append((match.end() + 1, f"{len(seen)} {total}"))
    return marks


_BUILT_IN: dict[str, Callable[[str], Marks]] = {"numbers": numbers}


def find_state(name: str) -> Callable[[str], Marks] | None:
    """The function of the texts' states; None for ``prefix``, whose states are the tokens so far.

    Raises:
        ValueError: If there is no such function.
    """
    if name == "prefix":
        return None
    known: dict[str, Any] = {"prefix": None, **_BUILT_IN}
    found: Callable[[str], Marks] = import_function(name, known, "`state`", "mypkg.lemmas")
    return found


def prefix_states(batch: RolloutBatch) -> States:
    """The prefixes of each group's responses: the nodes of its prefix tree."""
    nodes = response_nodes(batch.response_ids, batch.response_mask, batch.group)
    start = int(nodes.max()) + 1 if nodes.numel() else 0
    groups, roots = torch.unique(batch.group.cpu(), return_inverse=True)
    return States(after=nodes, roots=start + roots, number=start + len(groups))


def marked_states(batch: RolloutBatch, policy: Policy, marks_of: Callable[[str], Marks]) -> States:
    """The states that a function reads from each text.

    A token that covers the last character of a mark reaches its state. The first state of a row has the empty key.

    Raises:
        ValueError: If the function raises, or does not return marks of the text.
    """
    known: dict[tuple[int, str], int] = {}
    after = torch.full(batch.response_mask.shape, -1, dtype=torch.long)
    groups = batch.group.tolist()
    roots = torch.tensor([known.setdefault((group, ""), len(known)) for group in groups], dtype=torch.long)
    for row, aligned in enumerate(align_rows(batch, policy.tokenizer)):
        after[row, : len(aligned.stops)] = roots[row]
        token = 0
        for stop, key in _marks(marks_of, aligned.text):
            while token < len(aligned.stops) - 1 and aligned.stops[token] < stop:
                token += 1
            after[row, token : len(aligned.stops)] = known.setdefault((groups[row], key), len(known))
    return States(after=after, roots=roots, number=len(known))


def _marks(marks_of: Callable[[str], Marks], text: str) -> list[tuple[int, str]]:
    """The marks of a text. They are checked, because the function may be the user's own."""
    name = f"`state` ({getattr(marks_of, '__name__', marks_of)})"
    wanted = f"{name} must return pairs (number of characters, key as a string), ascending, up to {len(text)},"
    try:
        marks = [(stop, key) for stop, key in marks_of(text)]
    except Exception as error:
        raise ValueError(
            f"{wanted} but it raised {type(error).__name__}: {error}. Call it by hand on {text[-200:]!r}."
        ) from error
    stops = [0, *(stop for stop, _ in marks)]
    if not all(isinstance(stop, int) for stop in stops) or not all(isinstance(key, str) for _, key in marks):
        raise ValueError(f"{wanted} but got {str(marks)[:200]}.")
    if any(later < earlier for earlier, later in pairwise(stops)) or stops[-1] > len(text):
        raise ValueError(f"{wanted} but got {str(marks)[:200]}.")
    return marks
