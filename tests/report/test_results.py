"""Figures and comparisons of kept samples."""

import math

import numpy as np
import pytest

from grail_lightning.evaluation.comparison import difference, estimate
from grail_lightning.evaluation.statistics import difference_interval, holm, mean_interval
from grail_lightning.report.methods import find_methods
from grail_lightning.report.results import compared, described, read_evaluated
from grail_lightning.report.runs import find_runs
from tests.report.made import SAMPLING, answers, chances, keep_samples, study


def _evaluated(*given, common=False):
    return read_evaluated(find_methods(find_runs([str(argument) for argument in given])), common=common)


def _line(lines, dataset, method, figure):
    (found,) = [line for line in lines if (line.dataset, line.method, line.figure) == (dataset, method, figure)]
    return found


def test_figures_are_those_of_the_samples(tmp_path):
    right = {"A": answers(chances(40, 0.4), 4, 1), "B": answers(chances(70, 0.8), 4, 2)}
    keep_samples(tmp_path / "one", right)
    lines = compared(_evaluated(tmp_path / "one"), "one", [2])
    shares = {name: values.mean(1) for name, values in right.items()}
    noise = {name: share * (1 - share) / 4 for name, share in shares.items()}
    for name in "AB":
        found = _line(lines, name, "one", "acc@4")
        assert found.problems == len(right[name])
        assert found.estimate.value == pytest.approx(shares[name].mean())
        assert (found.estimate.low, found.estimate.high) == pytest.approx(mean_interval(shares[name], noise[name]))
    # pass@2 of c right ones of 4: 1 - C(4 - c, 2) / 6.
    passed = [1 - math.comb(4 - c, 2) / 6 for c in right["A"].sum(1)]
    assert _line(lines, "A", "one", "pass@2").estimate.value == pytest.approx(np.mean(passed))
    simple, weighted = (_line(lines, name, "one", "acc@4").estimate for name in ("simple average", "weighted by size"))
    assert simple.value == pytest.approx((shares["A"].mean() + shares["B"].mean()) / 2)
    assert weighted.value == pytest.approx(np.concatenate(list(shares.values())).mean())
    known = estimate([s[:, None] for s in shares.values()], [n[:, None] for n in noise.values()], [40 / 110, 70 / 110])
    assert (weighted.low, weighted.high) == pytest.approx((known.low, known.high))


def test_a_majority_vote_is_that_of_the_predictions(tmp_path):
    """Right samples answer 1, wrong ones 2: of three votes two are the majority."""
    right = {"A": answers(chances(60, 0.5), 3, 1)}
    keep_samples(tmp_path / "one", right)
    methods = find_methods(find_runs([str(tmp_path / "one")]))
    lines = compared(read_evaluated(methods, common=False, votes=True), "one", maj_at=[1, 3])
    assert _line(lines, "A", "one", "maj@3").estimate.value == pytest.approx((right["A"].sum(1) >= 2).mean())
    assert _line(lines, "A", "one", "maj@1").estimate.value == pytest.approx(right["A"].mean())


def test_one_dataset_needs_no_average(tmp_path):
    keep_samples(tmp_path / "one", {"A": answers(chances(9, 0.5))})
    assert [line.dataset for line in compared(_evaluated(tmp_path / "one"), "one", [])] == ["A"]


def test_what_responses_are_like(tmp_path):
    right = {"A": answers(chances(40, 0.4), 3, 1)}
    keep_samples(tmp_path / "one", right)
    lines = described(_evaluated(tmp_path / "one"))
    # See `made._sample`.
    lengths = np.array([[10 + k % 5 + j for j in range(3)] for k in range(40)])
    assert _line(lines, "A", "one", "tokens").estimate.value == pytest.approx(lengths.mean())
    found = _line(lines, "A", "one", "tokens").estimate
    half = 1.96 * lengths.mean(1).std(ddof=1) / math.sqrt(40)
    assert found.high - found.low == pytest.approx(2 * half, rel=0.1)
    assert _line(lines, "A", "one", "truncated").estimate.value == pytest.approx(0.25)
    missing = (~right["A"][:, 0]).sum() / 120
    assert _line(lines, "A", "one", "no answer").estimate.value == pytest.approx(missing)


def test_a_known_difference_is_recovered(tmp_path):
    """The second run solves the problems of the first one, and a tenth of the others."""
    base = answers(chances(300, 0.5), 1, 1)
    better = base.copy()
    better[~base[:, 0]] = (np.random.default_rng(0).random(((~base[:, 0]).sum(), 1))) < 0.1
    keep_samples(tmp_path / "base", {"A": base})
    keep_samples(tmp_path / "better", {"A": better}, order=-1)
    lines = compared(_evaluated(tmp_path / "base", tmp_path / "better"), "base", [])
    found = _line(lines, "A", "better", "acc@1")
    d = better[:, 0].astype(float) - base[:, 0]
    assert found.difference.value == pytest.approx(d.mean())
    assert (found.difference.low, found.difference.high) == pytest.approx(difference_interval(d, np.zeros(300)))
    assert found.difference.p_value == pytest.approx(2 / 2 ** int(d.sum()))
    assert found.corrected == found.difference.p_value
    assert _line(lines, "A", "base", "acc@1").difference is None


def test_pairs_are_the_same_problems_in_whatever_order_and_equal_problems_are_counted(tmp_path):
    right = answers(chances(50, 0.5))
    keep_samples(tmp_path / "one", {"A": right})
    keep_samples(tmp_path / "two", {"A": right}, order=-1)
    found = _line(compared(_evaluated(tmp_path / "one", tmp_path / "two"), "one", []), "A", "two", "acc@3")
    assert found.difference.value == 0
    assert found.difference.p_value == 1


def test_seeds_are_columns_of_one_table_and_are_paired(tmp_path):
    given = study(tmp_path, {"GRPO": 0.0, "GRAIL": 0.1}, seeds=3)
    evaluated = _evaluated(*given)
    lines = compared(evaluated, "GRPO", [])
    tables = {
        name: [np.stack([r.correct.mean(1) for r in seeds], 1) for seeds in datasets.values()]
        for name, datasets in evaluated.responses.items()
    }
    noises = [(a * (1 - a) / 3, b * (1 - b) / 3) for a, b in zip(tables["GRAIL"], tables["GRPO"], strict=True)]
    known = difference(tables["GRAIL"], tables["GRPO"], noises, [0.5, 0.5], paired_seeds=True)
    found = _line(lines, "simple average", "GRAIL", "acc@3").difference
    for name in ("value", "low", "high", "p_value"):
        assert getattr(found, name) == pytest.approx(getattr(known, name))
    assert found.seeds.df == 2


def test_seeds_that_only_one_method_has_are_left_out_of_the_difference(tmp_path):
    given = study(tmp_path, {"GRPO": 0.0, "GRAIL": 0.1}, seeds=3)
    fewer = _line(compared(_evaluated(*given[1:]), "GRPO", []), "simple average", "GRAIL", "acc@3")
    same = _line(compared(_evaluated(*given[1:3], *given[4:]), "GRPO", []), "simple average", "GRAIL", "acc@3")
    assert (fewer.seeds, fewer.pairs) == (3, 2)
    assert fewer.difference == same.difference
    assert fewer.estimate != same.estimate, "its own figure is of all of its seeds"
    alone = _line(compared(_evaluated(*given[:4]), "GRPO", []), "simple average", "GRAIL", "acc@3")
    assert (alone.seeds, alone.pairs, alone.difference.seeds) == (1, 1, None)
    apart = _line(compared(_evaluated(*given[:2], given[5]), "GRPO", []), "simple average", "GRAIL", "acc@3")
    assert apart.pairs is None


def test_each_average_is_a_family_and_the_datasets_together_are_one(tmp_path):
    given = study(tmp_path, {"GRPO": 0.0, "GRAIL": 0.1, "OAR-G": 0.03}, seeds=2)
    lines = compared(_evaluated(*given), "GRPO", [])
    for members in (
        [line for line in lines if not line.average and line.difference],
        [line for line in lines if line.dataset == "simple average" and line.difference],
        [line for line in lines if line.dataset == "weighted by size" and line.difference],
    ):
        assert len(members) in (2, 4)
        assert [line.corrected for line in members] == holm([line.difference.p_value for line in members])
        assert [line.detectable for line in members] == [line.difference.detectable(len(members)) for line in members]


def test_a_part_of_a_dataset_is_said(tmp_path):
    keep_samples(tmp_path / "one", {"A": answers(chances(20, 0.5)), "B": answers(chances(30, 0.5))}, first={"A": 20})
    lines = compared(_evaluated(tmp_path / "one"), "one", [])
    assert list(dict.fromkeys(line.dataset for line in lines))[:2] == ["A (first 20)", "B"]


A20, A30 = answers(chances(20, 0.5)), answers(chances(30, 0.5))


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"sampling": SAMPLING | {"temperature": 1.0}}, r"`sampling.temperature` \(0.6, 1.0\)"),
        ({"grading": {"A": {"compare": "text"}}}, r"`grading of A` \(\{'compare': 'math'\}, \{'compare': 'text'\}\)"),
        ({"datasets": {"A": A20, "B": A20}}, r"the problems of B \(none and other 20\).*--common"),
        (
            {"datasets": {"A": A30}, "first": {"A": 30}},
            r"the problems of A \(20 and other 30, the first 30 rows\).*--common",
        ),
        ({"datasets": {"A": answers(chances(20, 0.5), 2)}}, r"`num_samples` \(3, 2\)"),
    ],
)
def test_other_problems_or_settings_are_refused(facts, said, tmp_path):
    keep_samples(tmp_path / "one", {"A": A20})
    keep_samples(tmp_path / "two", **({"datasets": {"A": A20}} | facts))
    with pytest.raises(ValueError, match=r"one and \S*two differ in " + said):
        _evaluated(tmp_path / "one", tmp_path / "two")
    if "--common" not in said:
        with pytest.raises(ValueError, match=said):
            _evaluated(tmp_path / "one", tmp_path / "two", common=True)


def test_common_problems_are_compared_on_demand(tmp_path):
    keep_samples(tmp_path / "one", {"A": A20, "B": A20})
    keep_samples(tmp_path / "two", {"A": A30})
    lines = compared(_evaluated(tmp_path / "one", tmp_path / "two", common=True), "one", [])
    assert {(line.dataset, line.problems) for line in lines} == {("A", 20)}
    assert _line(lines, "A", "two", "acc@3").estimate.value == pytest.approx(A30[:20].mean())
    lines = compared(_evaluated(tmp_path / "two", tmp_path / "one", common=True), "two", [])
    assert {line.dataset for line in lines} == {"A (20 in common)"}


def test_no_common_problem_is_refused(tmp_path):
    keep_samples(tmp_path / "one", {"A": A20})
    keep_samples(tmp_path / "two", {"B": A20})
    with pytest.raises(ValueError, match="must have problems in common"):
        _evaluated(tmp_path / "one", tmp_path / "two", common=True)


def test_an_evaluation_that_is_not_complete_is_refused_unless_common_problems_are_asked_for(tmp_path):
    keep_samples(tmp_path / "one", {"A": A20})
    file = tmp_path / "one" / "rank_00000.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:31]) + lines[31][:20])
    with pytest.raises(ValueError, match=r"must hold all 20 problems of A with 3 samples each, but it holds 10\."):
        _evaluated(tmp_path / "one")
    (line,) = compared(_evaluated(tmp_path / "one", common=True), "one", [])
    assert (line.problems, line.estimate.value) == (10, pytest.approx(A20[:10].mean()))
    assert line.dataset == "A (10 in common)"
