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
from math import comb
from typing import Any

TokenSteps = Sequence[tuple[int, int, str]]
"""The first token, the last token and the kind of each labelled step of a rollout."""


def prefix_tree(
    token_ids: Sequence[Sequence[int]], correct: Sequence[bool], steps: Sequence[TokenSteps]
) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """The tree of the common beginnings of a group of ``N`` rollouts, and the token of each fork by its wrong rollout.

    Every node splits or is an end, so that there are at most ``2N - 1``, each before its continuations. A node has its
    `depth`; `start` and `stop`, the range of its tokens, which is empty for a rollout that ends where others go on; its
    `rollouts`; how many of them are `correct`; whether it is an `end`; and whether it begins at a `fork`.
    """
    nodes: list[dict[str, Any]] = []
    forks: dict[int, int] = {}
    todo = [(0, 0, list(range(len(token_ids))))]
    while todo:  # A recursion may be as deep as a group is large.
        depth, start, rollouts = todo.pop()
        shortest = min(len(token_ids[r]) for r in rollouts)
        stop = next((k for k in range(start, shortest) if len({token_ids[r][k] for r in rollouts}) > 1), shortest)
        right = sum(bool(correct[r]) for r in rollouts)
        branches: dict[int | None, list[int]] = {}
        for r in rollouts:
            branches.setdefault(token_ids[r][stop] if len(token_ids[r]) > stop else None, []).append(r)
        end = branches.keys() == {None}
        fork = not right and any(forks.get(r) == start for r in rollouts)
        span = {"depth": depth, "start": start, "stop": stop}
        nodes.append(span | {"rollouts": rollouts, "correct": right, "end": end, "fork": fork})
        if end:
            continue
        for branch in branches.values():
            if right and not any(correct[r] for r in branch):
                chance = comb(len(rollouts) - right, len(branch)) / comb(len(rollouts), len(branch))
                evident = len(branch) > 1 and chance <= 0.05
                forks |= {r: stop for r in branch if _is_wrong_step(steps[r], stop, unlabelled=evident)}
        todo += [(depth + 1, stop, branch) for branch in reversed(branches.values())]
    return nodes, forks


def _is_wrong_step(steps: TokenSteps, token: int, *, unlabelled: bool) -> bool:
    kind = next((kind for first, last, kind in steps if first <= token <= last), None)
    return unlabelled if kind is None else kind in ("slip", "misconception")
