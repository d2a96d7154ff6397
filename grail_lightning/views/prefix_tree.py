"""The prefix tree of a group of rollouts, with the success rate of each prefix, and where wrong rollouts go wrong.

Let ``S_k(r)`` be the rollouts of the group that have at least ``k`` tokens and share the first ``k`` with the rollout
``r``; ``S_0`` is the group. The *success rate* of a prefix is the share of correct rollouts in ``S_k(r)``.

The *fork* of a wrong rollout ``r`` with ``n`` tokens is the first token after which no rollout that went the same way
was correct: the token of index ``k - 1`` for the smallest ``k`` with success rate 0. If a correct rollout goes on
behind ``r``, which was cut or ended earlier, the fork is ``n``, behind its last token. There is no fork if ``r`` or a
rollout of the same tokens is correct, or if no rollout of the group is.

A fork says where the sampled rollouts part, which need not be where a rollout is wrong: a branch without a correct
rollout may be bad luck. A fork is therefore shown only with evidence. If the task labels the step that holds the token,
the step must be a slip or a misconception. Else ``w`` wrong rollouts, at least two, must have taken the branch, and if
``w`` of the ``n`` rollouts before it had been chosen at random, ``c`` of them correct, all would be wrong with a
probability of at most 5 %: ``C(n - c, w) / C(n, w)``, the exact test of Fisher. One rollout is no evidence, since each
has a branch of its own in the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import comb

MAX_CHANCE = 0.05


@dataclass(kw_only=True, slots=True)
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
    rollouts: list[int]
    num_correct: int
    children: list[Node] = field(default_factory=list)


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

    def begin(start: int, rollouts: list[int]) -> Node:
        tokens = [token_ids[r] for r in rollouts]
        stop = next((k for k in range(start, min(map(len, tokens))) if len({ids[k] for ids in tokens}) > 1), None)
        right = sum(bool(correct[r]) for r in rollouts)
        return Node(
            start=start, stop=min(map(len, tokens)) if stop is None else stop, rollouts=rollouts, num_correct=right
        )

    nodes = [begin(0, list(range(len(token_ids))))]
    for node in nodes:  # The list grows. A recursion may be as deep as a group is large.
        by_token: dict[int | None, list[int]] = {}
        for r in node.rollouts:
            by_token.setdefault(token_ids[r][node.stop] if len(token_ids[r]) > node.stop else None, []).append(r)
        if by_token.keys() != {None}:
            node.children = [begin(node.stop, rollouts) for rollouts in by_token.values()]
        nodes += node.children
    return nodes[0]


def forks(root: Node, steps: Sequence[Sequence[tuple[int, int, str]]]) -> dict[int, int]:
    """The forks with evidence: the index of the token, by the index of the wrong rollout.

    Args:
        root: The tree of a group of ``N`` rollouts.
        steps: Of each rollout the first token, the last token and the kind of each labelled step; empty without labels.
    """
    found: dict[int, int] = {}
    nodes = [root]
    for node in nodes:  # The list grows.
        nodes += node.children
        for child in node.children:
            if node.num_correct and not child.num_correct:
                found |= {r: child.start for r in child.rollouts if _has_evidence(node, child, steps[r])}
    return found


def _has_evidence(node: Node, child: Node, steps: Sequence[tuple[int, int, str]]) -> bool:
    kind = next((kind for first, last, kind in steps if first <= child.start <= last), None)
    if kind is not None:
        return kind in ("slip", "misconception")
    before, wrong = len(node.rollouts), len(child.rollouts)
    return wrong > 1 and comb(before - node.num_correct, wrong) <= MAX_CHANCE * comb(before, wrong)
