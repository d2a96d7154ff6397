"""The credit of benchmarks/instruments.py, against loops over the tokens of each rollout."""

import pytest
import torch

from tests.benchmark_modules import benchmark
from tests.core.credit.groups import FLAWED, GROUP, LATE, groups
from tests.core.credit.rollouts import ByText, context
from tests.tolerance import near


@pytest.fixture(scope="module")
def instruments():
    return benchmark("instruments")


def test_advantages_by_sign_are_those_of_right_and_wrong_rollouts_in_groups_that_have_both(instruments, arithmetic):
    batch = groups(arithmetic, GROUP, ("7+5-3+8", [FLAWED, LATE, LATE, FLAWED]))
    made = instruments.BySign(0.5, 2.0)(arithmetic, batch, context())
    for row, advantage in enumerate([0.5, -2.0, -2.0, 0.5, 0, 0, 0, 0]):
        length = int(batch.response_lengths[row])
        assert made.additive[row, :length].tolist() == [advantage] * length
    assert (made.additive[~batch.response_mask] == 0).all()
    assert (made.values == 0).all()


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_resampled_choices_have_the_change_of_value_of_each_token_of_a_loop(share, instruments, arithmetic):
    """The value before a choice follows from what is kept; before another token it is the one after it."""
    batch, number, source = groups(arithmetic, GROUP), 8, ByText()
    made = instruments.ResampledChoices(share, number)(arithmetic, batch, context(continuations=source))
    choices, places = 0, set()
    for row in range(len(batch)):
        length, start = int(batch.response_lengths[row]), batch.prompt_width
        with torch.no_grad():
            logits = arithmetic.model(
                input_ids=batch.input_ids[row : row + 1, :], attention_mask=batch.attention_mask[row : row + 1]
            ).logits[0]
        after = float(batch.rewards[row])
        for t in range(length - 1, -1, -1):
            token = int(batch.response_ids[row, t])
            before = after
            if logits[start + t - 1].double().softmax(-1)[token] < 1 - instruments.CERTAIN:
                (outcomes,), _ = source.draw(batch, [(row, t)], number, 1)
                before = sum(outcomes) / number
                choices += 1
                places.add(tuple(batch.response_ids[row, :t].tolist()))
            assert float(made.additive[row, t]) == near(after - share * before, 100, torch.float32)
            after = before
    assert choices > len(places) > 5, "rows share states"
    assert choices < int(batch.response_mask.sum())
    assert made.metrics["continued_tokens"] == number * len(places)
