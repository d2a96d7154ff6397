"""The report on a method: what it shows, that it is one safe file, and where pictures have their figures."""

import json
import re
from html.parser import HTMLParser

import pytest

from grail_lightning.app.benchmark.claims import number
from grail_lightning.app.benchmark.pictures import forest_picture, rollouts, seen
from grail_lightning.app.benchmark.report import repeat_table, report_html, report_markdown, write_report
from grail_lightning.app.benchmark.result import read_result
from grail_lightning.app.benchmark.tables import Forest, Row, interval, sections
from grail_lightning.app.benchmark.verdict import verdict
from grail_lightning.app.results.statistics import Estimate
from grail_lightning.app.views.heatmap import LARGEST, colour_of, shade_of
from tests.app.benchmark.made import example, grail, oracle, references, result, score, tree, world

HOSTILE = "</style><script>alert(1)</script><img src=x onerror=alert(2)> | [x](javascript:alert(3)) `*_"
HOSTILE += "\ud800\u202e\x00\n# H"
VOID = {"meta", "link"}


class _Page(HTMLParser):
    """The elements of a page with their attributes, and its text; fails where an end tag has no beginning."""

    def __init__(self, page):
        super().__init__()
        self.found, self.open, self.text = [], [], ""
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data

    def all(self, tag, **wanted):
        return [a for t, a in self.found if t == tag and wanted.items() <= a.items()]


@pytest.fixture(scope="module")
def page():
    return _Page(report_html(grail(), references()))


def _hostile():
    made = example()
    made |= {"prompt": HOSTILE, "outcome": HOSTILE, "tokens": [HOSTILE] * len(made["tokens"])}
    made["steps"][0]["kind"] = HOSTILE
    texts = dict.fromkeys(("label", "method", "package", "machine", "date", "command"), HOSTILE)
    one = result("x", {HOSTILE: world("sums", 0.9, 0.9), "search": None}) | texts
    one |= {"options": {HOSTILE: HOSTILE}, "versions": {HOSTILE: HOSTILE}, "reads": [HOSTILE], "control": HOSTILE}
    one["worlds"][HOSTILE]["controls"] = {HOSTILE: one["worlds"][HOSTILE]["controls"]["Shuffled"]}
    one["worlds"][HOSTILE]["reasons"] = {"training": HOSTILE}
    return one | {"examples": [made], "reasons": {"search": HOSTILE}}


def test_the_three_files_are_written_and_the_json_has_the_verdict(tmp_path):
    files = write_report(grail() | {"label": "GRAIL, std=0.3 / x"}, references(), tmp_path / "new")
    assert [file.name for file in files] == [f"GRAIL_std=0.3_x.{ending}" for ending in ("json", "md", "html")]
    read = read_result(files[0])
    assert read["verdict"] == verdict(grail() | {"label": "GRAIL, std=0.3 / x"}, references())
    assert all(file.stat().st_size < 1_000_000 for file in files)
    with pytest.raises(ValueError, match="`format` of the result must be 1"):
        write_report(grail() | {"format": 0}, [], tmp_path)


def test_the_page_is_one_file_that_fetches_nothing_and_runs_nothing(page):
    (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy["content"].startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    assert not page.all("script")
    for tag, attributes in page.found:
        assert not {"src", "style", "onclick", "onload", "onerror"} & attributes.keys(), (tag, attributes)
    assert [a["href"] for a in page.all("link")] == ["data:,"]
    style = re.search(r"<style>(.*?)</style>", report_html(grail(), references()), re.DOTALL)[1]
    assert "url(" not in style
    assert "color-scheme: light dark" in style


def test_texts_of_users_and_models_are_shown_and_never_interpreted():
    html = report_html(_hostile(), [_hostile() | {"label": f"{HOSTILE}2"}])
    page = _Page(html)
    assert not page.all("script")
    assert not page.all("img")
    assert page.text.count("<script>alert(1)</script>") > 10, "they are there as text"
    assert html.count("<style>") == 1
    html.encode()
    markdown = report_markdown(_hostile(), [_hostile() | {"label": f"{HOSTILE}2"}])
    assert not re.search(r"(?<!\\)<(?=[a-z/!])", markdown)
    assert not re.search(r"(?<!\\)\]\(", markdown)
    assert "\n# H" not in markdown, "no text begins a line of its own"
    for line in markdown.splitlines():
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) in range(3, 20), line
    markdown.encode()


def test_long_examples_are_cut_so_that_the_page_stays_below_a_megabyte():
    made = example()
    long = made | {"tokens": ["<&>'\"" * 4] * 5000, "weights": [2.0] * 5000, "steps": []}
    many = grail() | {"examples": [made, *[long] * 9]}
    shown = rollouts(many)
    assert len(shown) == 2, "whole rollouts are left out, the last ones"
    assert shown[1]["left_out"] == 4400
    html = report_html(many, references())
    assert "4400 tokens more" in html
    assert len(html.encode()) < 1_000_000


def test_the_verdict_stands_at_the_top_of_both(page):
    markdown = report_markdown(grail(), references())
    for text in (page.text, markdown):
        places = [text.index(part) for part in ("Verdict", "Finds misconceptions in sums")]
        places += [text.index(part) for part in ("Does it find the error?", "What does a step gain?")]
        places += [text.index(part) for part in ("Does it train better?", "What does it cost?", "To repeat it")]
        assert places == sorted(places)
    assert "- **Finds misconceptions in sums alone, but not slips or bad turns.** At forks" in markdown
    assert "GRAIL explains an answer in a box" in page.text


def test_every_figure_of_the_json_stands_in_a_table_of_both(page):
    markdown = report_markdown(grail(), references())
    sums = grail()["worlds"]["sums"]
    intervals = [sums["auroc_forks"]["slip"], sums["auroc_rollout"]["slip"], sums["values"]["right"]]
    intervals += [sums["blame"]["flawed"], sums["weights"]["inherited"], sums["gain"]["sgd"], sums["cost"]["step"]]
    intervals += [sums["share_of_limit"]["adam"], sums["gain_beside_baseline"]["best_constant"]["sgd"]]
    for value, low, high in intervals:
        said = f"{number(value)} [{number(low)}, {number(high)}]"
        assert said in page.text
        assert said in markdown
    assert "0.998 [0.996, 1.000]" in page.text, "the direction has three digits"
    assert "-1.8 [-3.2, -0.4]" in page.text, "training"
    assert "control: Shuffled" in page.text


def test_reasons_stand_where_a_figure_is_missing(page):
    for text in (page.text, report_markdown(grail(), references())):
        assert "No wrong rollout has a misconception beside a sound step." in text
        assert "code: --train was given for sums and words alone." in text


def test_a_row_is_not_compared_with_itself_and_oracles_are_marked():
    others = [tree(), oracle() | {"label": "Labels"}, tree() | {"label": "TreeAdvantage, state=numbers"}]
    first = sections(tree(), others)[0]
    labels = [row.label for row in first.forests[0].rows]
    assert labels == [
        "TreeAdvantage",
        "control: Shuffled",
        "control: PermutedRewards",
        "Labels (oracle)",
        "TreeAdvantage, state=numbers",
    ]
    assert [row.kind for row in first.forests[0].rows] == ["own", "control", "control", "oracle", "reference"]


def test_a_score_without_weights_has_tables_of_what_it_has():
    html = report_html(score("entropy", 0.5, (0.64, 0.78)), references())
    assert "A score has no weights." in html
    assert "Mean weight in wrong rollouts: sums" in html, "of the references"
    forests = sections(score("entropy", 0.5, 0.6), references())[1].forests
    assert forests == []


def test_curves_are_drawn_with_bands_and_stand_in_tables(page):
    assert len(page.all("polygon", **{"class": "band c0 d0"})) == 2, "two worlds were trained"
    assert len(page.all("svg", role="img")) == 2
    assert page.all("svg", role="img")[0]["aria-label"] == "Accuracy in sums by step, by method"
    assert "0.860 [0.840, 0.880]" in page.text
    assert "lower baseline r - mean/2" in page.text
    one_seed = grail()
    for curve in one_seed["worlds"]["sums"]["training"]["curves"].values():
        curve["low"] = curve["high"] = [None] * len(curve["steps"])
    assert 'class="band c0 d0"' in report_html(one_seed), "of the other world"
    assert "nan" not in report_html(one_seed)


def test_places_of_a_forest_plot_are_those_of_its_figures():
    def drawn(neutral, *values, limits=None):
        rows = [Row(label="a", kind="own", estimate=Estimate(value=v, low=a, high=b)) for v, a, b in values]
        return forest_picture(Forest(title="t", world="w", rows=rows, neutral=neutral, limits=limits))

    picture = drawn(0.5, (0.75, 0.5, 1.0), limits=(0.0, 1.0))
    # 4 per cent are left on each side: 0 is at 4, 1 at 96, so 0.75 is at 4 + 0.75 * 92 = 73.
    assert (picture["rows"][0]["low"], picture["rows"][0]["at"], picture["rows"][0]["high"]) == (50.0, 73.0, 96.0)
    assert picture["neutral"] == 50.0
    assert picture["ticks"] == [(50.0, "0.5", "middle"), (4.0, "0.0", "start"), (96.0, "1.0", "end")]
    picture = drawn(1.0, (1.05, 1.02, 1.08), (0.4, 0.3, 0.5))
    places = [row["at"] for row in picture["rows"]]
    assert 4 <= places[1] < picture["neutral"] < places[0] <= 96
    low, neutral, high = picture["rows"][1]["low"], picture["neutral"], picture["rows"][0]["high"]
    assert (neutral - low) / (high - low) == pytest.approx(0.7 / 0.78, abs=2e-3)
    ticks = [place for place, *_ in picture["ticks"]]
    assert all(abs(a - b) > 20 for a in ticks for b in ticks if a != b), "numbers do not touch"
    same = drawn(1.0, (1.0, 1.0, 1.0))
    assert same["rows"][0]["at"] == same["neutral"] == 50.0


def test_tokens_have_the_colours_of_the_packages_pictures():
    tokens = rollouts(grail())[0]["tokens"]
    weights = grail()["examples"][0]["weights"]
    assert [token["text"] for token in tokens[:8]] == [*"7+5=12", "↵", "1"]
    assert [token["ends"] for token in tokens[5:8]] == [False, True, False]
    for token, weight in zip(tokens, weights, strict=True):
        shade = shade_of(weight)
        assert ("more" in token["classes"], "less" in token["classes"]) == (shade > 0.025, shade < -0.025)
        part = int(re.search(r"p(\d+)|$", token["classes"])[1] or 0)
        assert abs(part / 100 - abs(shade)) <= 0.025 + 1e-9
    assert "slip" in tokens[7]["classes"].split()
    assert tokens[7]["said"] == f"weight {weights[7]:.3g}, slip"
    assert (shade_of(0.0), shade_of(1.0), shade_of(LARGEST), shade_of(50.0)) == (-1.0, 0.0, 1.0, 1.0)
    assert colour_of(LARGEST) == (240, 146, 43)


def test_what_the_policy_did_not_sample_is_marked_and_has_no_weight():
    shown = rollouts(grail())[3]
    found = next(token for token in shown["tokens"] if token["text"] == "found: ")
    assert found == {"text": "found: ", "ends": False, "classes": "t told", "said": "not sampled"}
    assert "bad-turn" in shown["tokens"][7]["classes"]
    assert shown["table"].rows == [
        ["search(Norma)", "sound", "0.95", "1.00"],
        ["search(Oslo)", "bad turn", "1.77", "2.40"],
    ]


def test_control_characters_of_a_model_are_signs():
    assert seen("a\x00b\tc\n") == "a␀b\tc↵\n"


def test_pictures_have_words_for_those_who_do_not_see_them(page):
    for attributes in page.all("svg"):
        assert attributes.get("aria-hidden") == "true" or attributes.get("aria-label") or not attributes, attributes
    assert len(page.all("th", scope="col")) > 20
    assert len(page.all("caption")) == len(page.all("table"))
    for attributes in page.all("div", role="region"):
        assert attributes["aria-label"]
        assert attributes["tabindex"] == "0", "what scrolls can be reached by the keyboard"
    assert page.all("html")[0]["lang"] == "en"


def test_what_is_needed_to_repeat_it_is_there(page):
    given = grail() | {"options": {"std": 0.3}, "control": {"class_path": "Shuffled"}}
    rows = dict(repeat_table(given).rows)
    assert rows["command"] == "python -m grail_lightning.benchmark GRAIL"
    assert rows["options"] == json.dumps({"std": 0.3})
    assert rows["control"] == '{"class_path": "Shuffled"}'
    assert rows["versions"] == "python 3.12.3, torch 2.13.0, numpy 2.3.4"
    assert rows["seed"] == "0"
    assert "AMD EPYC 7763, 2 cores" in page.text
    assert "under the control" in report_markdown(given)


def test_figures_in_cells():
    assert interval(Estimate(value=-0.001, low=-0.2, high=0.1)) == "0.00 [-0.20, 0.10]"
    assert interval(Estimate(value=1.85, low=0.4, high=3.25), 1, "+") == "+1.9 [0.4, 3.2]"
    assert interval(Estimate(value=0.0, low=-1.0, high=1.0), 1, "+") == "0.0 [-1.0, 1.0]"
    assert interval(None) == "-"
