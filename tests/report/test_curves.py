"""Learning curves from real event files."""

import re

import numpy as np
import pytest
import scipy.stats

from grail_lightning.report.curves import compare_ends, other_validation, read_curves
from grail_lightning.report.methods import find_methods
from grail_lightning.report.runs import find_runs
from grail_lightning.report.sections import Options, make_section, tables
from tests.report.made import answers, chances, config, keep_samples, make_run

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


def test_a_method_with_fewer_seeds_is_compared_over_the_seeds_that_both_have(tmp_path):
    section = make_section(
        _runs(tmp_path, {"GRPO": VALUES["GRPO"], "GRAIL": VALUES["GRAIL"][:2]}), Options(baseline="GRPO")
    )
    ends = {end.method: end for end in section.ends}
    one, two = np.array(VALUES["GRAIL"])[:2, -1], np.array(VALUES["GRPO"])[:, -1]
    found = ends["GRAIL"].difference
    assert found.value == pytest.approx((one - two[:2]).mean(), abs=1e-6)
    assert found.p_value == pytest.approx(scipy.stats.ttest_rel(one, two[:2]).pvalue, rel=1e-4)
    assert (ends["GRAIL"].seeds, ends["GRAIL"].pairs, ends["GRPO"].seeds) == (2, 2, 3)
    assert ends["GRPO"].estimate.value == pytest.approx(two.mean(), abs=1e-6), "of all of its seeds"
    assert "Differences over the 2 seeds that the method and the baseline both have: GRAIL." in section.notes


def test_methods_without_two_seeds_in_common_are_compared_by_welchs_test(tmp_path):
    for method, seeds in (("GRPO", (0, 1, 2)), ("GRAIL", (2, 3, 4))):
        for seed, curve in zip(seeds, VALUES[method], strict=True):
            make_run(tmp_path / f"{method}_{seed}", dict(zip(STEPS, curve, strict=True)), seed=seed, credit=method)
    section = make_section(find_methods(find_runs(sorted(map(str, tmp_path.iterdir())))), Options(baseline="GRPO"))
    (found,) = [end.difference for end in section.ends if end.difference]
    one, two = (np.array(VALUES[name])[:, -1] for name in ("GRAIL", "GRPO"))
    assert found.p_value == pytest.approx(scipy.stats.ttest_ind(one, two, equal_var=False).pvalue, rel=1e-4)
    (note,) = [note for note in section.notes if note.startswith("Not paired over seeds")]
    assert note.endswith(": GRAIL.")


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


def test_runs_that_a_sweep_has_not_finished_do_not_cut_other_methods_short(tmp_path):
    for number, (method, state, curve) in enumerate(
        [("GRPO", "finished", VALUES["GRPO"][0]), ("GRAIL", "interrupted", [0.1]), ("OAR-G", "finished", [0.1, 0.4])]
    ):
        sweep = {"method": method, "task": "sums", "seed": 0, "state": state}
        make_run(tmp_path / f"r{number}", dict(zip(STEPS, curve, strict=False)), sweep, credit=method)
    section = make_section(find_methods(find_runs(sorted(map(str, tmp_path.iterdir())))), Options(baseline="GRAIL"))
    assert {(end.method, end.step) for end in section.ends} == {("GRPO", 10), ("OAR-G", 10)}
    said = " ".join(section.notes)
    assert re.search(r"the sweep has not finished them: \S*r1\.", said)
    assert "compared at step 10, the last one that all methods have; there are later ones of GRPO." in said
    assert "The baseline is GRPO: GRAIL has no curve here." in said
    assert "One seed has no interval and no difference over seeds: GRPO; OAR-G." in said


def test_seeds_of_one_name_with_other_validations_are_refused(tmp_path):
    make_run(tmp_path / "one", {0: 0.1})
    make_run(tmp_path / "two", {0: 0.1}, seed=1, data={"class_path": "ArithmeticData", "init_args": {"num_val": 64}})
    methods = find_methods(find_runs([f"mine={tmp_path / name}" for name in ("one", "two")]))
    assert len(methods) == 1
    with pytest.raises(ValueError, match=r"Learning curves can be compared only .* `data.num_val` \(512, 64\)"):
        make_section(methods, Options())


def test_tests_of_one_training_are_said_to_have_one_curve(tmp_path):
    trained = make_run(tmp_path / "trained", {0: 0.1, 10: 0.3})
    (trained / "export").mkdir()
    for name, temperature in (("one", 1.0), ("two", 1.0)):
        model = {"policy": str(trained / "export"), "checkpoint": None, "digest": name, "step": 3}
        right = {"A": answers(chances(9, 0.5), seed=int(temperature))}
        keep_samples(tmp_path / name / "test" / "samples", right, model=model)
    methods = find_methods(find_runs([f"{name}={tmp_path / name}" for name in ("one", "two")]))
    (note,) = [note for note in make_section(methods, Options()).notes if "one training" in note]
    assert "so that their val/accuracy in training is one" in note


def test_one_seed_has_a_curve_and_no_interval(tmp_path):
    ends = compare_ends(
        read_curves(_runs(tmp_path, {"GRPO": VALUES["GRPO"][:1], "GRAIL": VALUES["GRAIL"][:1]})), "GRPO"
    )
    assert [end.difference for end in ends] == [None, None]
    assert all(np.isnan(end.estimate.low) for end in ends)


def test_seeds_that_differ_alike_have_the_sign_flip_tests_p_value(tmp_path):
    methods = _runs(tmp_path, {"GRPO": [[0.5]] * 4, "GRAIL": [[0.75]] * 4})
    section = make_section(methods, Options(baseline="GRPO"))
    (found,) = [end for end in section.ends if end.difference]
    assert found.difference.p_value == 2 / 2**4
    assert np.isnan([found.difference.low, found.difference.high, found.detectable, found.estimate.low]).all()
    ends = next(table for table in tables(section) if "at step" in table.title)
    assert next(row for row in ends.rows if row[0] == "GRAIL") == [
        "GRAIL",
        "4",
        "0.750",
        "+0.250",
        "0.125",
        "0.125",
        "",
    ]


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
