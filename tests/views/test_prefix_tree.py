import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grail_lightning.views import forks, prefix_tree

RESPONSES = st.lists(st.integers(0, 2), max_size=6)
GROUPS = st.lists(st.tuples(RESPONSES, st.booleans()), min_size=1, max_size=7)


def _along(ids, beginning):
    """Whether a rollout has the tokens of a beginning."""
    return len(ids) >= len(beginning) and ids[: len(beginning)] == beginning


def _rate(group, beginning):
    along = [right for ids, right in group if _along(ids, beginning)]
    return sum(along) / len(along)


def _walk(node, ids, path=()):
    """Every node of a tree with the tokens from the root to its end."""
    path = (*path, *ids[node.rollouts[0]][node.start : node.stop])
    yield node, list(path)
    for child in node.children:
        yield from _walk(child, ids, path)


@given(GROUPS)
def test_each_node_holds_the_rollouts_that_share_its_tokens(group):
    ids, right = [list(i) for i, _ in group], [r for _, r in group]
    nodes = list(_walk(prefix_tree(ids, right), ids))
    assert len(nodes) <= 2 * len(group) - 1
    for node, path in nodes:
        assert node.stop == len(path)
        along = [k for k, row in enumerate(ids) if _along(row, path)]
        if node.start < node.stop or node is nodes[0][0]:
            assert list(node.rollouts) == along
        else:  # an end where others go on
            assert list(node.rollouts) == [k for k in along if len(ids[k]) == len(path)]
        assert node.num_correct == sum(right[k] for k in node.rollouts)
        if node.children:
            assert len(node.children) > 1, "what does not split is one node"
            assert sorted(k for child in node.children for k in child.rollouts) == list(node.rollouts)
        else:
            assert all(ids[k] == path for k in node.rollouts)


def _chance(group, beginning, branch):
    """How often a random choice among the rollouts of a beginning, as many as took the branch, is wrong altogether."""
    along = [right for ids, right in group if _along(ids, beginning)]
    choices = list(itertools.combinations(along, branch))
    return sum(not any(choice) for choice in choices) / len(choices)


@given(GROUPS, st.sampled_from([None, "slip", "misconception", "sound", "inherited", "filler"]))
def test_a_fork_is_the_first_token_after_which_none_was_right_if_there_is_evidence(group, kind):
    """By the definition: success rates of all beginnings, one after the other. Labels hold for the first two tokens."""
    group = [(list(ids), right) for ids, right in group]
    steps = [[(0, min(len(ids), 2) - 1, kind)] if kind and ids else [] for ids, _ in group]
    found = forks(prefix_tree([ids for ids, _ in group], [right for _, right in group]), steps)
    for k, (ids, right) in enumerate(group):
        rates = [_rate(group, ids[:n]) for n in range(len(ids) + 1)]
        if right or rates[0] == 0:
            assert k not in found
            continue
        zero = [n for n, rate in enumerate(rates) if rate == 0]
        fork = zero[0] - 1 if zero else len(ids)
        branch = [right for other, right in group if (_along(other, ids[: fork + 1]) if zero else other == ids)]
        if any(branch):  # A right rollout of the same tokens.
            evident = False
        elif kind and fork < min(len(ids), 2):
            evident = kind in ("slip", "misconception")
        else:
            evident = len(branch) > 1 and _chance(group, ids[:fork], len(branch)) <= 0.05
        assert found.get(k) == (fork if evident else None)


def test_a_group_by_hand():
    """Tokens a=1, b=2, c=3: two rights abc, a wrong ab that was cut, a wrong acc, a wrong b."""
    ids = [[1, 2, 3], [1, 2], [1, 3, 3], [2], [1, 2, 3]]
    right = [True, False, False, False, True]
    root = prefix_tree(ids, right)
    assert forks(root, [[(0, 3, "slip")]] * 5) == {2: 1, 3: 0} | {1: 2}
    assert forks(root, [[]] * 5) == {}, "one rollout that failed is no evidence"
    assert (root.start, root.stop, root.num_correct, len(root.rollouts)) == (0, 0, 2, 5)
    first, second = root.children
    assert ((first.start, first.stop, first.rollouts), second.rollouts) == ((0, 1, [0, 1, 2, 4]), [3])
    ab, ac = first.children
    assert (ab.start, ab.stop, ab.rollouts, ac.rollouts) == (1, 2, [0, 1, 4], [2])
    assert [(c.start, c.stop, c.rollouts, c.num_correct) for c in ab.children] == [(2, 3, [0, 4], 2), (2, 2, [1], 0)]


@pytest.mark.parametrize(
    ("wrong", "right", "shown"), [(1, 31, False), (2, 6, True), (2, 5, False), (3, 3, True), (4, 4, True)]
)
def test_rollouts_that_took_a_branch_are_evidence_if_they_would_hardly_be_wrong_by_chance(wrong, right, shown):
    """1/28, 3/28 (of 8 and 7 rollouts, with another wrong one), 1/20 and 1/70."""
    ids = [[1]] * wrong + [[2]] * right + ([[2]] if (wrong, right) == (2, 5) else [])
    correct = [False] * wrong + [True] * right + [False] * (len(ids) - wrong - right)
    found = forks(prefix_tree(ids, correct), [[]] * len(ids))
    assert found == (dict.fromkeys(range(wrong), 0) if shown else {})
    for kind in ("sound", "filler", "inherited"):
        assert forks(prefix_tree(ids, correct), [[(0, 0, kind)]] * len(ids)) == {}


def test_a_group_as_deep_as_it_is_large_is_no_problem_for_the_stack():
    ids = [[7] * length for length in range(1, 1501)]
    assert prefix_tree(ids, [False] * 1500).stop == 1


def test_a_tree_needs_rollouts():
    with pytest.raises(ValueError, match="must have rollouts and a value for each, but got 0, 0"):
        prefix_tree([], [])
