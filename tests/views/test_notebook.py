"""Credit as HTML inside a notebook."""

from html.parser import HTMLParser

import pytest

from grail_lightning.views import show_credit
from tests.views.made import rollout, write


class Elements(HTMLParser):
    """The elements of a page, and the text of each `pre`."""

    def __init__(self, page):
        super().__init__()
        self.names, self.styles, self.texts, self.open = set(), [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.open.append(tag)
        self.styles += [value for name, value in attrs if name == "style"]
        if tag == "br":
            self.open.pop()
        if tag == "pre":
            self.texts.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "pre" in self.open:
            self.texts[-1] += data


def test_each_token_has_the_colour_of_its_weight_and_text_is_escaped(tmp_path):
    hostile = ["<script>alert(1)</script>", "</pre><img src=x onerror=1>", '"&amp;', "\n", "2"]
    row = rollout(hostile, prompt="<b>Compute", weights=[0.0, 0.5, 1.0, 1.4, 3.0])
    row |= {"step_starts": [0], "step_stops": [len(hostile[0])], "step_kinds": ["slip"]}
    shown = show_credit(write(tmp_path / "made.parquet", [row]))
    page = Elements(shown._repr_html_())
    assert page.names == {"p", "pre", "span", "b", "u", "br"}
    assert page.texts == ["".join(hostile)]
    assert "&lt;b&gt;Compute" in shown
    colours = page.styles[-5:]
    assert len({*colours}) == 5
    assert colours[2] == "background-color:rgb(255,255,255);color:black", "1 is GRPO's"
    assert shown.count("<u>") == 1
    assert shown.split("<pre>")[1].count("<b>") == 1


def test_as_many_rollouts_as_asked_for_with_every_method(tmp_path):
    other = {"weights.Uniform": [1.0], "scores.Uniform": None, "fallback.Uniform": False}
    file = write(tmp_path / "made.parquet", [rollout([str(k)], prompt=str(k)) | other for k in range(4)], ["Uniform"])
    assert Elements(show_credit(file, 2)).texts == ["0", "0", "1", "1"]
    assert "<p>Uniform</p>" in show_credit(file, 2)
    without = write(tmp_path / "none.parquet", [rollout(["a"], weights=None)])
    assert Elements(show_credit(without)).texts == ["a"]
    with pytest.raises(ValueError, match="must be a Parquet file"):
        show_credit(tmp_path / "missing.parquet")
