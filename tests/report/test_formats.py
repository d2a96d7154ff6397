"""The command: its formats with hostile names, and its mistakes."""

import csv
import html.parser
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from grail_lightning.report.command import main, make_parser
from tests.report.made import HOSTILE, SAMPLING, answers, chances, keep_samples, make_run, study


class _Page(html.parser.HTMLParser):
    """The elements and attributes of a page, and its text."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.attributes, self.text = [], [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def _report(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return study(tmp_path_factory.mktemp("study"), {"GRPO": 0.0, "GRAIL": 0.1}, seeds=2)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Two methods, a task and two datasets with hostile names, and hostile responses."""
    folder = tmp_path_factory.mktemp("hostile")
    for number, method in enumerate(HOSTILE[:2] * 2):
        sweep = {"method": method, "task": HOSTILE[2], "seed": number // 2}
        run = make_run(folder / f"r{number}", {0: 0.1, 10: 0.2 + 0.1 * number}, sweep)
        right = {HOSTILE[3]: answers(chances(9, 0.5), seed=number), HOSTILE[4]: answers(chances(9, 0.5), seed=9)}
        keep_samples(run / "test" / "samples", right, text=HOSTILE[number])
    return sorted(map(str, folder.iterdir()))


def test_hostile_names_add_no_element_and_nothing_is_fetched(hostile, plain, capsys):
    page, known = (_Page(_report(capsys, *runs, "--format=html")) for runs in (hostile, plain))
    assert set(page.elements) == set(known.elements) | {"h2"}, "only the task's heading, which the plain one has not"
    assert "script" not in page.elements
    names = {name for name, _ in page.attributes}
    assert not {name for name in names if name.startswith("on") or name in ("style", "src", "action")}
    links = [value for name, value in page.attributes if name in ("href", "xlink:href")]
    assert links[0] == "data:,"
    assert all(link.startswith("#plot0-") for link in links[1:])
    for text in (HOSTILE[0], HOSTILE[1], HOSTILE[2], HOSTILE[4]):
        assert text in page.text, "names are shown as they are"
    assert "\x1b" not in page.text
    assert "\u202e" not in page.text


def test_the_page_runs_no_program_and_takes_colours_from_its_style_sheet(plain, capsys):
    page = _report(capsys, *plain, "--format=html")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1].replace("&#39;", "'")
    assert policy.startswith("default-src 'none'")
    assert "script-src" not in policy
    assert "unsafe" not in policy
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "").replace(
        "http://www.w3.org/1999/xlink", ""
    )
    svg = page[page.index("<svg") : page.index("</svg>")]
    assert "#fe" not in page, "no placeholder is left"
    assert 'class="plot0-' in svg
    assert "var(--curve-1)" in page
    used = set(re.findall(r'class="(plot0-\d+)"', page))
    assert used <= set(re.findall(r"\.(plot0-\d+) \{", page))
    assert "color-scheme: light dark" in page


def test_a_page_is_the_same_each_time(plain, capsys):
    assert _report(capsys, *plain, "--format=html") == _report(capsys, *plain, "--format=html")


def test_no_control_character_reaches_the_terminal(hostile, capsys):
    text = _report(capsys, *hostile)
    assert all(c.isprintable() or c == "\n" for c in text)
    assert r"\u202eright to left \x1b[31m | pipe" in text
    assert HOSTILE[0] in text


def test_the_columns_of_a_terminal_are_aligned(plain, capsys):
    lines = _report(capsys, *plain).splitlines()
    start = next(k for k, line in enumerate(lines) if line.startswith("acc@3"))
    head, first, second = lines[start + 1 : start + 4]
    assert re.match(r"part 0 +GRPO +30 +2 +0\.\d{3} \[0\.\d{3}, 0\.\d{3}\] +baseline$", first)
    assert re.match(r" +GRAIL +30 +2 +0\.\d{3} \[.*\] +\+0\.\d{3} \[.*\] +\S+ +\S+ +(0\.\d{3}|>1)$", second)
    assert head.endswith("detectable")
    assert len(head) == len(second)


def test_markdown_has_a_table_that_no_name_can_break(hostile, capsys):
    text = _report(capsys, *hostile, "--format=markdown")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
    assert cells[:4] == [10] * 4
    assert not re.search(r"(?<!\\)[<`*]", text)


def test_csv_has_every_figure_in_full(plain, hostile, capsys):
    rows = list(csv.DictReader(io.StringIO(_report(capsys, *plain, "--format=csv"))))
    # 2 methods x (2 datasets + 2 averages) x (acc@3, pass@3, tokens, truncated, no answer), 2 ends, 2 x 6 steps.
    assert len(rows) == 2 * 4 * 5 + 2 + 2 * 6
    (row,) = [r for r in rows if (r["dataset"], r["method"], r["figure"]) == ("simple average", "GRAIL", "acc@3")]
    assert float(row["difference_low"]) < float(row["difference"]) < float(row["difference_high"])
    assert row["baseline"] == "GRPO"
    assert 0 <= float(row["p"]) <= float(row["p_holm"]) <= 1
    rows = list(csv.DictReader(io.StringIO(_report(capsys, *hostile, "--format=csv"))))
    assert {row["task"] for row in rows} == {"'=HYPERLINK(1)"}, "a spreadsheet must not compute a name"


@pytest.mark.parametrize(
    ("ending", "begins"), [("html", "<!doctype html>"), ("md", "90 problems"), ("csv", "part,task")]
)
def test_a_file_has_the_format_of_its_ending(ending, begins, plain, tmp_path, capsys):
    file = tmp_path / "deep" / f"report.{ending}"
    assert _report(capsys, *plain, "--output", file) == f"Wrote {file}.\n"
    assert file.read_text().startswith(begins)
    assert [entry.name for entry in file.parent.iterdir()] == [file.name]


def test_the_baseline_is_the_first_method_or_the_one_that_is_named(plain, capsys):
    assert "differences from GRPO" in _report(capsys, *plain)
    assert "differences from GRAIL" in _report(capsys, *plain, "--baseline=GRAIL")
    assert "differences from GRAIL" in _report(capsys, *plain, "--baseline", plain[-1])


def test_tasks_are_sections_of_their_own(tmp_path, capsys):
    for task, number in (("sums", 20), ("words", 30)):
        for method in "AB":
            run = make_run(tmp_path / f"{task}{method}", sweep={"method": method, "task": task, "seed": 0})
            keep_samples(run / "test" / "samples", {task: answers(chances(number, 0.5))})
    text = _report(capsys, *sorted(tmp_path.iterdir()))
    assert text.count("acc@3, and differences from A") == 2
    assert text.index("\nTrained on task words\n") > text.index("Trained on task sums\n")
    assert text.count("Tasks are not compared with each other.") == 2


def test_a_run_of_a_sweep_and_another_one_are_compared_or_refused(tmp_path, capsys):
    for name, sweep in (("one", {"method": "A", "task": "sums", "seed": 0}), ("two", None), ("three", None)):
        run = make_run(tmp_path / name, sweep=sweep)
        sampling = SAMPLING | ({"temperature": 1.0} if name == "three" else {})
        keep_samples(run / "test" / "samples", {"A": answers(chances(20, 0.5))}, sampling=sampling)
    assert "differences from X" in _report(capsys, f"X={tmp_path / 'one'}", f"Y={tmp_path / 'two'}")
    assert main([f"X={tmp_path / 'one'}", f"Y={tmp_path / 'three'}"]) == 2
    assert "differ in `sampling.temperature` (0.6, 1.0)" in capsys.readouterr().err


def test_a_method_is_the_baseline_at_whatever_point_a_sweep_chose_for_it(tmp_path, capsys):
    for number, (method, task, rate) in enumerate(
        [("GRAIL", "a", 0.2), ("GRPO", "a", 0.1), ("GRAIL", "b", 0.1), ("GRPO", "b", 0.3)]
    ):
        sweep = {"method": method, "task": task, "seed": 0, "point": {"model.optimizer.lr": rate}}
        make_run(tmp_path / f"r{number}", {0: 0.1}, sweep)
    text = _report(capsys, *sorted(tmp_path.iterdir()), "--baseline=GRPO")
    assert text.count("differences from GRPO") == 2
    assert "Values of the sweep's grid: GRAIL: lr=0.2; GRPO: lr=0.1." in text


def test_what_a_reader_must_know_is_said(tmp_path, capsys):
    for name in ("one", "two"):
        keep_samples(tmp_path / name, {"A": answers(chances(20, 0.5))})
    text = _report(capsys, tmp_path / "one", tmp_path / "two")
    assert "A method with one seed is compared as that one run" in text
    assert "evaluated the same weights" in text
    assert "differences" not in _report(capsys, tmp_path / "one")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["broken/samples/evaluation.json"], r"A run must be a folder, but \S+ is a file\."),
        (["absent"], r"A run must be a folder, but there is no folder absent\. Give one"),
        (
            ["empty"],
            r"empty must hold the samples of an evaluation .* but it holds neither\. Run `grail-lightning test`",
        ),
        (["good", "--baseline=GRIAL"], r"`--baseline` must be one of 'good', but got 'GRIAL'\."),
        (["good", "--output=o.pdf"], r"`--output` must end in \.md, \.csv, \.html, but got o\.pdf\. Take one of these"),
        (["good", "--output=o"], r"`--output` must end in \.md, \.csv, \.html, but got o\."),
        (["good", "good"], r"Each run must be given once, but good is given twice"),
        (["good", "--pass_at=4"], r"`--pass_at` must lie between 1 and the 3 samples of each problem, but got 4\."),
        (["good", "--maj_at=0"], r"`--maj_at` must lie between 1 and the 3 samples of each problem, but got 0\."),
        (
            ["good", "other"],
            r"Runs can be compared only on the same problems .* differ in the problems of A \(9 and other 8\)",
        ),
        (["good", "--format=pdf"], r".*invalid choice: 'pdf'.* See --help\."),
        (["good", "--tables"], r"Unrecognized arguments: --tables\. See --help\."),
        ([], r"The following arguments are required: RUN\. See --help\."),
        (["good", "--output=/proc/no/page.html"], r"/proc/no: .* Choose another file"),
        (["broken"], r"broken/samples/evaluation\.json must be JSON, but got"),
        (["partial"], r"partial/samples/evaluation\.json must say `num_samples`, .* Test again"),
        (["damaged"], r"damaged/samples/rank_00000\.jsonl, line 3: expected a JSON object"),
        (["sweep"], r"sweep/sweep\.json must be what a sweep left, but got"),
        (["yaml"], r"yaml/config\.yaml must be the config that a run left, but got"),
        (["one", "two"], r"Learning curves can be compared only .* one and two differ in `data` "),
    ],
)
def test_a_mistake_is_one_line(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name, number in (("good", 9), ("other", 8), ("damaged", 9)):
        keep_samples(tmp_path / name / "samples", {"A": answers(chances(number, 0.5))})
    file = tmp_path / "damaged" / "samples" / "rank_00000.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:2], "{}\n", *lines[2:]]))
    for name, content in (("broken", "{"), ("partial", '{"format": 1, "datasets": {}, "num_samples": 3}')):
        (tmp_path / name / "samples").mkdir(parents=True)
        (tmp_path / name / "samples" / "evaluation.json").write_text(content)
    for name, broken in (("sweep", "sweep.json"), ("yaml", "config.yaml")):
        (make_run(tmp_path / name, {0: 0.1}) / broken).write_text("[:\n")
    make_run(tmp_path / "one", {0: 0.1})
    make_run(tmp_path / "two", {0: 0.1}, data={"class_path": "MathData"})
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert not Path("o.pdf").exists()
    assert re.match(rf"grail_lightning\.report: error: {said}", line)


def test_the_program_runs_as_a_module(tmp_path):
    keep_samples(tmp_path / "one", {"A": answers(chances(9, 0.5))})
    command = [sys.executable, "-m", "grail_lightning.report", str(tmp_path / "one")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "acc@3" in done.stdout
    assert done.stderr == ""


def test_a_reader_that_has_seen_enough_is_no_error(plain):
    command = [sys.executable, "-m", "grail_lightning.report", *plain, "--format=html"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as report:
        report.stdout.close()
        assert report.stderr.read() == b""
    assert report.returncode == 0


def test_every_report_on_the_pages_is_one_that_the_parser_takes():
    root = Path(__file__).parents[2]
    pages = [*(root / "docs").glob("*.md"), root / "README.md"]
    found = [
        line
        for page in pages
        for line in re.findall(r"^ *(?:\$ )?python -m grail_lightning\.report (.*)$", page.read_text(), re.MULTILINE)
    ]
    assert len(found) >= 3
    for arguments in found:
        assert make_parser().parse_args(shlex.split(arguments, comments=True)).runs
