"""The board: a page that is made of JSON files, its rows, and the program that adds one."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from grail_lightning.app.benchmark.board import BOARD, board_page, board_row, read_board, write_row
from grail_lightning.app.benchmark.result import figure, read_result
from tests.app.benchmark.made import grail, oracle, references, result, tree, world
from tests.benchmark_modules import script

ROOT = Path(__file__).parents[3]


def _board():
    rows = [grail(), tree(True), *references()[2:]]
    return sorted(rows, key=lambda row: row["label"].casefold())


def _tables(page):
    """The tables of a page by the heading before them: rows of cells."""
    tables = {}
    for part in re.split(r"^#+ ", page, flags=re.MULTILINE)[1:]:
        lines = [line for line in part.splitlines() if line.startswith("|")]
        if lines:
            tables[part.splitlines()[0]] = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return tables


def _cell(table, method, column):
    (row,) = [row for row in table if row[0] == method]
    return row[table[0].index(column)]


def test_a_row_has_neither_rollouts_nor_curves_and_is_a_result(tmp_path):
    whole = grail()
    whole["worlds"]["sums"]["direction"] = [0.123456789, 0.1, 0.2]
    row = board_row(whole)
    assert "examples" not in row
    assert "curves" not in row["worlds"]["sums"]["training"]
    assert row["worlds"]["sums"]["direction"] == [0.12346, 0.1, 0.2]
    assert whole["examples"]
    assert whole["worlds"]["sums"]["training"]["curves"], "what is given stays as it is"
    file = write_row(whole | {"label": "GRAIL, std=0.3 / x"}, tmp_path)
    assert file.name == "GRAIL_std=0.3_x.json"
    assert read_result(file) == row | {"label": "GRAIL, std=0.3 / x"}
    assert file.stat().st_size < 30_000


def test_a_board_is_read_in_the_order_of_its_labels_and_each_label_is_there_once(tmp_path):
    assert read_board(tmp_path / "nowhere") == []
    for row in (tree(), grail(), grail() | {"label": "entropy"}):
        write_row(row, tmp_path)
    assert [row["label"] for row in read_board(tmp_path)] == ["entropy", "GRAIL", "TreeAdvantage"]
    (tmp_path / "again.json").write_text(json.dumps(grail()))
    with pytest.raises(ValueError, match=r"`label` must differ .* but got 'GRAIL' in .*GRAIL.json and .*again.json"):
        read_board(tmp_path)


def test_the_page_has_every_figure_by_method_world_and_question():
    tables = _tables(board_page(_board()))
    assert tables["AUROC at forks"][0] == [
        *("method", "sums: slip", "sums: misconception", "words: slip", "words: misconception"),
        *("code: slip", "code: misconception", "search: bad turn"),
    ]
    assert _cell(tables["AUROC at forks"], "TreeAdvantage", "search: bad turn") == "0.90 ±0.04"
    assert _cell(tables["AUROC at forks"], "Oracle", "search: bad turn") == "-"
    assert _cell(tables["AUROC within a rollout"], "position", "words: slip") == "1.00 ±0.00"
    assert _cell(tables["Gain of a step, Adam"], "GRAIL", "code") == "0.95 ±0.02"
    assert _cell(tables["Gain less that of the best lower baseline, Adam"], "GRAIL", "sums") == "-0.32 ±0.02"
    assert _cell(tables["Points over uniform credit, mean over training"], "GRAIL", "sums") == "-1.8 ±1.4"
    assert _cell(tables["Points over the lower baseline, mean over training"], "TreeAdvantage", "sums") == "1.9 ±1.9"
    assert _cell(tables["Time of a step"], "Oracle", "words") == "1.24 ±0.05"
    assert "words" in tables["Points over uniform credit, mean over training"][0]
    assert "code" not in tables["Points over uniform credit, mean over training"][0], "nobody was trained there"
    assert ["position"] not in [row[:1] for row in tables["Gain of a step, Adam"]], "a score has no gain"


def test_the_summary_counts_the_worlds_in_which_a_claim_holds():
    table = _tables(board_page(_board()))["At a glance"]
    assert _cell(table, "TreeAdvantage", "finds slips") == "3 of 3"
    assert _cell(table, "GRAIL", "finds misconceptions") == "1 of 3"
    assert _cell(table, "surprisal (-log p)", "finds misconceptions") == "0 of 3, 3 below"
    assert _cell(table, "TreeAdvantage", "a step gains more") == "3 of 4"
    assert _cell(table, "TreeAdvantage", "more than a lower baseline") == "0 of 4, 3 below"
    assert _cell(table, "TreeAdvantage", "trains better") == "1 of 1"
    assert _cell(table, "GRAIL", "trains better") == "0 of 2, 1 below"
    assert _cell(table, "GRAIL", "better than a lower baseline") == "0 of 2"
    assert _cell(table, "position", "a step gains more") == "-"
    assert _cell(table, "Oracle", "reads") == "labels"


def test_where_a_method_does_not_apply_stands_with_its_reason():
    rows = _tables(board_page(_board()))["Where there is no figure"]
    assert ["GRAIL", "charts", grail()["reasons"]["charts"]] in rows
    assert ["entropy", "sums", "A score has no weights."] in rows
    marked = oracle() | {"label": "Labels"}
    assert _cell(_tables(board_page([marked]))["AUROC at forks"], "Labels (oracle)", "sums: slip") == "1.00 ±0.02"


def test_an_empty_board_says_so():
    assert board_page([]) == "No result is in the folder yet."


def test_the_shipped_rows_are_rows_and_the_page_is_theirs():
    for row in read_board(BOARD):
        assert row == board_row(row), f"{row['label']}: add it with scripts/add_to_board.py"
        assert any(figure(row, name, "auroc_forks", error) for name in row["worlds"] for error in ("slip", "bad turn"))
    page = (ROOT / "docs" / "benchmark.md").read_text()
    before, _, rest = page.partition("<!-- board -->\n\n")
    board, _, after = rest.partition("\n\n<!-- end of board -->\n")
    assert board == board_page(read_board()), "run python scripts/fill_pages.py"
    words = re.findall(r"\w+", re.sub(r"^\|.*$", "", before + after, flags=re.MULTILINE))
    assert len(words) <= 1500


def test_the_program_adds_rows_and_makes_the_page_anew(tmp_path, monkeypatch, capsys):
    program = script("add_to_board")
    shutil.copy(ROOT / "docs" / "benchmark.md", tmp_path / "benchmark.md")
    monkeypatch.setattr(program, "DOCS", tmp_path)
    monkeypatch.setattr(program, "BOARD", tmp_path / "board")
    given = tmp_path / "mine.json"
    given.write_text(json.dumps(tree() | {"label": "Mine"}))
    program.main([str(given)])
    assert "Mine.json" in capsys.readouterr().out
    assert "| Mine | " in (tmp_path / "benchmark.md").read_text()
    given.write_text("{")
    with pytest.raises(SystemExit, match="must be the JSON of a result") as raised:
        program.main([str(given)])
    assert "\n" not in str(raised.value)


def test_the_program_is_run_as_the_page_says():
    command = [sys.executable, "scripts/add_to_board.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "RESULT" in done.stdout


def test_texts_of_rows_are_no_markup_on_the_site():
    markdown = pytest.importorskip("markdown", reason="the extra `docs` is not installed")
    hostile = "<script>alert(1)</script> | `x` [y](z) *b* \\| &amp; __c__\n# H"
    row = result("x", {"sums": world("sums", 0.9, 0.9), "search": None}, reasons={"search": hostile}, label=hostile)
    html = markdown.markdown(board_page([row, grail()]), extensions=["tables", "md_in_html"])
    assert "<script" not in html
    for wrong in ("<a ", "<code", "<em", "<strong", "<h1"):
        assert wrong not in html
    assert html.count("<table>") == html.count('<div class="sortable">') > 8
    counts = {table.count("<th") for table in html.split("<tr>")[1:2]}
    assert counts == {len(_tables(board_page([row, grail()]))["At a glance"][0])}
    assert "&lt;script&gt;" in html.replace("&#60;", "&lt;").replace("&#62;", "&gt;")
