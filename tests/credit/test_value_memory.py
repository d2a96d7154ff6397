"""The memory of values against one large group, and what it keeps."""

import pytest
import torch

from grail_lightning.credit import TreeAdvantage
from tests.credit.groups import GROUP, LATE, OTHER, SOUND, groups, sharing, tokens_of
from tests.credit.rollouts import context
from tests.steps import update_of


def _remembering(arithmetic, *made, **options):
    method = TreeAdvantage(memory=1000, **options)
    return method, [method(arithmetic, batch, context()) for batch in made]


@pytest.mark.parametrize("own_row", [True, False])
@pytest.mark.parametrize("state", ["prefix", "numbers"])
def test_a_second_batch_of_a_prompt_has_the_values_of_both(state, own_row, arithmetic):
    """As one group of eight would have them. What is not remembered is the end of a response that its group lacks."""
    late = [LATE, LATE, SOUND, SOUND]
    now, earlier = groups(arithmetic, GROUP), groups(arithmetic, (GROUP[0], late))
    both = groups(arithmetic, (GROUP[0], [*GROUP[1], *late]))
    _, (_, found) = _remembering(arithmetic, earlier, now, state=state, own_row=own_row)
    expected = TreeAdvantage(state=state, own_row=own_row)(arithmetic, both, context()).additive[:4]
    torch.testing.assert_close(found.additive, expected[:, : found.additive.shape[1]], rtol=0, atol=1e-6)
    alone = TreeAdvantage(state=state, own_row=own_row)(arithmetic, now, context())
    assert (alone.additive - found.additive).abs().max() > 0.05, "the memory matters"


def test_the_memory_is_that_of_the_prompt(arithmetic):
    now, other = groups(arithmetic, GROUP), groups(arithmetic, OTHER)
    _, (_, found) = _remembering(arithmetic, other, now)
    assert torch.equal(found.additive, TreeAdvantage()(arithmetic, now, context()).additive)


def test_a_dead_group_has_terms_where_earlier_rows_did_otherwise_and_is_run(arithmetic):
    """The prompt earned 1/2 before; now every row is right. V(root) = 6/8, and V after all of `7+5=1` is 6/7."""
    now = groups(arithmetic, (GROUP[0], [SOUND] * 4))
    _, (_, found) = _remembering(arithmetic, groups(arithmetic, GROUP), now)
    assert found.additive[0, 4].item() == pytest.approx(6 / 7 - 6 / 8, abs=1e-6)
    assert update_of(arithmetic, now, found).plan.live.all()


def test_the_memory_is_bounded_and_forgets_the_prompt_seen_longest_ago(arithmetic):
    first, second = groups(arithmetic, GROUP), groups(arithmetic, OTHER)
    method, _ = _remembering(arithmetic, first, second)
    whole = len(method.memory)
    alone, _ = _remembering(arithmetic, second)
    method.memory.limit = whole - 1
    method(arithmetic, second, context())
    assert len(method.memory) == len(alone.memory) < whole
    found = method(arithmetic, first, context()).additive
    assert torch.equal(found, TreeAdvantage()(arithmetic, first, context()).additive)
    tiny = TreeAdvantage(memory=3)
    tiny(arithmetic, first, context())
    assert len(tiny.memory) == 0, "a prompt that does not fit is not remembered in part"


def test_lone_ends_of_responses_are_not_remembered(arithmetic):
    """Of one group: the root, what rows share, and for each row that parts the token with which it does."""
    batch = groups(arithmetic, GROUP)
    method, _ = _remembering(arithmetic, batch)
    kept = {()}
    for row in range(4):
        for t in range(len(tokens_of(batch, row))):
            if len(sharing(batch, row, t)) > 1:
                kept.add(tuple(tokens_of(batch, row)[: t + 1]))
    assert len(method.memory) == len(kept)


def test_the_state_of_the_memory_makes_an_equal_one(arithmetic):
    batches_of_it = groups(arithmetic, GROUP), groups(arithmetic, OTHER)
    method, _ = _remembering(arithmetic, *batches_of_it)
    copy = TreeAdvantage(memory=1000)
    copy.load_state_dict(method.state_dict())
    for batch in batches_of_it:
        one, other = (m(arithmetic, batch, context()).additive for m in (method, copy))
        assert torch.equal(one, other)
    method.memory.limit = copy.memory.limit = len(method.memory) - 1
    for batch in reversed(batches_of_it):
        one, other = (m(arithmetic, batch, context()).additive for m in (method, copy))
        assert torch.equal(one, other), "also in what is forgotten first"
    copy.load_state_dict({})
    assert len(copy.memory) == 0
    assert TreeAdvantage().state_dict() == {}
