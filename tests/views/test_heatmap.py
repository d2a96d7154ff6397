"""Pictures of rollouts: what they show, and that no text can break them."""

import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grail_lightning.tasks.base import Step
from grail_lightning.views import cells
from grail_lightning.views.cells import HEIGHT, MARGIN, WIDTH, Page, visible
from grail_lightning.views.colours import LARGEST, asset, colour_of, strength
from grail_lightning.views.heatmap import STEP_STYLES, Line, ShownGroup, ShownRollout, fitted, heatmap, shown, wrap


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


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_the_background_of_a_token_is_the_colour_of_its_weight():
    text = "a" * 30
    ones, marked = picture(rollout(text)), picture(rollout(text, [1.0] * 10 + [4.0] * 10 + [0.25] * 10 + [1.0]))
    # Ten cells of each, less their glyphs and seams.
    for colour in (colour_of(4.0), colour_of(0.25)):
        assert area(marked, colour) - area(ones, colour) > 10 * WIDTH * HEIGHT * 0.5
    assert area(ones, colour_of(1.0)) > 0.7 * ones.shape[0] * ones.shape[1], "weight 1 is white, as the page is"


def test_several_tokens_of_one_character_show_their_mean_weight():
    parts = ShownRollout(title="", text="x", tokens=[(0, 1)] * 3, weights=[1.0, 4.0, 4.0])
    assert area(picture(parts), colour_of(3.0)) > 0.4 * WIDTH * HEIGHT


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


def test_a_frame_marks_the_answer_and_the_legend_names_it():
    framed, other, plain = (picture(rollout("the answer is 17", answer=answer)) for answer in ((14, 16), (4, 10), None))
    black = [area(image, "black") for image in (framed, other, plain)]
    # Around 2 cells and 6 there are lines of 3 pixels. The frame of the legend is the same in both.
    assert black[1] - black[0] == pytest.approx(2 * 4 * WIDTH * 3, rel=0.2)
    assert black[0] - black[2] > 3 * (2 * (2 + 6) * WIDTH + 4 * HEIGHT) * 0.8


def test_one_colour_scale_has_its_middle_at_one():
    assert colour_of(1.0) == (255, 255, 255)
    assert colour_of(float("nan")) == colour_of(float("inf")) == (204, 204, 204)
    assert colour_of(0.0) == colour_of(-1.0), "what lies beyond an end has its colour"
    assert colour_of(LARGEST) == colour_of(300.0)
    ends = {"more": colour_of(LARGEST), "less": colour_of(0.0)}
    for name, colour in ends.items():
        assert f"--{name}: light-dark(#{bytes(colour).hex()}, " in asset("palette.css"), "the page's hue"
    strengths = [strength(weight) for weight in (-1, 0, 0.5, 0.9, 1, 1.1, 2, LARGEST, 300)]
    assert strengths == sorted(strengths)
    assert (strengths[1], strengths[4], strengths[-2]) == (-1, 0, 1)


def test_black_text_can_be_read_on_every_background():
    # WCAG's contrast of relative luminances: 4.5 is its level AA.
    for weight in np.linspace(0, 5, 101):
        red, green, blue = (
            (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4) for c in np.array(colour_of(weight)) / 255
        )
        assert (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05) / 0.05 > 7


def test_short_rollouts_stand_side_by_side_long_ones_and_groups_one_below_the_other():
    one, two = (rollout(letter * 20, [LARGEST] * 21) for letter in "ab")
    short, long = picture(one, two), picture(rollout("a" * 40), rollout("b" * 40))
    full = (short == np.array(colour_of(LARGEST))).all(-1)[: 4 * HEIGHT]
    assert full[:, : short.shape[1] // 2].any()
    assert full[:, short.shape[1] // 2 :].any()
    assert long.shape[0] > short.shape[0] + HEIGHT
    group = ShownGroup(prompt="p", rollouts=[one, two])
    assert heatmap([group, group]).shape[0] > heatmap([group]).shape[0] + 3 * HEIGHT


@pytest.mark.parametrize("text", ["7+5=12\n", "We need to find the value. "])
def test_text_can_be_read_in_a_thumbnail_of_360_pixels(text):
    image = picture(*[rollout(text * 99)] * 2, prompt=text * 99)
    assert WIDTH * 360 / image.shape[1] >= 6.9, "pixels of a character's width, which is 0.6 of the size of the font"
    assert image.shape[0] < 1.6 * image.shape[1], "a taller thumbnail would be made smaller"


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
    assert [shown(text, line) for line in lines] == ["000", "001", "[… 384 characters …]", "098", "099"]
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
    assert image.shape[0] < 45 * HEIGHT, "twice 12 lines of a response, 4 of a prompt, and the legend"
    assert image.shape[1] <= 50 * WIDTH + 2 * MARGIN


def test_every_character_has_its_cell():
    """Arabic letters would be joined and turned around."""
    for text in ("$x^2$", "a\u0645\u0631\u062d"):
        page = Page(len(text), 1)
        page.write(text, 0, 0)
        whole = page.image(1)
        for column, character in enumerate(text):
            alone = Page(len(text), 1)
            alone.write(character, column, 0)
            cell = slice(MARGIN + column * WIDTH + 2, MARGIN + (column + 1) * WIDTH - 2)  # `_` is wider than its cell.
            assert np.array_equal(whole[:, cell], alone.image(1)[:, cell])
            assert (whole[:, cell] < 128).any()


@pytest.mark.parametrize(
    ("character", "expected"),
    [
        *(("a", "a"), ("$", "$"), ("\n", "↵"), ("\t", "→"), ("\u3000", " "), ("\x07", "\ufffd")),
        *(("\u202e", "\ufffd"), ("\ud800", "\ufffd"), ("é", "é"), ("א", "א")),
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
    assert not [name for name in vars(cells) if name.startswith(("matplotlib", "PIL"))]
