"""The page without a browser; test_browser.py looks at it with one."""

import html.parser
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grail_lightning import show_credit, write_page
from grail_lightning.app.views.heatmap import LARGEST, colour_of
from grail_lightning.core.records.episode import Episode, ToolCall, Turn
from tests.app.views.made import in_turns, rollout, write

HOSTILE = [
    "</script><script>document.title='owned'</script>",
    "<!--<script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "\u202eright to left\u202c שלום",
    "👩‍👩‍👧‍👦 é \u2028 \u2029 \x00 \x1b[31m",
    "w" * 10_000,
    "]]> & &lt; {{ 7*7 }} {% x %} '\" `${1}`",
]


class _Elements(html.parser.HTMLParser):
    """The elements of a page with their attributes and the text behind each, up to the next element."""

    def __init__(self, page):
        super().__init__()
        self.found = [["", {}, ""]]
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append([tag, dict(attrs), ""])

    def handle_endtag(self, tag):
        self.found.append(["", {}, ""])

    def handle_data(self, data):
        self.found[-1][2] += data

    @property
    def names(self):
        return [tag for tag, _, _ in self.found if tag]

    def values(self, *names):
        return [attrs[name] for _, attrs, _ in self.found for name in names if name in attrs]


def data_of(page):
    return json.loads(next(text for _, attrs, text in _Elements(page).found if attrs.get("id") == "data"))


def _page(tmp_path, rows, compared=(), **options):
    page = tmp_path / "page.html"
    said = write_page(write(tmp_path / "p.parquet", rows, compared), page, **options)
    return page.read_text(encoding="utf-8"), said


def _played(text="sea", **columns):
    """Two turns, with text of a tool that may be hostile."""
    calls = (ToolCall(name=text, result=text), ToolCall(name="", result="No.", status="invalid"))
    turns = Turn(text="a", calls=calls, score=0.5), Turn(text="bc")
    episode = Episode(turns=turns, end="answered", opening=" Look!")
    return in_turns([["a"], [text, "!"], ["b", "c"]], episode, advantage=-2.0, **columns)


def test_hostile_text_of_models_and_tools_is_data_and_nothing_else(tmp_path):
    asked = [dict.fromkeys(("prompt", "reference", "dataset"), text) for text in HOSTILE]
    rows = [rollout([text, " end"], **own) for text, own in zip(HOSTILE, asked, strict=True)]
    rows += [_played(text, **own) for text, own in zip(HOSTILE, asked, strict=True)]
    page, _ = _page(tmp_path, rows, title=HOSTILE[0])
    plain, _ = _page(tmp_path, [rollout(["a"])])
    assert _Elements(page).names == _Elements(plain).names, "no text adds an element"
    groups = data_of(page)["groups"]
    assert [group["prompt"] for group in groups] == HOSTILE
    assert [group["rollouts"][0]["pieces"][0] for group in groups] == HOSTILE
    assert [group["rollouts"][1]["pieces"][1] for group in groups] == HOSTILE
    calls = [group["rollouts"][1]["turns"][0]["calls"][0] for group in groups]
    assert calls == [[text[:300], "done", text[:300]] for text in HOSTILE]
    assert not {"\u2028", "\u2029"} & set(page)


def test_the_page_needs_no_network_and_runs_its_own_program_alone(tmp_path):
    page, _ = _page(tmp_path, [rollout(["a"])])
    assert _Elements(page).values("src", "href", "action") == ["data:,"]
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in page.replace("http-equiv", "")


def test_the_values_of_each_method_and_the_marks_reach_the_page(tmp_path):
    row = rollout(
        ["7+5", "=", "13", "\n", "\\boxed{13}"],
        box_first_token=4,
        box_last_token=4,
        step_starts=[0],
        step_stops=[6],
        step_kinds=["slip"],
        weights=[0.123456, 1.0, 5.0, 0.0, float("nan")],
        **{"weights.Other": [1.0] * 5, "scores.Other": None, "fallback.Other": True},
    )
    data = data_of(_page(tmp_path, [row], compared=["Other"])[0])
    assert data["methods"] == ["GRAIL", "Other"]
    (shown,) = data["groups"][0]["rollouts"]
    assert shown["credit"][0]["weights"] == [0.123, 1, 5, 0, None]
    assert shown["credit"][0]["scores"] == [0.001, 0.002, 0.003, 0.004, 0.005]
    assert shown["credit"][1] == {"weights": [1] * 5, "scores": None, "fallback": True}
    assert (shown["box"], shown["steps"], shown["outside"]) == ([4, 4], [[0, 2, "slip"]], [])


def test_the_fork_stands_where_there_is_evidence(tmp_path):
    """Wrong rollouts part at a slip, a filler, a sound step, and, two without a label: C(4, 2) / C(18, 2) = 0.04."""

    def labelled(tokens, kind):
        return rollout(tokens, step_starts=[0], step_stops=[len("".join(tokens))], step_kinds=[kind])

    rights = [rollout(["7+5=", "12"], correct=True) for _ in range(14)]
    wrongs = [labelled(["7+5=", "13"], "slip"), labelled(["So"], "filler"), labelled(["7+5=", "02"], "sound")]
    twice = [rollout(["7+5=", "2"]), rollout(["7+5=", "2"])]
    (group,) = data_of(_page(tmp_path, rights + wrongs + twice)[0])["groups"]
    assert [shown["fork"] for shown in group["rollouts"]] == [None] * 14 + [1, None, None, 1, 1]
    marked = {tuple(node["rollouts"]) for node in group["tree"] if node["fork"]}
    assert marked == {(14,), (17, 18)}


def test_tokens_that_share_a_character_and_tokens_outside_of_the_text(tmp_path):
    """An emoji of two tokens, and an end token: the pieces that are inside make up the response."""
    row = rollout(["a", "\ufffd", "\ufffd", "b", "<end>"], response="a😀b", scores=None)
    row |= {"token_starts": [0, 1, 1, 2, 3], "token_stops": [1, 2, 2, 3, 3]}
    (shown,) = data_of(_page(tmp_path, [row])[0])["groups"][0]["rollouts"]
    assert (shown["pieces"], shown["outside"]) == (["a", "😀", "", "b", "<end>"], [4])


def test_turns_have_their_calls_scores_and_credit_on_the_page(tmp_path):
    row = _played(**{"weights.Other": None, "scores.Other": None, "fallback.Other": False})
    data = data_of(_page(tmp_path, [row, rollout(["z"], correct=True)], compared=["Other"])[0])
    shown, plain = data["groups"][0]["rollouts"]
    assert data["groups"][0]["prompt"] == row["prompt"] + " Look!"
    assert shown["pieces"] == ["a", "sea", "!", "b", "c"]
    assert (shown["turn_of"], shown["outside"], shown["end"]) == ([0, -1, -1, 1, 1], [], "answered")
    calls = [["sea", "done", "sea"], ["", "invalid", "No."]]
    assert shown["turns"] == [{"score": 0.5, "calls": calls}, {"score": None, "calls": []}]
    # Weights 1.0, -, -, 1.3 and 1.4 of the advantage -2.
    assert shown["credit"][0]["turns"] == [[-2, -2], [-5.4, -2.7]]
    assert shown["credit"][1] == {"weights": None, "scores": None, "fallback": False}
    assert not {"turns", "turn_of", "end"} & plain.keys()
    assert "turns" not in plain["credit"][0]


def test_a_page_has_whole_groups_and_says_what_it_leaves_out_or_what_exceeds_five_megabytes(tmp_path):
    rows = [rollout([str(k)], prompt=f"problem {k // 4}") for k in range(12)]
    page, said = _page(tmp_path, rows, max_rollouts=10)
    data = data_of(page)
    assert [len(group["rollouts"]) for group in data["groups"]] == [4, 4]
    assert data["left_out"] == 4
    assert "It leaves out 4" in said
    assert "max_rollouts=12)" in said
    assert "leaves out" not in _page(tmp_path, rows)[1]
    page, said = _page(tmp_path, [rollout(["x" * 400_000], prompt=str(k)) for k in range(20)])
    assert 4e6 < len(page.encode()) < 5e6
    assert "leaves out" in said
    alone, _ = _page(tmp_path, [rollout(["x" * 6_000_000])])
    assert len(data_of(alone)["groups"]) == 1, "the first group is always shown"


def test_a_notebook_shows_each_rollout_by_each_method(tmp_path):
    row = rollout(["<b>\x00", "</pre>", "\n", "2"], weights=[0.0, 1.0, 1.4, LARGEST], prompt="<b>Compute")
    row |= {"step_starts": [0], "step_stops": [4], "step_kinds": ["slip"]}
    row |= {"weights.Uniform": [1.0] * 4, "scores.Uniform": None, "fallback.Uniform": False}
    file = write(tmp_path / "made.parquet", [row, _played("<i>") | {"weights.Uniform": None}], ["Uniform"])
    both, first = np.asarray(show_credit(file)), np.asarray(show_credit(file, 1))
    assert (both[: len(first)] == first).all()
    for colour, pixels in ((colour_of(0.0), first), (colour_of(LARGEST), first), (colour_of(None), both[len(first) :])):
        assert (pixels == np.array(colour)).all(-1).sum() > 300


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (None, {}, r"made.parquet must have the columns .* but has no `dataset`, .*: `predict` writes predictions"),
        ([], {}, r"made.parquet must hold at least one rollout, but got none"),
        ([], {"max_rollouts": 0}, "`max_rollouts` must be at least 1, but got 0"),
        ([_played() | {"episode": "{"}], {}, "`episode` must be JSON"),
    ],
)
def test_a_file_without_predictions_is_refused(rows, options, message, tmp_path):
    file = tmp_path / "made.parquet"
    if rows is None:
        pq.write_table(pa.table({"prompt": ["a"]}), file)
    else:
        write(file, rows)
    with pytest.raises(ValueError, match=message):
        write_page(file, tmp_path / "page.html", **options)


def test_pictures_are_there_once_for_a_group_and_their_saliency_is_relative_to_the_rollout(tmp_path):
    grid = [[[0.0, 0.0, 1.0, 1.0, 2, 2]]]
    one, other = (
        {"src": f"data:image/png;base64,{name}", "layers": grid, "scores": scores}
        for name, scores in (("AAAA", [1.0, 2.0, float("nan"), 0.0]), ("BBBB", [4.0, 0.0, 0.0, 1.0]))
    )
    none = one | {"scores": None}
    page, _ = _page(tmp_path, [rollout(["a"], pictures=json.dumps(p)) for p in ([one, other], [none])])
    (group,) = data_of(page)["groups"]
    assert group["sources"] == [one["src"], other["src"]]
    shown = [[(p["source"], p["shares"]) for p in r["pictures"]] for r in group["rollouts"]]
    assert shown == [[(0, [250, 500, 0, 0]), (1, [1000, 0, 0, 250])], [(0, [])]]
    assert group["rollouts"][0]["pictures"][0]["layers"] == [[[0, 0, 1, 1, 2, 2]]]


def test_equal_questions_about_different_pictures_are_different_problems(tmp_path):
    first, second, drawn = ([{"src": f"data:image/png;base64,{n}", "layers": [], "scores": None}] for n in "ABC")
    cells = [first + drawn, first, second, second + drawn]
    rows = [rollout(["a"], prompt="user: <image>How many?", pictures=json.dumps(cell)) for cell in cells]
    page, _ = _page(tmp_path, rows)
    assert [len(group["rollouts"]) for group in data_of(page)["groups"]] == [2, 2]
