import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from grail_lightning.app.views.prefix_tree import prefix_tree

RESPONSES = st.lists(st.integers(0, 2), max_size=6)
GROUPS = st.lists(st.tuples(RESPONSES, st.booleans()), min_size=1, max_size=7)


def _along(ids, beginning):
    """Whether a rollout has the tokens of a beginning."""
    return len(ids) >= len(beginning) and ids[: len(beginning)] == beginning


def _rate(group, beginning):
    along = [right for ids, right in group if _along(ids, beginning)]
    return sum(along) / len(along)


@given(GROUPS)
def test_each_node_holds_the_rollouts_that_share_its_tokens(group):
    ids, right = [list(i) for i, _ in group], [r for _, r in group]
    nodes, _ = prefix_tree(ids, right, [[]] * len(ids))
    assert len(nodes) <= 2 * len(group) - 1
    for place, node in enumerate(nodes):
        path = ids[node["rollouts"][0]][: node["stop"]]
        assert len(path) == node["stop"]
        along = [k for k, row in enumerate(ids) if _along(row, path)]
        # Of an end where others go on, those that end.
        ends = node["depth"] and node["start"] == node["stop"]
        assert node["rollouts"] == [k for k in along if not ends or len(ids[k]) == len(path)]
        assert node["correct"] == sum(right[k] for k in node["rollouts"])
        # What follows deeper, until a node that is not, are its continuations.
        below = itertools.takewhile(lambda other, depth=node["depth"]: other["depth"] > depth, nodes[place + 1 :])
        children = [other["rollouts"] for other in below if other["depth"] == node["depth"] + 1]
        assert node["end"] == (not children)
        assert len(children) != 1, "what does not split is one node"
        if children:
            assert sorted(itertools.chain(*children)) == node["rollouts"]
        else:
            assert all(ids[k] == path for k in node["rollouts"])


def _chance(group, beginning, branch):
    """How often a random choice among the rollouts of a beginning, as many as took the branch, is wrong altogether."""
    along = [right for ids, right in group if _along(ids, beginning)]
    choices = list(itertools.combinations(along, branch))
    return sum(not any(choice) for choice in choices) / len(choices)


@example([([1], False)] * 2 + [([2], True)] * 6, None)  # 1/28: evidence.
@example([([1], False)] * 2 + [([2], True)] * 5 + [([2], False)], None)  # 3/28: none.
@example([([1], False)] * 3 + [([2], True)] * 3, None)  # 1/20: evidence.
@example([([1], False)] * 3 + [([2], True)] * 3, "filler")
@given(GROUPS, st.sampled_from([None, "slip", "misconception", "sound", "inherited", "filler"]))
def test_a_fork_is_the_first_token_after_which_none_was_right_if_there_is_evidence(group, kind):
    """By the definition: success rates of all beginnings, one after the other. Labels hold for the first two tokens."""
    group = [(list(ids), right) for ids, right in group]
    steps = [[(0, min(len(ids), 2) - 1, kind)] if kind and ids else [] for ids, _ in group]
    nodes, forks = prefix_tree([ids for ids, _ in group], [right for _, right in group], steps)
    for k, (ids, right) in enumerate(group):
        rates = [_rate(group, ids[:n]) for n in range(len(ids) + 1)]
        if right or rates[0] == 0:
            assert k not in forks
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
        assert forks.get(k) == (fork if evident else None)
        marked = [node for node in nodes if node["fork"] and k in node["rollouts"]]
        assert [node["start"] for node in marked] == ([fork] if evident else []) or len(branch) > 1


def test_a_group_as_deep_as_it_is_large_is_no_problem_for_the_stack():
    nodes, _ = prefix_tree([[7] * length for length in range(1, 1101)], [False] * 1100, [[]] * 1100)
    assert nodes[0]["stop"] == 1
