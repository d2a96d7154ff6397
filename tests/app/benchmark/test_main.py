"""The command: what it measures, writes and keeps, its mistakes, and methods whose outcome is known."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grail_lightning.app.benchmark import measure
from grail_lightning.app.benchmark.digest import digest_of
from grail_lightning.app.benchmark.main import main
from grail_lightning.app.benchmark.result import read_result
from grail_lightning.core.runtime.files import held


def figures_of(method, batches, options=()):
    outcome = measure.quality(method, options, "sums", batches, 0, lambda share: None)
    json.dumps(outcome, allow_nan=False)
    return outcome


@pytest.fixture
def methods(tmp_path, monkeypatch):
    """A folder with a module of a user's own methods, whose name is new in each test."""
    name = f"credits_{time.monotonic_ns()}"
    shutil.copy(Path(__file__).with_name("methods.py"), tmp_path / f"{name}.py")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_constant_is_uniform_credit(methods):
    outcome = figures_of(f"{methods}.Constant", 8)
    figures = outcome["figures"]
    assert outcome["reads"] == []
    assert not outcome["oracle"]
    assert figures["gain"] == {"sgd": [pytest.approx(1.0)] * 3, "adam": [pytest.approx(1.0)] * 3}
    assert figures["auroc_forks"]["slip"][0] == 0.5
    assert figures["blame"]["flawed"] == figures["blame"]["flawed_uniform"]
    assert figures["gain_beside_baseline"]["balanced"]["adam"] == [pytest.approx(0.0, abs=1e-6)] * 3
    assert [*figures["controls"]] == ["Shuffled"]  # It does not read rewards.
    assert {example["outcome"] for example in outcome["examples"]} == {"wrong", "right"}
    assert all(len(e["tokens"]) == len(e["weights"]) for e in outcome["examples"])
    kinds = {step["kind"] for example in outcome["examples"] for step in example["steps"]}
    assert {"slip", "misconception", "sound"} <= kinds


def test_who_asks_the_task_for_labels_is_an_oracle(methods):
    outcome = figures_of(f"{methods}.AsksTask", 2)
    assert outcome["oracle"]
    assert "labels" in outcome["reads"]
    assert outcome["figures"]["gain"] is None
    assert "at least 8 batches" in outcome["figures"]["reasons"]["gain"]


def test_a_bare_score_has_detection_alone():
    figures = figures_of("position", 2)["figures"]
    assert figures["auroc_rollout"]["slip"][0] > 0.9
    assert figures["gain"] is None
    assert "A bare score" in figures["reasons"]["gain"]


def test_where_a_method_does_not_apply_there_is_a_sentence_and_no_figure():
    outcome = figures_of("GiGPO", 2)
    assert outcome["figures"] is None
    assert "turns" in outcome["reason"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["NoSuchMethod"], "NoSuchMethod"),
        (["nowhere.Method"], "nowhere"),
        (["TreeAdvantage", "--credit.scales=2"], "scale"),
        (["TreeAdvantage", "--top=2"], "--credit, --control, --advantage"),
        (["GRAIL", "--batches=1000"], "batches"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--output", str(tmp_path), "--worlds", "sums"])
    assert end.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert message in lines[-1]
    assert lines[-1].startswith("grail-lightning: error: ")
    assert not [*tmp_path.glob("kept/*.json")]


def test_a_digest_changes_with_the_method_and_with_its_file(tmp_path, methods):
    subject = measure.subject_named(f"{methods}.Constant")
    before = digest_of([subject.method], batches=32)
    assert digest_of([subject.method], batches=32) == before
    assert digest_of([subject.method], batches=16) != before
    file = tmp_path / f"{methods}.py"
    file.write_text(file.read_text() + "\n# Another version.\n")
    assert digest_of([subject.method], batches=32) != before


def command(folder, *arguments):
    words = [sys.executable, "-m", "grail_lightning.benchmark", *arguments, "--worlds", "sums", "--output", "out"]
    path = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path}
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen(words, cwd=folder, env=environment, **how)


def test_the_command_writes_a_report_from_a_class_in_the_working_folder(tmp_path, methods):
    process = command(tmp_path, f"{methods}.Constant", "--batches=2")
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    result = read_result(tmp_path / "out" / "Constant.json")
    assert result["method"] == f"{methods}.Constant"
    assert result["worlds"]["sums"]["rollouts"] == 256
    assert result["worlds"]["sums"]["cost"]["forward_passes"] == pytest.approx(0.0, abs=1e-9)
    assert result["worlds"]["sums"]["reasons"]["training"] == "Give --train to train with it."
    assert re.search("uniform credit", " ".join(result["verdict"]))  # Two batches are too few for a gain.
    assert (tmp_path / "out" / "Constant.html").stat().st_size < 1_000_000
    assert result["verdict"][0] in out
    assert "USDT" not in err
    # The same command again measures nothing.
    kept = {file: file.stat().st_mtime_ns for file in (tmp_path / "out" / "kept").iterdir()}
    again = command(tmp_path, f"{methods}.Constant", "--batches=2")
    _, err = again.communicate(timeout=300)
    assert again.returncode == 0, err
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "out" / "kept").iterdir()} == kept


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished(tmp_path, methods):
    process = command(tmp_path, f"{methods}.RandomWeights", "--batches=32", "--jobs=1")
    kept = tmp_path / "out" / "kept"
    end = time.monotonic() + 500
    while time.monotonic() < end and not [*kept.glob("*.json")]:
        time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.search(r"Stopped. 1 of \d+ parts are kept; the same command goes on.", err)
    assert len([*kept.glob("*.json")]) == 1


@pytest.mark.slow
def test_random_weights_are_at_chance_and_gain_nothing(methods):
    figures = figures_of(f"{methods}.RandomWeights", 32)["figures"]
    for error in ("slip", "misconception"):
        _, low, high = figures["auroc_forks"][error]
        assert low - 0.02 < 0.5 < high + 0.02
    assert figures["gain"]["adam"][2] < 1.02
    assert abs(figures["direction"][0] - 1) < 0.05


@pytest.mark.slow
def test_the_negative_of_the_tree_is_below_chance_and_its_step_is_worse(methods):
    figures = figures_of(f"{methods}.Opposite", 32)["figures"]
    assert figures["auroc_forks"]["slip"][2] < 0.2
    assert figures["gain"]["adam"][2] < 1.0


def test_methods_of_one_call_have_different_names(tmp_path, methods, capsys):
    with pytest.raises(SystemExit):
        main([f"{methods}.Constant", "--against", f"{methods}.Constant", "--output", str(tmp_path)])
    assert "must have different names" in capsys.readouterr().err


def test_a_cost_that_does_not_apply_is_a_sentence():
    told = measure.cost("Resampled", [], "search", 0, lambda share: None)
    assert told["figures"] is None
    assert "one turn" in told["reasons"]["cost"]


def test_a_folder_in_use_names_the_option(tmp_path, capsys):
    with held(tmp_path), pytest.raises(SystemExit):
        main(["Uniform", "--worlds", "sums", "--output", str(tmp_path)])
    assert "give this run another folder: `--output`." in capsys.readouterr().err
