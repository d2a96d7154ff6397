"""Pictures of rollouts: what they show, and that no text can break them."""

import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grail_lightning.tasks.base import Step
from grail_lightning.views import cells
from grail_lightning.views.cells import HEIGHT, MARGIN, WIDTH, Page, visible
from grail_lightning.views.heatmap import (
    STEP_STYLES,
    ShownGroup,
    ShownRollout,
    colour_of,
    heatmap,
    scale_of,
)
from grail_lightning.views.lines import Line, fitted, shown, wrap


def rollout(text, weights=None, **more):
    """A rollout with one token a character, and an end token."""
    tokens = [(k, k + 1) for k in range(len(text))] + [(len(text), len(text))]
    return ShownRollout(title="right", text=text, tokens=tokens, weights=weights or [1.0] * len(tokens), **more)


def picture(*rollouts, prompt="Compute 1+1.", **options):
    return heatmap([ShownGroup(prompt=prompt, rollouts=rollouts)], **options)


def area(image, colour):
    """The number of pixels of a colour, up to the rounding of Agg's 8 bits."""
    from matplotlib.colors import to_rgb

    wanted = np.array([round(255 * channel) for channel in to_rgb(colour)])
    return int((np.abs(image.astype(int) - wanted) <= 1).all(-1).sum())


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_the_background_of_a_token_is_the_colour_of_its_weight():
    text = "a" * 30
    ends = (0.0, 5.0)
    high, low = colour_of(4.0, ends), colour_of(0.25, ends)
    ones, marked = picture(rollout(text)), picture(rollout(text, [1.0] * 10 + [4.0] * 10 + [0.25] * 10 + [1.0]))
    # Ten cells of each, less their glyphs and seams. The scale itself has a stripe of nearly every colour.
    for colour in (high, low):
        assert area(marked, colour) - area(ones, colour) > 10 * WIDTH * HEIGHT * 0.6
    assert area(ones, colour_of(1.0, ends)) > 0.9 * ones.shape[0] * ones.shape[1], "weight 1 is white, as the page is"


def test_several_tokens_of_one_character_show_their_mean_weight():
    parts = ShownRollout(title="", text="x", tokens=[(0, 1)] * 3, weights=[1.0, 4.0, 4.0])
    assert area(picture(parts), colour_of(3.0, (0.0, 5.0))) > 0.5 * WIDTH * HEIGHT


def test_each_kind_of_step_has_a_line_of_its_own_colour_and_the_legend_names_what_occurs():
    text = "\n".join(["7+5=12"] * 5)
    kinds = list(STEP_STYLES)
    steps = [Step(start=7 * k, stop=7 * k + 6, kind=kind) for k, kind in enumerate(kinds)]
    image = picture(rollout(text, steps=steps))
    for kind in kinds:
        colour = STEP_STYLES[kind][0]
        alone = picture(rollout(text, steps=[step for step in steps if step.kind == kind]))
        assert area(alone, colour) > 50
        assert area(image, colour) >= area(alone, colour) * 0.9
        assert area(picture(rollout(text)), colour) < area(alone, colour) / 3, "grey has the edges of glyphs, too"


def test_a_frame_marks_the_answer():
    framed, plain = (picture(rollout("the answer is 17", answer=answer)) for answer in ((14, 16), None))
    # Two cells have two sides of 16 pixels and two of 18, which no glyph covers.
    assert plain.astype(int).sum() - framed.astype(int).sum() > 2 * (2 * WIDTH + HEIGHT) * 3 * 255


def test_the_scale_ends_at_round_numbers_and_has_its_middle_at_one():
    assert scale_of([0.5, 1.0, 1.9]) == (0.0, 2.0)
    assert scale_of([4.99]) == (0.0, 5.0)
    assert scale_of([-0.5, 300.0]) == (-0.5, 300.0)
    assert scale_of([float("nan"), float("inf")]) == (0.0, 2.0)
    assert scale_of([]) == (0.0, 2.0)
    assert colour_of(1.0, (0.0, 2.0)) == (1.0, 1.0, 1.0)
    assert colour_of(float("nan"), (0.0, 2.0)) == (0.8, 0.8, 0.8)
    assert colour_of(0.0, (0.0, 2.0)) == colour_of(-1.0, (0.0, 2.0)), "what lies beyond an end has its colour"


def test_black_text_can_be_read_on_every_background():
    # WCAG's contrast of relative luminances: 4.5 is its level AA.
    for weight in np.linspace(0, 5, 101):
        red, green, blue = (
            (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4) for c in colour_of(weight, (0, 5))
        )
        assert (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05) / 0.05 > 7


def test_rollouts_stand_side_by_side_and_groups_one_below_the_other():
    one, two = rollout("a" * 40), rollout("b" * 40)
    pair = picture(one, two)
    left, right = pair[:, : pair.shape[1] // 2], pair[:, pair.shape[1] // 2 :]
    assert (left[40:100] != 255).any()
    assert (right[40:100] != 255).any()
    group = ShownGroup(prompt="p", rollouts=[one, two])
    assert heatmap([group, group]).shape[0] > 1.4 * heatmap([group]).shape[0]


# --- lines ------------------------------------------------------------------------------------------------------------


def test_lines_break_behind_a_space_or_else_anywhere():
    assert wrap("one two three", 8) == [Line(0, 8), Line(8, 13)]
    assert wrap("a" * 10, 4) == [Line(0, 4), Line(4, 8), Line(8, 10)]
    assert wrap("ab\n\ncd", 4) == [Line(0, 3), Line(3, 4), Line(4, 6)]
    assert wrap("", 4) == [Line(0, 0)]
    assert wrap("abcd\n", 4) == [Line(0, 4), Line(4, 5)]


@given(st.text(max_size=200), st.integers(1, 20))
def test_the_lines_of_a_text_are_the_text(text, columns):
    lines = wrap(text, columns)
    assert "".join(text[line.start : line.stop] for line in lines) == text
    assert all(line.stop - line.start <= columns for line in lines)
    assert not any("\n" in text[line.start : line.stop - 1] for line in lines)


def test_a_long_text_loses_the_lines_in_its_middle_and_says_so():
    text = "".join(f"{k:03d}\n" for k in range(100))
    lines = fitted(text, 10, 5)
    assert [shown(text, line) for line in lines] == ["000\n", "001\n", "[… 384 characters …]", "098\n", "099\n"]
    assert fitted(text, 10, 100) == wrap(text, 10)
    assert [line.left_out for line in fitted(text, 10, 2)] == [False, True]


# --- text from a model is untrusted -----------------------------------------------------------------------------------

_HOSTILE = [
    "$",
    "$x_1$",
    r"$\frac{1}{$",
    "<script>",
    "</svg>",
    "\\",
    "%",
    "😀",
    "👩‍👩‍👧",
    "中文",
    "אבג",
    "ع",
    "\u202e",
    "\u200d",
    "e\u0301",
]
_HOSTILE += [
    "\x00",
    "\x1b[2J",
    "\t",
    "\r\n",
    "\u2028",
    "\ufffe",
    "\U0010ffff",
    "\ud800",
    "﷽",
    "\u0301" * 9,
    " " * 99,
    "a" * 999,
]


@settings(max_examples=60, deadline=None)
@example(["a" * 10_000])
@example(["\u2028", "\u2800", "\u115f"])
@example([])
@given(st.lists(st.sampled_from(_HOSTILE) | st.text(max_size=4), max_size=12))
def test_any_text_can_be_drawn_without_a_warning(parts):
    text = "".join(parts)
    image = picture(rollout(text), rollout(text[::-1]), prompt=text)
    assert image.dtype == np.uint8
    assert image.shape[0] < 1700, "48 lines of a response, 4 of a prompt, and the legend"
    assert image.shape[1] < 1300


def test_dollar_signs_are_characters():
    """As mathematics the text would have two glyphs, as it stands it has five."""
    page = Page(12, 1)
    page.write("$x^2$", 0, 0)
    zoomed = page.image()
    zoom = zoomed.shape[1] / page.size[0]
    for column in range(5):
        left = round((MARGIN + column * WIDTH) * zoom)
        assert (zoomed[:, left : left + round(WIDTH * zoom)] < 128).any(), f"cell {column} has its glyph"


@pytest.mark.parametrize(
    ("character", "expected"),
    [
        *(("a", "a"), ("$", "$"), ("\n", "↵"), ("\t", "→"), ("\u3000", " "), ("\x07", "\ufffd")),
        *(("\u202e", "\ufffd"), ("\ud800", "\ufffd"), ("中", "□"), ("é", "é"), ("א", "א")),
    ],
)
def test_a_character_that_cannot_be_drawn_is_a_sign(character, expected):
    assert visible(character) == expected


def test_a_picture_needs_no_pyplot_and_leaves_settings_as_they_are():
    import matplotlib

    before, backend = dict(matplotlib.rcParams), matplotlib.get_backend()
    picture(rollout("abc"))
    assert dict(matplotlib.rcParams) == before
    assert matplotlib.get_backend() == backend
    if "matplotlib.pyplot" in sys.modules:
        assert not sys.modules["matplotlib.pyplot"].get_fignums(), "no figure stays in memory"


def test_settings_of_the_user_do_not_matter(monkeypatch):
    import matplotlib

    with matplotlib.rc_context({"text.usetex": True, "savefig.dpi": 7, "figure.autolayout": True}):
        changed = picture(rollout("abc$"))
    assert np.array_equal(changed, picture(rollout("abc$")))


def test_matplotlib_is_not_imported_with_the_module():
    assert not [name for name in vars(cells) if name.startswith("matplotlib")]
