"""The picture of weights by position, and the figures behind it."""

import numpy as np
import pytest

from grail_lightning.views.curves import profile, weight_curves


def _batch(lengths, width):
    return np.arange(width)[None] < np.array(lengths)[:, None]


def test_a_profile_is_the_mean_and_the_quantiles_of_the_tokens_of_each_part():
    # 40 tokens: two in each of the 20 parts. 20 tokens: one in each.
    mask = _batch([40, 20], 40)
    weights = np.where(np.arange(2)[:, None] == 0, np.arange(40)[None], 100 + np.arange(40)[None]).astype(np.float32)
    found = profile(weights, mask)
    assert found.position[0] == 0.025
    assert found.position[-1] == 0.975
    for part in range(20):
        values = np.array([2 * part, 2 * part + 1, 100 + part], dtype=np.float32)
        assert found.mean[part] == pytest.approx(values.mean(), rel=1e-6)
        assert found.low[part] == pytest.approx(np.quantile(values, 0.1), rel=1e-6)
        assert found.high[part] == pytest.approx(np.quantile(values, 0.9), rel=1e-6)


def test_a_part_without_tokens_has_no_value_and_padding_does_not_count():
    weights = np.array([[1.0, 2.0, 3.0, 99.0]], dtype=np.float32)
    found = profile(weights, _batch([3], 4))
    # Three tokens stand at 1/6, 3/6 and 5/6: in the parts 3, 10 and 16.
    assert {part: found.mean[part] for part in (3, 10, 16)} == {3: 1.0, 10: 2.0, 16: 3.0}
    assert np.isnan(found.mean).sum() == 17


@pytest.mark.parametrize("correct", [[True, False], [True, True], [False, False]])
@pytest.mark.parametrize("values", [1.0, 0.0, -3.0, 1e6, np.nan])
def test_any_weights_can_be_drawn_without_a_warning(correct, values):
    mask = _batch([7, 3], 9)
    weights = np.where(mask, np.float32(values), np.float32(0))
    weights[0, 0] = 1.5
    image = weight_curves(weights, mask, np.array(correct))
    assert image.shape == (600, 800, 3)
    assert (image != 255).any()


def test_right_and_wrong_have_curves_of_their_own():
    mask = _batch([30, 30], 30)
    weights = np.ones((2, 30), dtype=np.float32)
    weights[1] = 3
    both, right = (weight_curves(weights, mask, np.array(rows)) for rows in ([True, False], [True, True]))
    vermillion = np.array([0xD5, 0x5E, 0x00])
    assert (both == vermillion).all(-1).sum() > 100
    assert (right == vermillion).all(-1).sum() == 0
