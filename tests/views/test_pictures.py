"""Pictures of token credit: what they show, and that no text can break them."""

import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grail_lightning.tasks.base import Step
from grail_lightning.views.colours import LARGEST, asset, colour_of, strength
from grail_lightning.views.pictures import (
    COLUMNS,
    HEIGHT,
    STEP_STYLES,
    WIDTH,
    ShownGroup,
    ShownRollout,
    heatmap,
    profile,
    visible,
    weight_curves,
    wrap,
)
from tests.views.test_page import HOSTILE


def rollout(text, weights=None, **more):
    """A rollout with one token a character, and an end token."""
    tokens = [(k, k + 1) for k in range(len(text))] + [(len(text), len(text))]
    return ShownRollout(title="right", text=text, tokens=tokens, weights=weights or [1.0] * len(tokens), **more)


def picture(*rollouts, prompt="Compute 1+1.", **options):
    return heatmap([ShownGroup(prompt=prompt, rollouts=rollouts)], **options)


def area(image, colour):
    """The number of pixels of a colour."""
    from PIL.ImageColor import getrgb

    wanted = getrgb(colour) if isinstance(colour, str) else colour
    return int((image == np.array(wanted)).all(-1).sum())


def test_the_background_of_a_token_is_the_colour_of_its_weight():
    text = "a" * 30
    ones, marked = picture(rollout(text)), picture(rollout(text, [1.0] * 10 + [4.0] * 10 + [0.25] * 10 + [1.0]))
    # Ten cells of each, less their glyphs and seams.
    for colour in (colour_of(4.0), colour_of(0.25)):
        assert area(marked, colour) - area(ones, colour) > 10 * WIDTH * HEIGHT * 0.5
    assert area(ones, colour_of(1.0)) > 0.7 * ones.shape[0] * ones.shape[1], "weight 1 is white, as the page is"
    parts = ShownRollout(title="", text="x", tokens=[(0, 1)] * 3, weights=[1.0, 4.0, 4.0])
    assert area(picture(parts), colour_of(3.0)) > 0.4 * WIDTH * HEIGHT, "tokens of one character show their mean"


def test_steps_are_underlined_and_the_answer_is_framed_with_a_legend_of_what_occurs():
    text = "\n".join(["7+5=12"] * 5)
    plain = picture(rollout(text))
    for place, kind in enumerate(STEP_STYLES):
        colour = STEP_STYLES[kind][0]
        marked = picture(rollout(text, steps=[Step(start=7 * place, stop=7 * place + 6, kind=kind)]))
        assert area(marked, colour) > area(plain, colour) + 50
        line = (marked == np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)])).all(-1).any(1).nonzero()[0]
        assert abs(line - (3 + place + 1.5) * HEIGHT).min() < 6, "below the line of its step"
    framed = picture(rollout(text, answer=(4, 6)))
    assert area(framed, "black") > area(plain, "black") + 2 * (2 + 6) * WIDTH, "around two cells and the legend's word"


def test_one_colour_scale_has_its_middle_at_one_and_black_text_can_be_read_on_it():
    assert colour_of(1.0) == (255, 255, 255)
    assert colour_of(float("nan")) == colour_of(float("inf")) == (204, 204, 204)
    assert colour_of(0.0) == colour_of(-1.0), "what lies beyond an end has its colour"
    assert colour_of(LARGEST) == colour_of(300.0)
    for name, colour in {"more": colour_of(LARGEST), "less": colour_of(0.0)}.items():
        assert f"--{name}: light-dark(#{bytes(colour).hex()}, " in asset("palette.css"), "the page's hue"
    strengths = [strength(weight) for weight in (-1, 0, 0.5, 0.9, 1, 1.1, 2, LARGEST, 300)]
    assert strengths == sorted(strengths)
    assert (strengths[1], strengths[4], strengths[-2]) == (-1, 0, 1)
    # WCAG's contrast of relative luminances: 4.5 is its level AA.
    for weight in np.linspace(0, 5, 101):
        red, green, blue = (
            (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4) for c in np.array(colour_of(weight)) / 255
        )
        assert (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05) / 0.05 > 7


def test_a_long_text_loses_the_lines_in_its_middle_and_can_be_read_in_a_thumbnail_of_360_pixels():
    image = picture(*[rollout("We need to find the value. " * 99)] * 2, prompt="We need it. " * 99)
    assert WIDTH * 360 / image.shape[1] >= 6.9, "pixels of a character's width, which is 0.6 of the size of the font"
    assert image.shape[0] < 1.6 * image.shape[1], "a taller thumbnail would be made smaller"
    assert picture(rollout("a\n" * 99), max_lines=2).shape[0] < image.shape[0] / 2


@given(st.text(max_size=200), st.integers(1, 20))
@example("one two three", 8)
@example("", 4)
def test_the_lines_of_a_text_are_the_text(text, columns):
    lines = wrap(text, columns)
    assert "".join(text[start:stop] for start, stop in lines) == text
    assert all(stop - start <= columns for start, stop in lines)
    assert not any("\n" in text[start : stop - 1] for start, stop in lines)
    assert wrap("one two three", 8) == [(0, 8), (8, 13)], "behind a space where there is one"


_DRAWN = [
    "$",
    "$x_1$",
    r"$\frac{1}{$",
    "%",
    "👩‍👩‍👧",
    "中文",
    "ع",
    "\u200d",
    "e\u0301",
    "\x00",
    "\r\n",
    "\u2028",
    "\ud800",
    *HOSTILE,
]


@settings(max_examples=30, deadline=None)
@example(["a" * 10_000])
@example(_DRAWN)
@example([])
@given(st.lists(st.sampled_from(_DRAWN) | st.text(max_size=4), max_size=12))
def test_any_text_can_be_drawn_without_a_warning(parts):
    text = "".join(parts)
    image = picture(rollout(text), rollout(text[::-1]), prompt=text)
    assert image.dtype == np.uint8
    assert image.shape[0] < 45 * HEIGHT, "twice 12 lines of a response, 4 of a prompt, and the legend"
    assert image.shape[1] == (COLUMNS + 2) * WIDTH


def test_every_character_has_its_cell_and_what_cannot_be_drawn_is_a_box():
    shown = {"a": "a", "$": "$", "\n": "↵", "\t": "→", "\u3000": " ", "é": "é", "\x07": "□", "\u202e": "□", "א": "□"}
    assert {character: visible(character) for character in shown} == shown
    one, other = picture(rollout("$x^2$ b")), picture(rollout("$x^2$ c"))
    changed = (one != other).any(-1).any(0).nonzero()[0]
    assert changed.min() >= 7 * WIDTH - 2, "only the cell of the last character"
    assert changed.max() <= 8 * WIDTH + 2


def test_a_picture_needs_no_pyplot_and_settings_of_the_user_do_not_matter():
    import matplotlib

    before, backend = dict(matplotlib.rcParams), matplotlib.get_backend()
    plain = picture(rollout("abc$"))
    assert (dict(matplotlib.rcParams), matplotlib.get_backend()) == (before, backend)
    if "matplotlib.pyplot" in sys.modules:
        assert not sys.modules["matplotlib.pyplot"].get_fignums(), "no figure stays in memory"
    with matplotlib.rc_context({"text.usetex": True, "savefig.dpi": 7, "figure.autolayout": True}):
        assert np.array_equal(picture(rollout("abc$")), plain)


# --- weights by position ----------------------------------------------------------------------------------------------


def _batch(lengths, width):
    return np.arange(width)[None] < np.array(lengths)[:, None]


def test_a_profile_is_the_mean_and_the_quantiles_of_the_tokens_of_each_part():
    # 40 tokens: two in each of the 20 parts. 20 tokens: one in each.
    weights = np.where(np.arange(2)[:, None] == 0, np.arange(40)[None], 100 + np.arange(40)[None]).astype(np.float32)
    found = profile(weights, _batch([40, 20], 40))
    assert (found.position[0], found.position[-1]) == (0.025, 0.975)
    for part in range(20):
        values = np.array([2 * part, 2 * part + 1, 100 + part], dtype=np.float32)
        assert found.mean[part] == pytest.approx(values.mean(), rel=1e-6)
        assert found.low[part] == pytest.approx(np.quantile(values, 0.1), rel=1e-6)
        assert found.high[part] == pytest.approx(np.quantile(values, 0.9), rel=1e-6)
    # Three tokens stand at 1/6, 3/6 and 5/6: in the parts 3, 10 and 16. Padding does not count.
    found = profile(np.array([[1.0, 2.0, 3.0, 99.0]], dtype=np.float32), _batch([3], 4))
    assert {part: found.mean[part] for part in (3, 10, 16)} == {3: 1.0, 10: 2.0, 16: 3.0}
    assert np.isnan(found.mean).sum() == 17


@pytest.mark.parametrize("correct", [[True, False], [False, False]])
@pytest.mark.parametrize("values", [1.0, -3.0, 1e6, np.nan])
def test_any_weights_can_be_drawn_without_a_warning(correct, values):
    mask = _batch([7, 3], 9)
    weights = np.where(mask, np.float32(values), np.float32(0))
    weights[0, 0] = 1.5
    image = weight_curves(weights, mask, np.array(correct))
    assert image.shape == (600, 800, 3)
    assert (image != 255).any()


def test_right_and_wrong_have_curves_of_their_own():
    mask = _batch([30, 30], 30)
    weights = np.array([[1.0], [3.0]], dtype=np.float32) * mask
    both, right = (weight_curves(weights, mask, np.array(rows)) for rows in ([True, False], [True, True]))
    assert area(both, "#D55E00") > 100
    assert area(right, "#D55E00") == 0
