"""Which files are results, and how a figure and the reason of a missing one are found."""

import json

import pytest

from grail_lightning.app.benchmark.result import check_result, errors_of, figure, read_result, reason, worlds_of
from tests.app.benchmark.made import grail, references


def _changed(**others):
    return grail() | others


def _in_sums(**others):
    result = grail()
    result["worlds"]["sums"] |= others
    return result


def test_a_result_is_read_as_it_was_written(tmp_path):
    for number, result in enumerate([grail(), *references()]):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(result))
        assert read_result(file) == result


WRONG = {
    "another format": (_changed(format=2), "`format` of r.json must be 1, but got 2"),
    "no format": ({}, "`format` of r.json must be 1, but got None"),
    "no mapping": ([1], "r.json must be a mapping with `format`, but got list"),
    "a missing key": ({k: v for k, v in grail().items() if k not in ("seed", "oracle")}, "got no `seed`, `oracle`"),
    "another type": (_changed(seed="0"), "`seed` of r.json must be of type int, but got '0'"),
    "true for a number": (_changed(batches=True), "`batches` of r.json must be of type int, but got True"),
    "a world without figures": (_changed(worlds={"sums": {"rollouts": 8}}), "got no `auroc_rollout`, `auroc_forks`"),
    "a world of another type": (_changed(worlds={"sums": 3}), "must be null or have `rollouts`, .* but got 3"),
    "two numbers": (_in_sums(gain={"adam": [1.0, 0.9]}), r"`gain.adam` of `worlds.sums` of r.json .* \[1.0, 0.9\]"),
    "limits in the wrong order": (_in_sums(direction=[1.0, 1.1, 0.9]), r"`direction` .* but got \[1.0, 1.1, 0.9\]"),
    "a text for a number": (_in_sums(values={"wrong": ["a", 0, 1]}), "`values.wrong` .* must be .estimate, low, high."),
    "a number alone": (_in_sums(cost={"step": 1.2}), "`cost.step` of .* but got 1.2"),
    "a control": (_in_sums(controls={"Shuffled": {"gain": {"sgd": []}}}), r"`controls.Shuffled.gain.sgd` .* \[\]"),
    "training": (_in_sums(training={"over_training": [1]}), "`training.over_training` of"),
    "a baseline": (_in_sums(training={"beside_baseline": {"end": [1]}}), "`training.beside_baseline.end` of"),
    "an example without tokens": (_changed(examples=[{"world": "sums"}]), r"`examples\[0\]` .* but got no `prompt`"),
    "an example of another type": (_changed(examples=[3]), r"`examples\[0\]` of r.json must have .* but got 3"),
}


@pytest.mark.parametrize(("result", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_result_is_named_in_one_line(result, said):
    with pytest.raises(ValueError, match=said) as raised:
        check_result(result, "r.json")
    assert "\n" not in str(raised.value)


def test_examples_have_a_weight_for_each_token_and_steps_within_them():
    result = grail()
    result["examples"][0]["weights"].pop()
    with pytest.raises(ValueError, match=r"must have a weight for each of \d+ tokens, but got \d+"):
        check_result(result, "r.json")
    result = grail()
    result["examples"][1]["steps"][0]["stop"] = 999
    with pytest.raises(ValueError, match=r"`examples\[1\]` of r.json must have steps within \d+ tokens"):
        check_result(result, "r.json")


@pytest.mark.parametrize("text", ["{", "", '{"format": NaN}', "\xff"])
def test_a_file_that_is_no_json_is_named_in_one_line(tmp_path, text):
    file = tmp_path / "r.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"r.json must be the JSON of a result, but got .+\. Run `python -m"):
        read_result(file)


def test_figures_and_reasons_are_found_by_their_path():
    result = grail()
    assert worlds_of(result) == ["sums", "words", "code", "search"]
    assert errors_of(result, "search") == ["bad turn"]
    assert errors_of(result, "charts") == []
    assert figure(result, "sums", "gain", "adam").value == 0.9
    assert figure(result, "charts", "gain", "adam") is None
    assert figure(result, "code", "auroc_rollout", "misconception") is None
    assert figure(result, "sums", "no", "such", "path") is None
    assert reason(result, "code", "auroc_rollout", "misconception").startswith("No wrong rollout")
    assert reason(result, "code", "auroc_rollout", "slip") is None
    assert reason(result, "code", "training", "end").startswith("--train was given"), "a reason holds for what is below"
    assert reason(result, "charts").startswith("GRAIL explains an answer in a box")
