"""The prefix tree of a group of rollouts, with the success rate of each prefix, and where wrong rollouts go wrong.

Let ``S_k(r)`` be the rollouts of the group that have at least ``k`` tokens and share the first ``k`` with the rollout
``r``; ``S_0`` is the group. The *success rate* of a prefix is the share of correct rollouts in ``S_k(r)``.

The *fork* of a wrong rollout ``r`` with ``n`` tokens is the first token after which no rollout that went the same way
was correct: the token of index ``k - 1`` for the smallest ``k`` with success rate 0. If a correct rollout begins with
all of ``r``, which was cut or ended earlier, the fork is ``n``, behind its last token. There is no fork if ``r`` is
correct, or if no rollout of the group is.

A fork says where the sampled rollouts part, which need not be where a rollout is wrong: with few rollouts, a branch
without a correct one may be bad luck, and a right step may be one that only this rollout took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A run of tokens that the same rollouts have in common.

    Attributes:
        start: The index of the run's first token in these rollouts.
        stop: The index after its last token; equal to `start` for the root of rollouts without a common beginning, and
            for a rollout that ends where others go on.
        rollouts: The rollouts that begin with it: indices within the group, ascending.
        num_correct: The number of correct rollouts among them.
        children: The continuations, in the order of their first rollouts. A rollout that ends at `stop` while others go
            on has a child without tokens.
    """

    start: int
    stop: int
    rollouts: tuple[int, ...]
    num_correct: int
    children: tuple[Node, ...]


def prefix_tree(token_ids: Sequence[Sequence[int]], correct: Sequence[bool]) -> Node:
    """The tree of the common beginnings of a group of rollouts.

    Every node splits or is an end, so that ``N`` rollouts have at most ``2N - 1`` nodes. Rollouts of equal tokens end
    in the same node.

    Args:
        token_ids: The tokens of each of the ``N`` rollouts.
        correct: ``N`` values: whether the rollout is correct.

    Raises:
        ValueError: If there is no rollout, or not one value for each.
    """
    if not token_ids or len(token_ids) != len(correct):
        raise ValueError(f"A group must have rollouts and a value for each, but got {len(token_ids)}, {len(correct)}.")
    branches = [_Branch(0, tuple(range(len(token_ids))))]
    for branch in branches:  # The list grows, parents before children. A recursion may be as deep as a group is large.
        branches += branch.split(token_ids)
    nodes: dict[int, Node] = {}
    for branch in reversed(branches):
        nodes[id(branch)] = Node(
            start=branch.start,
            stop=branch.stop,
            rollouts=branch.rollouts,
            num_correct=sum(bool(correct[r]) for r in branch.rollouts),
            children=tuple(nodes[id(child)] for child in branch.children),
        )
    return nodes[id(branches[0])]


def forks(token_ids: Sequence[Sequence[int]], correct: Sequence[bool]) -> list[int | None]:
    """The fork of each rollout of a group, as an index of its tokens; None where there is none.

    Args:
        token_ids: The tokens of each of the ``N`` rollouts.
        correct: ``N`` values: whether the rollout is correct.
    """
    right = [ids for ids, is_right in zip(token_ids, correct, strict=True) if is_right]
    return [
        None if is_right or not right else max(_common(ids, other) for other in right)
        for ids, is_right in zip(token_ids, correct, strict=True)
    ]


def _common(one: Sequence[int], other: Sequence[int], start: int = 0) -> int:
    """The number of tokens with which both begin, if the first `start` are equal."""
    shorter = min(len(one), len(other))
    return next((index for index in range(start, shorter) if one[index] != other[index]), shorter)


class _Branch:
    """A node under construction."""

    def __init__(self, start: int, rollouts: tuple[int, ...]) -> None:
        self.start, self.stop, self.rollouts = start, start, rollouts
        self.children: list[_Branch] = []

    def split(self, token_ids: Sequence[Sequence[int]]) -> list[_Branch]:
        """Find the end of the common run, and return the continuations."""
        first = token_ids[self.rollouts[0]]
        self.stop = min([len(first), *(_common(first, token_ids[r], self.start) for r in self.rollouts[1:])])
        if all(len(token_ids[r]) == self.stop for r in self.rollouts):
            return []
        by_token: dict[int | None, list[int]] = {}
        for r in self.rollouts:
            token = token_ids[r][self.stop] if len(token_ids[r]) > self.stop else None
            by_token.setdefault(token, []).append(r)
        self.children = [_Branch(self.stop, tuple(rollouts)) for rollouts in by_token.values()]
        return self.children
