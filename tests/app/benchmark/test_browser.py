"""The report and the sorting of the board in a real headless Chromium: `make test-browser`."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from grail_lightning.app.benchmark.board import board_page
from grail_lightning.app.benchmark.report import report_html
from tests.app.benchmark.made import grail, references

selenium = pytest.importorskip("selenium", reason="needs selenium: pip install 'grail-lightning[browser]'")
markdown = pytest.importorskip("markdown", reason="the extra `docs` is not installed")
from tests.app.views.test_browser import BROWSER, DRIVER, chromium  # noqa: F401

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not BROWSER or not DRIVER, reason="needs chromium and chromedriver on the PATH"),
]

# The colours of texts and of what is behind them; a canvas mixes colours that can be seen through with the one below.
COLOURS = """
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const filled = (colours) => {
  for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
  return [...canvas.getImageData(0, 0, 1, 1).data];
};
const behind = (element) =>
  element ? [...behind(element.parentElement), getComputedStyle(element).backgroundColor] : [];
return [...document.querySelectorAll("h2, .quiet, .evidence, td, .t")].map((element) => [
  filled([getComputedStyle(element).color]), filled(behind(element)), element.className,
]);
"""


@pytest.fixture
def opened(chromium, tmp_path):  # noqa: F811
    """Opens a page in a window of some size and scheme; afterwards there must be no message in the console."""

    def show(html, width=1200, scheme="light"):
        page = tmp_path / "page.html"
        page.write_text(html, encoding="utf-8")
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
        chromium.get(page.as_uri())
        return chromium

    yield show
    assert chromium.get_log("browser") == []
    assert chromium.execute_script("return performance.getEntriesByType('resource').map((r) => r.name)") == []


@pytest.mark.parametrize("width", [390, 800, 1200])
def test_the_report_is_as_wide_as_the_window(opened, width):
    driver = opened(report_html(grail(), references()), width)
    driver.execute_script("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    heads = (
        "return Math.max(...[...document.querySelectorAll('th')].map((head) => head.getBoundingClientRect().height))"
    )
    assert driver.execute_script(heads) < 110, "words of names are not broken into letters"
    size = "return Math.min(...[...document.querySelectorAll('p, td, th, li, summary, svg text')].map("
    size += "(e) => parseFloat(getComputedStyle(e).fontSize) * (e.ownerSVGElement?.viewBox.baseVal.width ? "
    size += "e.ownerSVGElement.clientWidth / e.ownerSVGElement.viewBox.baseVal.width : 1)))"
    assert driver.execute_script(size) >= 9.5, "every text can be read"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_from_what_is_behind_them(opened, scheme):
    driver = opened(report_html(grail(), references()), scheme=scheme)
    pairs = driver.execute_script(COLOURS)

    def luminance(colour):
        parts = [part / 255 for part in colour[:3]]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    assert len(pairs) > 200
    for text, back, name in pairs:
        high, low = sorted((luminance(text), luminance(back)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, (text, back, name)


def test_intervals_are_drawn_where_their_figures_are(opened):
    driver = opened(report_html(grail(), references()))
    row = "document.querySelector('.forest tr.own')"
    box = driver.execute_script(f"return {row}.querySelector('svg').getBoundingClientRect().toJSON()")
    dot = driver.execute_script(f"return {row}.querySelector('circle').getBoundingClientRect().toJSON()")
    middle = (dot["left"] + dot["right"]) / 2
    # The figure is 0.46 on an axis from 0 to 1, with 4 per cent of the width on each side.
    assert middle == pytest.approx(box["left"] + box["width"] * (0.04 + 0.46 * 0.92), abs=1)
    assert box["height"] >= 15
    ticks = driver.execute_script(
        "return [...document.querySelectorAll('.forest')].map((f) => [...f.querySelectorAll('tfoot text')].map("
        "(t) => { const box = t.getBoundingClientRect(); return [box.left, box.right]; }).sort((a, b) => a[0] - b[0]))"
    )
    for places in ticks:
        assert all(one[1] < other[0] for one, other in pairwise(places)), "numbers do not touch"


def test_a_click_on_a_head_sorts_the_rows_and_what_has_no_figure_stands_last(opened):
    board = markdown.markdown(board_page([*references()]), extensions=["tables", "md_in_html"])
    program = (ROOT / "docs" / "assets" / "sort.js").read_text()
    driver = opened(
        f"<!doctype html><meta charset=utf-8><link rel=icon href='data:,'>{board}<script>{program}</script>"
    )
    table = "[...document.querySelectorAll('.sortable table')][1]"  # AUROC at forks.

    def clicked(column):
        driver.execute_script(f"{table}.tHead.rows[0].cells[{column}].querySelector('button').click()")
        rows = driver.execute_script(
            f"return [...{table}.tBodies[0].rows].map((r) => [...r.cells].map((c) => c.textContent))"
        )
        order = driver.execute_script(f"return {table}.tHead.rows[0].cells[{column}].getAttribute('aria-sort')")
        return [row[column] for row in rows], order

    cells, order = clicked(2)
    values = [float(re.match(r"-?[\d.]+", cell)[0]) for cell in cells if cell != "-"]
    assert order == "descending"
    assert values == sorted(values, reverse=True)
    cells, order = clicked(2)
    assert order == "ascending"
    assert [float(re.match(r"-?[\d.]+", cell)[0]) for cell in cells if cell != "-"] == sorted(values)
    cells, _ = clicked(7)
    assert cells[:2] == ["0.90 ±0.04", "0.52 ±0.04"]
    assert set(cells[2:]) == {"-"}
    cells, order = clicked(7)
    assert (cells[:2], order) == (["0.52 ±0.04", "0.90 ±0.04"], "ascending")
    assert set(cells[2:]) == {"-"}
    names, order = clicked(0)
    assert order == "ascending"
    assert names == sorted(names, key=str.casefold)
    sorted_heads = driver.execute_script(f"return {table}.querySelectorAll('[aria-sort]').length")
    assert sorted_heads == 1
