"""Which runs a report finds, and which belong to one method."""

import pytest

from grail_lightning.report.methods import find_methods
from grail_lightning.report.runs import find_runs
from tests.report.made import answers, chances, keep_samples, make_run

RIGHT = {"A": answers(chances(4, 0.5))}


def _names(*given):
    return {method.name: method.seeds for method in find_methods(find_runs([str(argument) for argument in given]))}


def test_a_run_its_stage_and_its_samples_are_the_same_run(tmp_path):
    run = make_run(tmp_path / "a", {0: 0.1})
    keep_samples(run / "test" / "samples", RIGHT)
    found = [find_runs([str(place)]) for place in (run, run / "test", run / "test" / "samples")]
    assert [one.samples for (one,) in found] == [run / "test" / "samples"] * 3
    assert {one.folder.resolve() for (one,) in found} == {run}
    assert {one.seed for (one,) in found} == {0}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["{a}", "{a}"], r"given once, but \S*a is given twice\. Leave one out"),
        (["{a}", "{a}/test"], r"given once, but \S*a and \S*a/test are one\."),
        (["A={a}", "B={a}"], r"given once, but A=\S*a and B=\S*a are one\."),
    ],
)
def test_a_run_that_is_given_twice_is_refused(given, said, tmp_path):
    run = make_run(tmp_path / "a", {0: 0.1})
    keep_samples(run / "test" / "samples", RIGHT)
    with pytest.raises(ValueError, match=said):
        find_runs([argument.format(a=run) for argument in given])


def test_a_test_comes_before_a_validation_and_the_last_validation_counts(tmp_path):
    run = make_run(tmp_path / "a")
    for stage in ("validation/step_00000010", "validation/step_00000200"):
        keep_samples(run / stage / "samples", RIGHT)
    (found,) = find_runs([str(run)])
    assert found.samples.parent.name == "step_00000200"
    keep_samples(run / "validate" / "samples", RIGHT)
    assert find_runs([str(run)])[0].samples.parent.name == "validate"
    keep_samples(run / "test" / "samples", RIGHT)
    assert find_runs([str(run)])[0].samples.parent.name == "test"


def test_configs_that_differ_in_seed_and_folder_are_one_method(tmp_path):
    for credit in ("GRAIL", "Uniform"):
        for seed in (1, 0, 2):
            make_run(tmp_path / f"{credit}_seed{seed}", {0: 0.1}, seed=seed, name=f"{credit}_{seed}", credit=credit)
    assert _names(*sorted(tmp_path.iterdir())) == {"GRAIL": (0, 1, 2), "Uniform": (0, 1, 2)}


def test_any_other_option_makes_another_method(tmp_path):
    make_run(tmp_path / "one", {0: 0.1})
    make_run(tmp_path / "two", {0: 0.1}, seed=1, evaluation={"num_samples": 2, "sampling": None})
    assert _names(tmp_path / "one", tmp_path / "two") == {"one": (0,), "two": (1,)}


def test_a_sweep_says_what_belongs_together(tmp_path):
    for number, seed in enumerate((3, 4)):
        # The configs would say otherwise.
        sweep = {"method": "GRAIL", "task": "sums", "seed": seed}
        make_run(tmp_path / f"r{number}", {0: 0.1}, sweep, credit=str(number))
    make_run(tmp_path / "other", {0: 0.1}, {"method": "GRAIL", "task": "words", "seed": 3})
    make_run(tmp_path / "point", {0: 0.1}, {"method": "GRAIL", "task": "sums", "seed": 3, "point": {"lr": 0.1}})
    found = find_methods(find_runs(sorted(map(str, tmp_path.iterdir()))))
    assert {(m.task, m.name): m.seeds for m in found} == {
        ("sums", "GRAIL"): (3, 4),
        ("words", "GRAIL"): (3,),
        ("sums", "GRAIL, lr=0.1"): (3,),
    }


def test_the_point_that_a_sweep_chose_is_not_a_part_of_the_name(tmp_path):
    """Each method, on each task, has a rate of its own."""
    for number, (method, task, rate) in enumerate([("GRPO", "a", 0.1), ("GRAIL", "a", 0.2), ("GRPO", "b", 0.3)]):
        sweep = {"method": method, "task": task, "seed": 0, "point": {"model.optimizer.lr": rate}}
        make_run(tmp_path / f"r{number}", {0: 0.1}, sweep)
    found = find_methods(find_runs(sorted(map(str, tmp_path.iterdir()))))
    assert [(m.task, m.name, m.runs[0].point) for m in found] == [
        ("a", "GRPO", "lr=0.1"),
        ("a", "GRAIL", "lr=0.2"),
        ("b", "GRPO", "lr=0.3"),
    ]


def test_runs_of_one_task_are_beside_runs_of_none_and_those_of_several_tasks_are_not(tmp_path):
    for name, task in (("one", "a"), ("two", "b")):
        make_run(tmp_path / name, {0: 0.1}, {"method": "GRPO", "task": task, "seed": 0})
    make_run(tmp_path / "three", {0: 0.1})
    one, two, three = (str(tmp_path / name) for name in ("one", "two", "three"))
    assert [method.task for method in find_methods(find_runs([one, three]))] == ["", ""]
    assert [method.task for method in find_methods(find_runs([one, two]))] == ["a", "b"]
    with pytest.raises(
        ValueError, match=r"within a task of a sweep, but \S*three belongs to none, and others to a, b\."
    ):
        find_methods(find_runs([one, two, three]))


def test_runs_that_chose_a_point_are_reported_apart(tmp_path):
    for name, seed, more in (("runs", 0, {}), ("runs_choosing", 9, {"choosing": True})):
        make_run(tmp_path / name / "r", {0: 0.1}, {"method": "A", "task": "a", "seed": seed, "point": {"lr": 1}} | more)
    for name in ("choice__A__a.json", "choice.json"):  # The second is that of earlier versions.
        (tmp_path / "runs_choosing" / name).write_text("{}")
    assert _names(*sorted((tmp_path / "runs_choosing").iterdir())) == {"A": (9,)}, "without the files of choices"
    with pytest.raises(
        ValueError, match=r"must not be reported beside others, .* \S*runs_choosing/r is one and \S*runs/r"
    ):
        _names(tmp_path / "runs" / "r", tmp_path / "runs_choosing" / "r")


def test_a_name_given_by_the_user_comes_first(tmp_path):
    for number in range(3):
        make_run(tmp_path / f"r{number}", {0: 0.1}, seed=number, credit=str(number))
    given = [f"mine={tmp_path / 'r0'}", f"mine={tmp_path / 'r1'}", tmp_path / "r2"]
    assert _names(*given) == {"mine": (0, 1), "r2": (2,)}
    make_run(tmp_path / "a=b", {0: 0.1}, seed=9)
    assert _names(tmp_path / "a=b") == {"a=b": (9,)}, "a folder may have = in its name"


def test_methods_of_one_name_are_told_apart(tmp_path):
    for parent in ("x", "y"):
        make_run(tmp_path / parent / "run", {0: 0.1}, credit=parent)
    assert _names(tmp_path / "x" / "run", tmp_path / "y" / "run") == {"run": (0,), "run (2)": (0,)}


@pytest.mark.parametrize("by", ["checkpoint", "policy"])
def test_an_evaluation_elsewhere_belongs_to_the_run_that_trained_its_policy(by, tmp_path):
    """`test --config eval.yaml --model.policy=RUN/export`, each in a folder of its own."""
    for seed in (0, 1):
        trained = make_run(tmp_path / f"trained_{seed}", {0: 0.1}, seed=seed)
        (trained / "export").mkdir()
        (trained / "checkpoints").mkdir()
        (trained / "checkpoints" / "best.ckpt").touch()
        file = trained / ("export" if by == "policy" else "checkpoints/best.ckpt")
        place = tmp_path / f"evaluated_{seed}"
        place.mkdir()
        (place / "config_test.yaml").write_text(f"seed_everything: 7\nmodel: {{policy: {file}}}\n")
        model = {"policy": "arithmetic", "checkpoint": None, "digest": str(seed), "step": 3} | {by: str(file)}
        keep_samples(place / "test" / "samples", RIGHT, model=model)
    assert _names(tmp_path / "evaluated_0", tmp_path / "evaluated_1") == {"evaluated": (0, 1)}
    assert find_runs([str(tmp_path / "evaluated_1")])[0].events == tmp_path / "trained_1", "its learning curve, too"


def test_runs_without_a_config_are_methods_of_their_own(tmp_path):
    for name in ("a", "b"):
        keep_samples(tmp_path / name / "samples", RIGHT)
    assert set(_names(tmp_path / "a", tmp_path / "b")) == {"a", "b"}


def test_the_same_seed_twice_is_refused(tmp_path):
    for number in range(2):
        make_run(tmp_path / f"r{number}", {0: 0.1}, seed=5)
    with pytest.raises(ValueError, match=r"must have different seeds, but .*r0 and .*r1 .* both have 5. Leave one out"):
        _names(tmp_path / "r0", tmp_path / "r1")
