"""The training of a method beside uniform credit and a lower baseline: runs of one step in a short study."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from grail_lightning.app.benchmark import recorded as recorded_runs
from grail_lightning.app.benchmark import training
from grail_lightning.app.benchmark.recorded import FIRST_BATCH, settings_of
from grail_lightning.app.benchmark.training import ARMS, Request, check, content_of, estimate, train
from grail_lightning.app.cli.app import FitOptions
from grail_lightning.app.results.differences import CURVE, read_scalars
from grail_lightning.app.sweep import runs_of
from tests.sweep_files import OPTIONS, fork_runs

CONFIGS = Path(__file__).parents[3] / "configs"
RATES = [0.1, 1e-4]  # The first one ruins the policy.


@pytest.fixture
def short(monkeypatch, tmp_path):
    """A world `short` with a study of one step; the package's configs are a copy."""
    configs = tmp_path / "package"
    (configs / "study").mkdir(parents=True)
    shutil.copy(CONFIGS / "quickstart.yaml", configs)
    study = {"config": "configs/quickstart.yaml", "options": OPTIONS, "tasks": {"task": {}}, "methods": {}}
    study |= {"grid": {"model.optimizer.lr": RATES}, "choose": {"seeds": [100], "by": CURVE, "statistic": "mean"}}
    (configs / "study" / "short.yaml").write_text(yaml.safe_dump(study))
    monkeypatch.setattr(training, "CONFIGS", (configs,))
    monkeypatch.setattr(training, "SETTINGS", {"short": training.Setting("short", "task", 10.0)})
    monkeypatch.setattr(recorded_runs, "FILE", tmp_path / "training.json")
    recorded_runs.recorded.cache_clear()
    (tmp_path / "training.json").write_text('{"worlds": {}}')
    yield configs
    recorded_runs.recorded.cache_clear()


def record(file, arms):
    """Write the finished runs of both arms, and their settings, as the package's data."""
    runs, starts = {}, {}
    every = [json.loads(path.read_text()) | {"folder": path.parent} for path in arms.rglob("sweep.json")]
    common = [
        given for given in every[0]["arguments"] if given.startswith("--config") or given[2:].split("=")[0] in OPTIONS
    ]
    for run in every:
        given = [option for option in run["arguments"] if option.startswith(("--model.credit", "--model.advantage"))]
        given.append(f"--model.optimizer.lr={run['point']['model.optimizer.lr']:g}")
        accuracy, first = (read_scalars(run["folder"], tag) for tag in (CURVE, FIRST_BATCH))
        runs.setdefault(" ".join(given), {})[run["seed"]] = {k: round(v, 6) for k, v in accuracy.items()}
        starts[run["seed"]] = [round(accuracy[0], 6), round(min(first.items())[1], 6)]
    settings = settings_of(FitOptions().parse(every[0]["arguments"]).as_dict())
    world = {"common": common, "settings": settings, "starts": starts, "runs": runs}
    file.write_text(json.dumps({"worlds": {"short": world}}))
    recorded_runs.recorded.cache_clear()


def test_a_method_is_trained_at_its_best_rate_beside_both_arms(short, tmp_path, monkeypatch):
    fork_runs(monkeypatch)
    how = {"method": "GRAIL", "options": ["--credit.std=0.8"], "worlds": ["short"], "seeds": 2}
    first = Request(**how, folder=tmp_path / "GRAIL", jobs=2)
    assert estimate(first) == (3 * 2 + 3 * 2) * 10 / 2
    said, seen = [], []
    trained = train(first, seen.append, said.append)
    assert trained.reasons.keys() <= {
        f"short.{where}{what}" for where in ("", "beside_baseline.") for what in ("end", "over_training")
    }
    figures = trained.figures["short"]
    assert (figures["rate"], figures["rates"], figures["chosen_on"]) == (1e-4, sorted(RATES), [100])
    assert (figures["seeds"], figures["steps"], figures["recorded"]) == ([0, 1], 1, None)
    assert figures["curves"]["method"]["steps"] == [0, 1]
    assert (seen[-1].done, seen[-1].total, seen[-1].seconds_left) == (12, 12, 0)
    assert any(line == "GRAIL, short: lr=0.0001 is best" for line in said)
    arguments = json.loads((tmp_path / "GRAIL/training/GRAIL__short__1/sweep.json").read_text())["arguments"]
    assert {"--model.credit=GRAIL", "--model.credit.std=0.8", "--seed_everything=1"} <= {*arguments}
    # A second call has nothing to do.
    assert estimate(first) == 0
    assert train(first, say=lambda line: None) == trained
    # With the same arms as recorded ones the method alone is run, and the figures are the same.
    record(tmp_path / "training.json", tmp_path / "GRAIL" / "arms")
    shutil.copytree(tmp_path / "GRAIL/training", tmp_path / "again/training")
    for file in (tmp_path / "again").rglob("sweep.json"):
        file.write_text(file.read_text().replace(f"{tmp_path}/GRAIL/", f"{tmp_path}/again/"))
    again = Request(**how, folder=tmp_path / "again")
    shutil.copytree(tmp_path / "GRAIL/training_choosing", tmp_path / "again/training_choosing")
    for file in (tmp_path / "again/training_choosing").rglob("sweep.json"):
        file.write_text(file.read_text().replace(f"{tmp_path}/GRAIL/", f"{tmp_path}/again/"))
    compared = train(again, say=lambda line: None).figures["short"]
    about = compared.pop("recorded")
    assert compared == {name: value for name, value in figures.items() if name != "recorded"}
    assert (about["arms"], about["same_start"], about["of"]) == (["uniform", "baseline"], 2, 2)
    assert "paired by problems and by draws of responses" in about["sentence"]
    # Recorded runs that begin elsewhere are not compared with.
    content = json.loads((tmp_path / "training.json").read_text())
    world = content["worlds"]["short"]
    (tmp_path / "training.json").write_text(
        json.dumps({"worlds": {"short": world | {"starts": {s: [0.9, 0.1] for s in (0, 1, 100)}}}})
    )
    recorded_runs.recorded.cache_clear()
    monkeypatch.setattr(training, "largest_chance", lambda problems, seeds: 0.2)
    assert "Train these arms here, too" in train(again, say=lambda line: None).reasons["short"]
    # Nor those with other settings.
    changed = world["settings"] | {"model.objective.init_args.clip_high": 0.2}
    (tmp_path / "training.json").write_text(json.dumps({"worlds": {"short": world | {"settings": changed}}}))
    recorded_runs.recorded.cache_clear()
    with pytest.raises(ValueError, match=r"`model.objective.init_args.clip_high` was 0.2 and is 0.28 now"):
        check(again)


@pytest.mark.parametrize(
    ("request_of", "said"),
    [
        ({"method": "GRIAL"}, "Did you mean GRAIL"),
        ({"options": ["--credit.sdt=1"]}, "sdt"),
        ({"options": ["--credit=Uniform"]}, "must be `--credit.NAME=VALUE`"),
        ({"options": ["--control", "Shuffled"]}, "but got '--control'"),
        ({"options": ["--model.policy=words"]}, "must be `--credit.NAME=VALUE`"),
        ({"worlds": ["shot"]}, "Did you mean short"),
        ({"seeds": 0}, "`--seeds` must be at least 1"),
        ({"seeds": 101}, "other seeds"),
    ],
)
def test_a_mistake_is_one_line_before_anything_runs(short, tmp_path, request_of, said):
    asked = {"method": "GRAIL", "worlds": ["short"], "folder": tmp_path / "GRAIL"} | request_of
    with pytest.raises(ValueError, match=said) as error:
        check(Request(**asked))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "GRAIL").exists()


def test_a_config_of_the_working_folder_does_not_replace_the_packages(short, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    shutil.copy(short / "quickstart.yaml", tmp_path / "configs")
    assert runs_of(content_of("short", ARMS, 1, "runs"))
    with (tmp_path / "configs" / "quickstart.yaml").open("a") as file:
        file.write("# Mine.\n")
    with pytest.raises(ValueError, match="another file of that name"):
        content_of("short", ARMS, 1, "runs")


GO = """
import sys
from pathlib import Path
from grail_lightning.app.benchmark import recorded, training

training.CONFIGS = (Path({configs!r}),)
training.SETTINGS = {{"short": training.Setting("short", "task", 10.0)}}
recorded.FILE = Path({data!r})
request = training.Request(method="mine.Halves", worlds=["short"], seeds=1, folder=Path("runs"), jobs=1)
try:
    print(training.train(request).figures["short"]["rate"])
except KeyboardInterrupt:
    sys.exit(130)
"""
MINE = """
from grail_lightning.credit import TokenCredit, TokenWeights

class Halves(TokenCredit):
    def __call__(self, policy, batch, context):
        return TokenWeights(values=0.5 * batch.response_mask.float())
"""


@pytest.mark.slow
def test_a_class_of_the_working_folder_is_trained_and_an_interruption_goes_on(short, tmp_path):
    study = short / "study" / "short.yaml"
    content = yaml.safe_load(study.read_text())
    study.write_text(yaml.safe_dump(content | {"options": OPTIONS | {"trainer.max_steps": 60}}))
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "go.py").write_text(GO.format(configs=str(short), data=str(tmp_path / "training.json")))

    def start():
        return subprocess.Popen([sys.executable, "go.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)

    process, until = start(), time.monotonic() + 300
    while not [*tmp_path.glob("runs/training_choosing/*/checkpoints/last.ckpt")] and time.monotonic() < until:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=100)
    assert process.returncode == 130, said
    (record,) = [json.loads(file.read_text()) for file in tmp_path.glob("runs/training_choosing/*/sweep.json")]
    assert record["state"] == "started"
    assert "Resume with the same command" in record["outcome"]
    process = start()
    said, _ = process.communicate(timeout=900)
    assert process.returncode == 0, said
    assert float(said.splitlines()[-1]) in RATES
    log = tmp_path / "runs/training_choosing/mine.Halves_lr=0.1__short__100/fit.log"
    assert log.read_text().count("held-out accuracy: ") == 1
