"""Which runs a report finds, what it compares, and its formats with hostile names."""

import csv
import io
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import scipy.stats
from torch.utils.tensorboard import SummaryWriter

from grail_lightning import read_samples
from grail_lightning.app.report import main as report
from grail_lightning.app.results.differences import compare, compare_curves, other_validation, read_curves, read_scalars
from grail_lightning.app.results.runs import find_runs, method_of, paired_seeds
from grail_lightning.app.results.statistics import difference, holm, mean_interval
from tests.app.results.made import DATASETS, HOSTILE, SAMPLING, answers, chances, config, keep_samples, make_run, study
from tests.shell import refusal

A9, A20, A30 = (answers(chances(number, 0.5)) for number in (9, 20, 30))
CURVES = {"GRPO": [[0.1, 0.30, 0.40], [0.1, 0.25, 0.44], [0.1, 0.31, 0.42]]}
CURVES["GRAIL"] = [[0.1, 0.36, 0.50], [0.1, 0.30, 0.49], [0.1, 0.33, 0.55]]


def _runs(*given):
    return find_runs([str(argument) for argument in given])


def _seeds(*given):
    """The seeds of each method, by task and name."""
    seeds = {}
    for run in _runs(*given):
        seeds.setdefault((run.task, run.method), []).append(run.seed)
    return seeds


def _said(capsys, *arguments):
    report([str(argument) for argument in arguments])
    return capsys.readouterr().out


def _row(frame, **wanted):
    (row,) = frame[(frame[list(wanted)] == list(wanted.values())).all(axis=1)].to_dict("records")
    return row


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return study(tmp_path_factory.mktemp("study"), {"GRPO": 0.0, "GRAIL": 0.1, "OAR-G": 0.03})


# Which runs are found, and which belong to one method.


def test_a_run_its_stage_and_its_samples_are_the_same_run(tmp_path):
    run = make_run(tmp_path / "a", {0: 0.1})
    keep_samples(run / "test" / "samples", {"A": A9})
    found = [_runs(place)[0] for place in (run, run / "test", run / "test" / "samples")]
    assert {(one.samples, one.folder, one.seed) for one in found} == {(run / "test" / "samples", run, 0)}
    for given in ([run, run / "test"], [f"A={run}", f"B={run}"]):
        with pytest.raises(ValueError, match=r"must be given once, but \S+ and \S+ are one\. Leave one out"):
            _runs(*given)


def test_configs_that_differ_in_seed_and_folder_are_one_method(tmp_path):
    for credit in ("GRAIL", "Uniform"):
        for seed in (1, 0, 2):
            make_run(tmp_path / f"{credit}_seed{seed}", {0: 0.1}, seed=seed, name=f"{credit}_{seed}", credit=credit)
    assert _seeds(*sorted(tmp_path.iterdir())) == {("", "GRAIL"): [0, 1, 2], ("", "Uniform"): [0, 1, 2]}
    folders = [tmp_path / "a" / "r", tmp_path / "b" / "r", tmp_path / "r (2)"]
    others = [make_run(folder, {0: 0.1}, seed=k, credit=str(k)) for k, folder in enumerate(folders)]
    assert _seeds(*others) == {("", "r"): [0], ("", "r (2)"): [1], ("", "r (2) (2)"): [2]}
    make_run(tmp_path / "other", {0: 0.1}, evaluation={"num_samples": 2, "sampling": None})
    assert ("", "other") in _seeds(tmp_path / "other", tmp_path / "GRAIL_seed0"), "any other option is another method"
    given = [f"mine={tmp_path / 'GRAIL_seed0'}", f"mine={tmp_path / 'Uniform_seed1'}"]
    assert _seeds(*given) == {("", "mine"): [0, 1]}, "the name that a user gives comes first"
    with pytest.raises(ValueError, match=r"must have different seeds, but .*l0 and .*l1 .* both have 5. Leave one out"):
        _runs(*(make_run(tmp_path / f"l{number}", {0: 0.1}, seed=5) for number in range(2)))


def test_a_sweep_says_what_belongs_together(tmp_path):
    points = [("GRAIL", "a", 3, 0.1), ("GRAIL", "a", 4, 0.1), ("GRAIL", "a", 3, 0.2), ("GRAIL", "b", 3, 0.1)]
    for number, (method, task, seed, rate) in enumerate(points):
        sweep = {"method": method, "task": task, "seed": seed, "point": {"model.optimizer.lr": rate}}
        make_run(tmp_path / f"r{number}", {0: 0.1}, sweep, credit=str(number))  # The configs would say otherwise.
    assert _seeds(*sorted(tmp_path.iterdir())) == {
        ("a", "GRAIL, lr=0.1"): [3, 4],
        ("a", "GRAIL, lr=0.2"): [3],
        ("b", "GRAIL"): [3],
    }
    chose = make_run(tmp_path / "chose", {0: 0.1}, {"method": "GRAIL", "task": "a", "seed": 9, "choosing": True})
    with pytest.raises(ValueError, match="must not be reported beside others, which would flatter the point"):
        _runs(tmp_path / "r0", chose)


def test_an_evaluation_elsewhere_belongs_to_the_run_that_trained_its_policy(tmp_path):
    (tmp_path / "config.yaml").write_text("seed_everything: 9")  # Of a project, not of runs in it.
    for seed, (by, name) in enumerate({"checkpoint": "checkpoints/best.ckpt", "policy": "export"}.items()):
        trained, place = make_run(tmp_path / f"trained_{seed}", {0: 0.1}, seed=seed), tmp_path / f"evaluated_{seed}"
        (trained / "checkpoints").mkdir()
        (trained / name).touch()
        place.mkdir()
        (place / "config_test.yaml").write_text(f"seed_everything: 7\nmodel: {{policy: {trained / name}}}\n")
        model = {"policy": "arithmetic", "checkpoint": None, "digest": str(seed), "step": 3} | {by: str(trained / name)}
        keep_samples(place / "test" / "samples", {"A": A9}, model=model)
    assert _seeds(tmp_path / "evaluated_0", tmp_path / "evaluated_1") == {("", "evaluated"): [0, 1]}
    assert _runs(tmp_path / "evaluated_1")[0].events == tmp_path / "trained_1", "its learning curve, too"
    # A config beside the folder of a model is that of no run.
    (tmp_path / "models" / "x").mkdir(parents=True)
    model = {"checkpoint": None, "policy": str(tmp_path / "models" / "x"), "digest": "0", "step": 3}
    keep_samples(tmp_path / "one" / "test" / "samples", {"A": A9}, model=model)
    (tmp_path / "one" / "config_test.yaml").write_text("seed_everything: 7")
    assert _runs(tmp_path / "one")[0].seed == 7
    (tmp_path / "trained_0" / "config.yaml").unlink()
    assert _runs(tmp_path / "trained_0")[0].events == tmp_path / "trained_0"


def test_a_baseline_is_named_by_its_method_or_by_a_run_of_it(tmp_path, capsys, monkeypatch):
    """As it stands in the table, as the folder that was given, and as the training whose checkpoint was tested."""
    monkeypatch.chdir(tmp_path)
    for name in ("GRPO_0", "GRPO_1", "GRAIL_0", "GRAIL_1"):
        credit, seed = name.split("_")
        trained = make_run(tmp_path / "runs" / name, {0: 0.1, 9: 0.3}, seed=int(seed), name=name, credit=credit)
        (trained / "checkpoints").mkdir()
        (trained / "checkpoints" / "last.ckpt").touch()
        model = {"policy": "x", "checkpoint": str(trained / "checkpoints" / "last.ckpt"), "digest": name, "step": 9}
        keep_samples(tmp_path / "runs" / f"test_{name}" / "test" / "samples", {"A": A9}, model=model)
    given = [f"runs/test_{name}" for name in ("GRAIL_0", "GRAIL_1", "GRPO_0", "GRPO_1")]
    expected = _said(capsys, *given, "--baseline=test_GRPO")  # The name in the table.
    assert re.search(r"test_GRPO .* baseline", expected)
    for name in (
        "GRPO_0",
        "runs/GRPO_1",
        "test_GRPO_1",
        "runs/test_GRPO_0",
        tmp_path / "runs/test_GRPO_0/test/samples",
    ):
        assert _said(capsys, *given, f"--baseline={name}") == expected, name
    with pytest.raises(ValueError, match=r"but got 'same'\. It is a run of each of 'a', 'b'\."):
        method_of(_runs(*(f"{k}={make_run(tmp_path / k / 'same', {0: 0.1})}" for k in "ab")), "same")


def test_runs_of_unknown_seeds_are_those_of_one_method_if_the_user_says_so(tmp_path):
    for name in ("g0", "g1"):
        keep_samples(tmp_path / name, {"A": A9})
    runs = _runs(f"G={tmp_path / 'g0'}", f"G={tmp_path / 'g1'}")
    assert [(run.method, run.seed) for run in runs] == [("G", None)] * 2
    same = [make_run(tmp_path / name, {0: 0.1}) for name in ("r0", "r1")]
    with pytest.raises(ValueError, match=r"both have 0\. .* give each a name, as NAME=FOLDER\."):
        _runs(f"R={same[0]}", f"R={same[1]}")


# Figures and differences of kept samples.


def test_figures_are_those_of_the_samples(tmp_path):
    right = {"A": answers(chances(40, 0.4), 3, 1), "B": answers(chances(70, 0.8), 3, 2)}
    frame = compare(_runs(keep_samples(tmp_path / "one", right, first={"A": 40})), "one", [2])
    figures = {(row["dataset"], row["figure"]): row for row in frame.to_dict("records")}
    for name, label in {"A": "A (first 40)", "B": "B"}.items():
        share, row = right[name].mean(1), figures[label, "acc@3"]
        known = (share.mean(), *mean_interval(share, share * (1 - share) / 3))
        assert (row["value"], row["low"], row["high"]) == pytest.approx(known)
    c = right["B"].sum(1)
    known = {("B", "pass@2"): (1 - (3 - c) * (2 - c) / 6).mean()}  # Of c right ones of 3: 1 - C(3 - c, 2) / 3.
    known |= {("simple average", "acc@3"): np.mean([values.mean() for values in right.values()])}
    known |= {("weighted by size", "acc@3"): np.concatenate(list(right.values())).mean()}
    known |= {("A (first 40)", "tokens"): np.mean([10 + index % 5 + k for index in range(40) for k in range(3)])}
    assert {key: figures[key]["value"] for key in known} == pytest.approx(known)


def test_problems_and_seeds_are_paired_and_families_are_corrected(plain):
    runs = _runs(*plain)
    frame = compare(runs, "GRPO", [])

    def shares(run, dataset):
        right = [s["correct"] for s in read_samples(run.samples) if s["dataset"] == dataset]
        return np.reshape(right, (-1, 3)).mean(1)

    tables = {
        method: [np.stack([shares(run, name) for run in runs if run.method == method], 1) for name in DATASETS]
        for method in ("GRAIL", "GRPO")
    }
    ours, theirs = ([(a, a * (1 - a) / 3) for a in table] for table in tables.values())
    known = difference(ours, theirs, [0.5, 0.5], paired_seeds=True)
    row = _row(frame, dataset="simple average", method="GRAIL", figure="acc@3")
    assert [row[name] for name in ("difference", "difference_low", "difference_high", "p")] == pytest.approx(
        [known.value, known.low, known.high, known.p_value]
    )
    tested = frame[frame["difference"].notna()]
    families = [tested[tested["part"] == "dataset"], tested[tested["dataset"] == "simple average"]]
    assert [len(family) for family in families] == [4, 2]
    for family in families:
        assert list(family["p_holm"]) == holm(list(family["p"]))
    assert row["detectable"] == pytest.approx(known.detectable(2))


def test_seeds_that_only_one_method_has_are_left_out_of_the_difference(plain):
    fewer, same = (
        _row(compare(_runs(*given), "GRPO", []), dataset="simple average", method="GRAIL", figure="acc@3")
        for given in (plain[1:6], [*plain[1:3], *plain[4:6]])
    )
    assert (fewer["seeds"], fewer["paired_seeds"], fewer["difference"]) == (3, 2, same["difference"])
    assert fewer["value"] != same["value"], "its own figure is of all of its seeds"
    assert paired_seeds([0, 1, 2], [2]) == ([2], [0], True)
    assert paired_seeds([0, 1], [1, 2]) == ([0, 1], [0, 1], False), "one seed in common is no sample of pairs"
    assert paired_seeds([0, 1], [2]) == ([0, 1], [0], False)
    assert paired_seeds([0, None], [0, 1]) == ([0, 1], [0, 1], False)


def test_pairs_are_the_same_problems_in_whatever_order(tmp_path):
    runs = _runs(keep_samples(tmp_path / "one", {"A": A30}), keep_samples(tmp_path / "two", {"A": A30}, order=-1))
    row = _row(compare(runs, "one", []), method="two", figure="acc@3")
    assert (row["difference"], row["p"]) == (0, 1)


@pytest.mark.parametrize(
    ("facts", "differ"),
    [
        ({"sampling": SAMPLING | {"temperature": 1.0}}, r"`sampling.temperature` \(0.6, 1.0\)"),
        ({"grading": {"A": {"compare": "text"}}}, "`grading of A`"),
        ({"datasets": {"A": answers(chances(20, 0.5), 2)}}, "`num_samples`"),
        ({"datasets": {"A": A30}}, r"`problems of A` \('20 problems.*, '30 problems"),
    ],
)
def test_other_problems_or_settings_are_refused(facts, differ, tmp_path):
    keep_samples(tmp_path / "one", {"A": A20})
    keep_samples(tmp_path / "two", **({"datasets": {"A": A20}} | facts))
    runs = _runs(tmp_path / "one", tmp_path / "two")
    with pytest.raises(ValueError, match=r"one and \S*two differ in " + differ):
        compare(runs, "one", [])


# Learning curves.


def _curves(folder, values=CURVES):
    for method, seeds in values.items():
        for seed, curve in enumerate(seeds):
            points = dict(zip((0, 10, 20), curve, strict=False))
            make_run(folder / f"{method}_{seed}", points, seed=seed, credit=method)
    return _runs(*sorted(folder.iterdir(), reverse=True))


def test_curves_have_students_band_over_seeds_and_their_ends_are_paired(tmp_path):
    curves, left_out = read_curves(_curves(tmp_path))
    frame = compare_curves(curves, "GRPO")
    assert left_out == []
    one, two = (np.array(CURVES[name])[:, -1] for name in ("GRAIL", "GRPO"))
    known = scipy.stats.ttest_1samp(np.array(CURVES["GRAIL"])[:, 1], 0).confidence_interval()
    row = _row(frame, part="curve", method="GRAIL", step=10)
    assert (row["value"], row["low"], row["high"]) == pytest.approx((0.33, known.low, known.high), abs=1e-6)
    end, known = _row(frame, part="end", method="GRAIL"), scipy.stats.ttest_rel(one, two)
    assert (end["step"], end["paired_seeds"], end["difference"]) == (20, 3, pytest.approx((one - two).mean(), abs=1e-6))
    assert (end["p"], end["p_holm"]) == pytest.approx((known.pvalue, known.pvalue), rel=1e-4)
    interval = (end["difference_low"], end["difference_high"])
    assert interval == pytest.approx(tuple(known.confidence_interval()), abs=1e-6)


def test_ends_are_at_the_last_step_of_all_and_a_run_that_is_not_over_does_not_cut_the_others_short(tmp_path, capsys):
    shorter = _curves(tmp_path / "a", {"GRPO": CURVES["GRPO"], "GRAIL": [curve[:2] for curve in CURVES["GRAIL"]]})
    assert re.search(r"^val/accuracy step 10 ", _said(capsys, *(run.given for run in shorter)), re.M)
    runs = _curves(tmp_path / "b", CURVES | {"GRAIL": [*CURVES["GRAIL"][:2], CURVES["GRAIL"][2][:2]]})
    text = _said(capsys, *(run.given for run in runs), "--baseline=GRPO")
    assert re.search(r"^ +GRAIL +2 +.*\] +\+.*\] +2 +0\.\d{3}|^val/accuracy step 20 +GRAIL +2 ", text, re.M)
    assert re.search(r"Left out of the curves, since they ended before other runs: \S*GRAIL_2\.", text)


def test_seeds_that_differ_alike_have_the_sign_flip_tests_p_value(tmp_path, capsys):
    runs = _curves(tmp_path, {"GRPO": [[0.5]] * 4, "GRAIL": [[0.75]] * 4})
    end = _row(compare_curves(read_curves(runs)[0], "GRPO"), part="end", method="GRAIL")
    assert (end["difference"], end["p"]) == (0.25, 2 / 2**4)
    assert np.isnan([end["difference_low"], end["detectable"], end["low"]]).all()
    alone = _said(capsys, *(run.given for run in runs if run.seed == 0))
    assert "One seed says nothing about other seeds, which may differ by more." in alone


@pytest.mark.parametrize(
    ("options", "differ"),
    [
        ({"data": {"class_path": "ArithmeticData", "init_args": {"num_val": 64}}}, r"`data.num_val` \(512, 64\)"),
        ({"model": {"sampling": {"temperature": 0.0}}}, "`evaluation.sampling` "),
        ({"data": config()["data"] | {"init_args": {"num_val": 512, "prompts_per_batch": 99}}}, "^$"),
    ],
)
def test_other_validations_are_refused_and_other_training_data_are_not(options, differ, tmp_path, capsys):
    one, two = make_run(tmp_path / "one", {0: 0.1}), make_run(tmp_path / "two", {0: 0.1}, seed=1, **options)
    other = other_validation(_runs(one, two))
    assert re.search(differ, other or "")
    if other:
        assert "since the validations are not the same" in refusal(capsys, report, f"A={one}", f"B={two}")


# The command and its formats.


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Two methods, a task and two datasets with hostile names, and hostile responses."""
    folder = tmp_path_factory.mktemp("hostile")
    for number, method in enumerate([HOSTILE[0], HOSTILE[4]] * 2):
        sweep = {"method": method, "task": HOSTILE[2], "seed": number // 2}
        run = make_run(folder / f"r{number}", {0: 0.1, 10: 0.2 + 0.1 * number}, sweep)
        right = {HOSTILE[3]: answers(chances(9, 0.5), seed=number), HOSTILE[1]: A9}
        keep_samples(run / "test" / "samples", right, text=HOSTILE[number])
    return sorted(map(str, folder.iterdir()))


def _pictures(page):
    """The SVG of each learning curve, and the names in its legend."""
    found = re.findall(r'<svg viewBox="0 0 760 320".*?</svg>\n<ul class="legend">.*?</ul>', page, re.DOTALL)
    return [ElementTree.fromstring(f"<div>{one}</div>") for one in found]


def _places(element):
    return [tuple(map(float, place.split(","))) for place in element.get("points").split()]


def test_an_html_report_shows_the_learning_curves_with_their_intervals(tmp_path, capsys):
    """Figures and steps are linear in the places of the picture, whose ticks say which."""
    runs = [
        make_run(tmp_path / f"{method}_{seed}", {0: 0.2, 5: 0.2 + 0.1 * seed, 10: high}, seed=seed, credit=method)
        for method, high in (("GRPO", 0.6), ("<b>&amp;", 0.4))
        for seed in (range(3) if method == "GRPO" else range(1))
    ]
    page = tmp_path / "report.html"
    _said(capsys, *runs, "--output", page)
    text = page.read_text()
    assert not re.search(r"<script|https?://|style=|<b>", text), "one file, no program, and names are text"
    assert "prefers" in text or "light-dark(" in text
    (picture,) = _pictures(text)
    lines = [_places(line) for line in picture.iter("polyline")]
    (band,) = [_places(area) for area in picture.iter("polygon")]
    labels = {
        (of.get("text-anchor"), of.text): (float(of.get("x")), float(of.get("y")) - 4) for of in picture.iter("text")
    }
    left, right = labels["middle", "0"][0], labels["middle", "10"][0]
    low, high = labels["end", "0.2"][1], labels["end", "0.6"][1]
    for line, values in zip(lines, ([0.2, 0.3, 0.6], [0.2, 0.2, 0.4]), strict=True):
        assert [x for x, _ in line] == pytest.approx([left, (left + right) / 2, right], abs=0.1)
        assert [y for _, y in line] == pytest.approx([low + (v - 0.2) / 0.4 * (high - low) for v in values], abs=0.1)
    # Three figures have Student's interval, and equal ones or a single one have none.
    half = scipy.stats.t.ppf(0.975, 2) * np.std([0.2, 0.3, 0.4], ddof=1) / math.sqrt(3)
    top, bottom = (low + (v - 0.2) / 0.4 * (high - low) for v in (0.3 + half, max(0.3 - half, 0)))
    assert [y for _, y in band] == pytest.approx([top, bottom], abs=0.2)
    assert next(item.text or item[0].tail for item in picture.iter("li")).strip() == "GRPO"
    assert "".join(picture.itertext()).count("seed") == 2 * 3 + 2


def test_an_html_report_without_curves_says_so(tmp_path, capsys):
    samples = keep_samples(tmp_path / "one", {"A": A9})
    _said(capsys, samples, "--output", tmp_path / "report.html")
    assert (
        "There is no learning curve: the training runs have left no val/accuracy"
        in (tmp_path / "report.html").read_text()
    )


def test_no_name_steers_a_terminal_or_breaks_a_table_of_markdown_html_or_csv(hostile, tmp_path, capsys):
    text = _said(capsys, *hostile)
    assert all(c.isprintable() or c == "\n" for c in text)
    assert r"\u202eright to left \x1b[31m | pipe" in text
    assert HOSTILE[0] in text
    assert "evaluated the same weights." in text
    for ending in ("md", "csv", "html"):
        _said(capsys, *hostile, "--output", tmp_path / "deep" / f"report.{ending}")
    markdown = (tmp_path / "deep" / "report.md").read_text()
    rows = [row for row in markdown.splitlines() if row.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {12}
    assert not re.search(r"(?<!\\)[<`*]|(?<!\\)\]\(", markdown)
    page = (tmp_path / "deep" / "report.html").read_text()
    assert not {"script", "img"} & set(re.findall(r"<(\w+)", page)), "names are text"
    rows = csv.DictReader(io.StringIO((tmp_path / "deep" / "report.csv").read_text()))
    assert {row["task"] for row in rows} == {"'=HYPERLINK(1)"}, "a spreadsheet must not compute a name"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent"], r"A run must be a folder, but got absent\. Give one"),
        (["sweep"], r"sweep/sweep\.json must be what a run or a sweep left, but got: \{'hello': 1\}"),
        (["empty"], r"empty must hold the samples of a test .* Run `grail-lightning test`"),
        (
            ["good", "--baseline=goood"],
            r"`--baseline` must be one of 'good', or .*, but got 'goood'\. Did you mean good\?",
        ),
        (["good", "--output=o.pdf"], r"`--output` must end in \.md or \.csv or \.html"),
        (["good", "uncurved"], r"All runs of a report must have samples, or none, but uncurved have none"),
        (["cut"], r"cut/samples must hold all 9 problems of A with 3 samples each, but it holds 8\."),
        (["broken"], r"broken/samples must be a folder of samples .*, but got JSONDecodeError"),
        (["damaged"], r"damaged/samples/rank_00000\.jsonl, line 3, must have the columns .* but has no `index`, "),
        (["uncurved"], r"Runs of a report must have samples, or a step of val/accuracy .* neither in uncurved\. Run"),
        (["A=late", "B=early"], r"Runs of a report must .*, but got neither in A=late, B=early\."),
    ],
)
def test_a_mistake_is_one_line(arguments, message, empty_folder, capsys):
    for name in ("good", "damaged", "broken", "cut"):
        keep_samples(empty_folder / name / "samples", {"A": A9})
    Path("broken/samples/evaluation.json").write_text("{")
    lines = Path("damaged/samples/rank_00000.jsonl").read_text().splitlines(keepends=True)
    Path("damaged/samples/rank_00000.jsonl").write_text("".join([*lines[:2], "{}\n", *lines[2:]]))
    Path("cut/samples/rank_00000.jsonl").write_text("".join(lines[:-1]))
    Path("empty").mkdir()
    for name, curve in (("uncurved", {0: math.nan}), ("early", {0: 0.1}), ("late", {9: 0.1})):
        make_run(empty_folder / name, curve)
    make_run(empty_folder / "sweep", {0: 0.1}, sweep={"hello": 1})
    assert re.match(rf"grail-lightning: error: .*{message}", refusal(capsys, report, *arguments))


def test_a_curve_has_no_points_of_steps_that_a_resumed_run_took_again(tmp_path):
    """It went on from an earlier checkpoint than its last one."""
    run = make_run(tmp_path / "run", {0: 0.1, 2: 0.2, 4: 0.3, 6: 0.4})
    # TensorBoard orders files by the second of their beginning, and those of one second by a number as text.
    (first,) = run.glob("events.out.tfevents.*")
    first.rename(run / "events.out.tfevents.1700000000.earlier")
    with SummaryWriter(str(run), filename_suffix=".later") as writer:
        writer.add_scalar("val/accuracy", 0.25, 4)
    assert read_scalars(run, "val/accuracy") == pytest.approx({0: 0.1, 2: 0.2, 4: 0.25})
