"""Pictures of token credit: what they show, and that no text can break them."""

from importlib import resources

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grail_lightning import Step
from grail_lightning.app.views.heatmap import (
    COLUMNS,
    HEIGHT,
    LARGEST,
    STEP_COLOURS,
    WIDTH,
    ShownRollout,
    colour_of,
    heatmap,
    visible,
)
from tests.app.views.test_page import HOSTILE


def rollout(text, weights=None, **more):
    """A rollout with one token a character, and an end token."""
    tokens = [(k, k + 1) for k in range(len(text))] + [(len(text), len(text))]
    return ShownRollout(title="right", text=text, tokens=tokens, weights=weights or [1.0] * len(tokens), **more)


def picture(*rollouts, prompt="Compute 1+1."):
    return heatmap(prompt, rollouts)


def pixels(image, colour):
    """Which pixels have a colour."""
    from PIL.ImageColor import getrgb

    return (image == np.array(getrgb(colour) if isinstance(colour, str) else colour)).all(-1)


def test_the_background_of_a_token_is_the_colour_of_its_weight():
    text = "a" * 30
    ones, marked = picture(rollout(text)), picture(rollout(text, [1.0] * 10 + [4.0] * 10 + [0.25] * 10 + [1.0]))
    # Ten cells of each, less their glyphs and seams.
    for colour in (colour_of(4.0), colour_of(0.25)):
        assert pixels(marked, colour).sum() - pixels(ones, colour).sum() > 10 * WIDTH * HEIGHT * 0.5
    assert pixels(ones, colour_of(1.0)).mean() > 0.7, "weight 1 is white, as the page is"
    parts = ShownRollout(title="", text="x", tokens=[(0, 1)] * 3, weights=[3.0, 4.0, 4.0])
    assert pixels(picture(parts), colour_of(3.0)).sum() > 0.4 * WIDTH * HEIGHT, "the first token of a character has it"


def test_steps_are_underlined_and_the_answer_is_framed_with_a_legend_of_what_occurs():
    text = "\n".join(["7+5=12"] * 5)
    plain = picture(rollout(text))
    for place, (kind, colour) in enumerate(STEP_COLOURS.items()):
        marked = pixels(picture(rollout(text, steps=[Step(start=7 * place, stop=7 * place + 6, kind=kind)])), colour)
        assert marked.sum() > pixels(plain, colour).sum() + 50
        assert abs(marked.any(1).nonzero()[0] - (3 + place + 1.5) * HEIGHT).min() < 6, "below the line of its step"
    framed = pixels(picture(rollout(text, answer=(4, 6))), "black").sum() - pixels(plain, "black").sum()
    assert framed > 2 * (2 + 6) * WIDTH, "around two cells and the legend's word"


def test_what_was_not_sampled_is_grey_and_a_turn_begins_with_a_line():
    text = "a" * 30
    told = [1.0] * 10 + [None] * 10 + [1.0] * 10 + [1.0]
    ones, marked = picture(rollout(text)), picture(rollout(text, told))
    assert pixels(marked, colour_of(None)).sum() > 10 * WIDTH * HEIGHT * 0.5
    assert pixels(ones, colour_of(None)).mean() < 0.005
    assert colour_of(None) not in (colour_of(1.0), colour_of(float("nan")))
    # The line stands before the 21st character, the first one of the second turn.
    black = pixels(marked, "black") & ~pixels(ones[: len(marked)], "black")
    column = black[: 5 * HEIGHT].all(0) | (black[: 5 * HEIGHT].sum(0) > 0.8 * HEIGHT)
    assert abs(column.nonzero()[0].mean() - (1 + 20) * WIDTH) <= 2
    # At the beginning of a line, too: 50 characters, of which the last ones were told.
    wide = picture(rollout("a" * 60, [1.0] * 40 + [None] * 10 + [1.0] * 10 + [1.0]))
    column = pixels(wide, "black")[4 * HEIGHT : 5 * HEIGHT + HEIGHT // 2].sum(0) > 0.8 * HEIGHT
    assert abs(column.nonzero()[0].mean() - WIDTH) <= 2


def test_one_colour_scale_has_its_middle_at_one_and_black_text_can_be_read_on_it():
    assert colour_of(1.0) == (255, 255, 255)
    assert colour_of(float("nan")) == colour_of(float("inf")) == (204, 204, 204)
    assert colour_of(0.0) == colour_of(-1.0), "what lies beyond an end has its colour"
    assert colour_of(LARGEST) == colour_of(300.0)
    palette = resources.files("grail_lightning.app.views").joinpath("templates", "palette.css").read_text()
    for name, colour in {"more": colour_of(LARGEST), "less": colour_of(0.0)}.items():
        assert f"--{name}: light-dark(#{bytes(colour).hex()}, " in palette, "the page's hue"
    # From the full blue over white to the full orange, blue and red never turn back.
    reds, _, blues = zip(*(colour_of(weight) for weight in (0, 0.5, 0.9, 1, 1.1, 2, LARGEST)), strict=True)
    assert list(reds[:4]) == sorted(reds[:4])
    assert list(blues[3:]) == sorted(blues[3:], reverse=True)
    # WCAG's contrast of relative luminances: 4.5 is its level AA.
    for weight in np.linspace(0, 5, 101):
        red, green, blue = (
            (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4) for c in np.array(colour_of(weight)) / 255
        )
        assert (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05) / 0.05 > 7


_DRAWN = ["$", "$x_1$", r"$\frac{1}{$", "%", "👩‍👩‍👧", "中文", "ع", "\u200d", "e\u0301", "\x00", "\r\n"]
_DRAWN += ["\u2028", "\ud800", *HOSTILE]


@settings(max_examples=20, deadline=None)
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
    # The last of 110 characters is in the third line, as the first word of 45 letters ends a line.
    for text, column, lines in (("$x^2$ b", 6, 1), ("a" * 44 + " " + "b" * 65, 14, 3)):
        one, other = picture(rollout(text)), picture(rollout(text[:-1] + "?"))
        changed = (one != other).any(-1).any(0).nonzero()[0]
        assert changed.min() >= (column + 1) * WIDTH - 2, "only the cell of the last character"
        assert changed.max() <= (column + 2) * WIDTH + 2
        assert one.shape[0] == (7 + lines) * HEIGHT
