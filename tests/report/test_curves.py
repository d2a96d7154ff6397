"""Learning curves from real event files."""

import re

import numpy as np
import pytest
import scipy.stats

from grail_lightning.report.curves import compare_ends, other_validation, read_curves
from grail_lightning.report.methods import find_methods
from grail_lightning.report.runs import find_runs
from grail_lightning.report.sections import Options, make_section
from tests.report.made import config, make_run

VALUES = {"GRPO": [[0.1, 0.30, 0.40], [0.1, 0.25, 0.44], [0.1, 0.31, 0.42]]}
VALUES["GRAIL"] = [[0.1, 0.36, 0.50], [0.1, 0.30, 0.49], [0.1, 0.33, 0.55]]
STEPS = (0, 10, 20)


def _runs(folder, values=VALUES, **options):
    for method, seeds in values.items():
        for seed, curve in enumerate(seeds):
            points = dict(zip(STEPS, curve, strict=False))
            make_run(folder / f"{method}_{seed}", points, seed=seed, credit=method, **options)
    return find_methods(find_runs(sorted(map(str, folder.iterdir()), reverse=True)))


def test_a_curve_is_the_mean_over_seeds_with_students_band(tmp_path):
    curves = {curve.method: curve for curve in read_curves(_runs(tmp_path))}
    assert curves.keys() == VALUES.keys()
    assert curves["GRAIL"].steps == STEPS
    assert curves["GRAIL"].seeds == (0, 1, 2)
    for number, at in enumerate(curves["GRAIL"].band):
        seeds = np.array(VALUES["GRAIL"])[:, number]
        assert at.value == pytest.approx(seeds.mean(), abs=1e-6)
        if number:
            known = scipy.stats.ttest_1samp(seeds, 0).confidence_interval()
            assert (at.low, at.high) == pytest.approx((known.low, min(1.0, known.high)), abs=1e-6)


def test_ends_are_paired_over_seeds(tmp_path):
    ends = {end.method: end for end in compare_ends(read_curves(_runs(tmp_path)), "GRPO")}
    assert ends["GRPO"].difference is None
    found = ends["GRAIL"].difference
    one, two = (np.array(VALUES[name])[:, -1] for name in ("GRAIL", "GRPO"))
    known = scipy.stats.ttest_rel(one, two)
    assert ends["GRAIL"].step == 20
    assert found.value == pytest.approx((one - two).mean(), abs=1e-6)
    assert found.p_value == pytest.approx(known.pvalue, rel=1e-4)
    assert (found.low, found.high) == pytest.approx(tuple(known.confidence_interval()), abs=1e-6)
    assert ends["GRAIL"].corrected == found.p_value


def test_runs_with_other_seeds_are_compared_by_welchs_test(tmp_path):
    methods = _runs(tmp_path, {"GRPO": VALUES["GRPO"], "GRAIL": VALUES["GRAIL"][:2]})
    (found,) = [e.difference for e in compare_ends(read_curves(methods), "GRPO") if e.difference]
    one, two = np.array(VALUES["GRAIL"])[:2, -1], np.array(VALUES["GRPO"])[:, -1]
    assert found.p_value == pytest.approx(scipy.stats.ttest_ind(one, two, equal_var=False).pvalue, rel=1e-4)


def test_ends_are_compared_at_the_last_step_that_all_have(tmp_path):
    methods = _runs(tmp_path, {"GRPO": VALUES["GRPO"], "GRAIL": [v[:2] for v in VALUES["GRAIL"]]})
    ends = compare_ends(read_curves(methods), "GRPO")
    assert {end.step for end in ends} == {10}
    assert {round(end.estimate.value, 4) for end in ends} == {0.33, round(0.86 / 3, 4)}


def test_a_run_that_is_not_over_does_not_cut_the_others_short(tmp_path):
    values = {"GRPO": VALUES["GRPO"], "GRAIL": [*VALUES["GRAIL"][:2], VALUES["GRAIL"][2][:2]]}
    section = make_section(_runs(tmp_path, values), Options(baseline="GRPO"))
    assert {(end.method, end.seeds, end.step) for end in section.ends} == {("GRPO", 3, 20), ("GRAIL", 2, 20)}
    (note,) = [note for note in section.notes if "Left out" in note]
    assert note.endswith("GRAIL_2.")


def test_one_seed_has_a_curve_and_no_interval(tmp_path):
    ends = compare_ends(
        read_curves(_runs(tmp_path, {"GRPO": VALUES["GRPO"][:1], "GRAIL": VALUES["GRAIL"][:1]})), "GRPO"
    )
    assert [end.difference for end in ends] == [None, None]
    assert all(np.isnan(end.estimate.low) for end in ends)


def test_seeds_that_differ_alike_have_the_sign_flip_tests_p_value(tmp_path):
    methods = _runs(tmp_path, {"GRPO": [[0.5]] * 4, "GRAIL": [[0.75]] * 4})
    (found,) = [e.difference for e in compare_ends(read_curves(methods), "GRPO") if e.difference]
    assert found.p_value == 2 / 2**4


def test_a_run_without_the_curve_is_left_out(tmp_path):
    _runs(tmp_path)
    make_run(tmp_path / "other", {}, credit="Random")
    found = find_methods(find_runs([str(tmp_path / name) for name in ("GRPO_0", "other")]))
    assert [curve.method for curve in read_curves(found)] == ["GRPO_0"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"data": {"class_path": "ArithmeticData", "init_args": {"num_val": 64}}}, r"`data.num_val` \(512, 64\)"),
        ({"evaluation": {"num_samples": 4, "sampling": None}}, r"`evaluation.num_samples` \(1, 4\)"),
        ({"model": {"sampling": {"temperature": 0.0}}}, r"`evaluation.sampling` "),
    ],
)
def test_other_validations_are_noticed(options, said, tmp_path):
    make_run(tmp_path / "one", {0: 0.1})
    make_run(tmp_path / "two", {0: 0.1}, **options)
    methods = find_methods(find_runs([str(tmp_path / "one"), str(tmp_path / "two")]))
    assert re.search(said, other_validation(methods))


def test_other_training_data_and_rewards_are_no_other_validation(tmp_path):
    task = {"class_path": "MathTask", "init_args": {"compare": "math", "rewards": None}}
    data = config()["data"]["init_args"] | {"task": task}
    make_run(tmp_path / "one", {0: 0.1}, data={"class_path": "ArithmeticData", "init_args": data})
    changed = {"prompts_per_batch": 99, "task": {**task, "init_args": {"compare": "math", "rewards": ["format"]}}}
    make_run(tmp_path / "two", {0: 0.1}, data={"class_path": "ArithmeticData", "init_args": data | changed})
    methods = find_methods(find_runs([str(tmp_path / "one"), str(tmp_path / "two")]))
    assert len(methods) == 2
    assert other_validation(methods) is None
