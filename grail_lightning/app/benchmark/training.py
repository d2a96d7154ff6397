"""Train a method in the worlds of the benchmark, beside uniform credit and a lower baseline.

Each arm runs a grid of learning rates on choosing seeds, and the reported seeds at its best rate. Worlds, steps, grids
and seeds are those of the files in ``configs/study``, so that the runs of uniform credit and of ``r - mean/2`` that the
package has (`recorded`) need not be made again. A run is a `grail-lightning fit` in its own folder and its own process;
called again, `train` goes on.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from grail_lightning.app import sweep
from grail_lightning.app.benchmark.recorded import FIRST_BATCH, Recorded, Start, largest_chance, recorded
from grail_lightning.app.benchmark.subjects import with_estimator
from grail_lightning.app.benchmark.training_figures import SIDES, Arms, training_figures
from grail_lightning.app.benchmark.training_progress import Progress, reporting
from grail_lightning.app.choice import StudyRun, study_of
from grail_lightning.app.cli.app import FitOptions
from grail_lightning.app.cli.config_files import CONFIGS, find_config
from grail_lightning.app.cli.trainer_options import environments_on_cores
from grail_lightning.app.results.differences import CURVE
from grail_lightning.app.results.runs import point_in_words
from grail_lightning.core.runtime.import_path import did_you_mean

__all__ = ["ARMS", "SETTINGS", "Progress", "Request", "Trained", "check", "content_of", "estimate", "train"]

ARMS: Mapping[str, Mapping[str, Any]] = {
    "uniform": {"model.credit": "Uniform"},
    "baseline": {"model.credit": "Uniform", "model.advantage": "GroupMean", "model.advantage.share": 0.5},
}
"""The options of the two arms with which a method is compared."""


class Setting(NamedTuple):
    """Where the runs of a world are described: the study and its task. `seconds` is the time of a run on one core."""

    study: str
    task: str
    seconds: float


SETTINGS: Mapping[str, Setting] = {
    "sums": Setting("baseline", "five terms", 60),
    "long_sums": Setting("baseline", "ten terms", 240),
    "words": Setting("baseline", "words", 60),
    "code": Setting("code", "code", 300),
    "search": Setting("search", "search", 300),
    "charts": Setting("charts", "charts", 300),
}
"""The worlds in which a method can be trained."""

_PARTS = {"--credit": "model.credit", "--control": "model.control", "--advantage": "model.advantage"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be trained.

    Attributes:
        method: The credit method, as `--model.credit` of ``fit`` takes it: a short name or an import path.
        options: Its options, and its control and estimator of the advantage, as ``--credit.top=3.0``,
            ``--control=Shuffled``, ``--advantage=GroupMean``, ``--advantage.share=0.5``.
        worlds: Names of `SETTINGS`.
        seeds: The number of reported seeds, which are 0, 1, ...
        folder: The folder of the method's runs; it must be one of this method with these options and this code.
        jobs: Processes at once; None for one on each core.
        arms: Whether the runs of uniform credit and of the lower baseline may be recorded ones, or are made ``here``;
            with ``all`` the method's own runs may be recorded ones, too.
        arms_folder: The folder of those that are made here; several methods may share it. Default ``folder / "arms"``.
    """

    method: str
    options: Sequence[str] = ()
    worlds: Sequence[str] = ("sums", "words", "code")
    seeds: int = 6
    folder: Path
    jobs: int | None = None
    arms: Literal["recorded", "here", "all"] = "recorded"
    arms_folder: Path | None = None


class Trained(NamedTuple):
    """What `train` returns: figures of each world, None without, and reasons by world or dotted path below it."""

    figures: dict[str, dict[str, Any] | None]
    reasons: dict[str, str]


class _World(NamedTuple):
    """The runs of a world: those that choose rates, and those that are reported, of the method and of both arms."""

    choosing: list[StudyRun]
    reported: list[StudyRun]
    recorded: Recorded | None

    def arm(self, name: str) -> list[StudyRun]:
        """The reported runs of `ARMS`, or those of the method."""
        return [run for run in self.reported if (run.method if run.method in ARMS else "method") == name]


def check(request: Request) -> None:
    """Check a request before anything runs, with a ValueError about what is wrong; no policy is loaded."""
    parser = FitOptions()
    for name, world in _worlds(request).items():
        for run in [*world.choosing, *world.reported]:
            if run.record().get("arguments", run.arguments) != run.arguments and not run.waits:
                raise ValueError(
                    f"{run.folder} must hold a run with these options, but there is one with others. Remove that "
                    "folder, or give another one."
                )
        first = next(run for run in world.choosing + world.reported if run.method not in ARMS)
        try:
            resolved = parser.parse(first.arguments).as_dict()
            parser.build()
        except ValueError as error:
            raise ValueError(f"The training of {request.method} on {name}: {error}") from error
        if world.recorded and (other := world.recorded.other_settings(resolved)):
            (option, (before, now)), *_ = other.items()
            raise ValueError(
                f"The recorded runs of {name} must have the settings of today, but `{option}` was {before!r} and is "
                f"{now!r} now. Train the arms of uniform credit and of the lower baseline here, too."
            )


def estimate(request: Request) -> float:
    """The seconds until a request is done, of what is neither recorded nor finished, on cores without other work."""
    jobs, seconds = len(environments_on_cores(request.jobs)), 0.0
    worlds = _worlds(request)
    for runs in ("choosing", "reported"):  # All choose before the first one is reported.
        times = [
            SETTINGS[name].seconds
            for name, world in worlds.items()
            for run in getattr(world, runs)
            if run.record()["state"] != "finished"
        ]
        seconds += max(max(times, default=0.0), sum(times) / jobs)
    return seconds


def train(
    request: Request,
    progress: Callable[[Progress], None] = lambda progress: None,
    say: Callable[[str], None] = sweep.say,
) -> Trained:
    """Train the method, and the arms that are neither recorded nor finished, and compare them.

    `progress` is called every few seconds from another thread, and `say` with a line for each run that ends. At Ctrl-C
    and SIGTERM the runs save after their batch, and KeyboardInterrupt is raised. Call it in the main thread.
    """
    check(request)
    worlds, reasons = _worlds(request), dict[str, str]()
    environments = [{**variables, "CUDA_VISIBLE_DEVICES": ""} for variables in environments_on_cores(request.jobs)]
    runner = sweep.Runner(environments, say=say)
    runs = [(run, SETTINGS[name].seconds) for name, world in worlds.items() for run in world.choosing + world.reported]
    with _stopped_by_signals(runner), reporting(runs, len(environments), progress):
        _run(runner, [run for world in worlds.values() for run in world.choosing])
        worlds = _worlds(request)  # With the points that are chosen now.
        for name, world in worlds.items():
            if why := _unfinished(world.choosing) or _other_start(world, world.choosing):
                reasons[name] = why
            else:
                say(f"{request.method}, {name}: {point_in_words(world.arm('method')[0].point)} is best")
        _run(runner, [run for name, world in worlds.items() if name not in reasons for run in world.reported])
    for name in worlds.keys() - reasons.keys():
        if why := _unfinished(worlds[name].reported) or _other_start(worlds[name], worlds[name].reported):
            reasons[name] = why
    finished = {name: world for name, world in worlds.items() if name not in reasons}
    curves = {
        name: Arms(*({run.seed: run.curve(CURVE) for run in world.arm(arm)} for arm in SIDES))
        for name, world in finished.items()
    }
    figures, missing = training_figures(curves)
    for name, world in finished.items():
        _describe(figures[name], world)
    return Trained({name: figures.get(name) for name in worlds}, reasons | missing)


# --- the runs ---------------------------------------------------------------------------------------------------------


def content_of(world: str, methods: Mapping[str, Mapping[str, Any]], seeds: int, folder: str) -> dict[str, Any]:
    """The content of the file of a study of methods in a world, with the settings of the study that has recorded it."""
    setting = SETTINGS[world]
    file = next(place / "study" / f"{setting.study}.yaml" for place in CONFIGS if place.is_dir())
    content = sweep.read_file(file, (*sweep.KEYS, "choose", "results"))
    settings = {key: content[key] for key in ("config", "options", "grid", "choose") if key in content}
    task = content["tasks"][setting.task]
    for name in (content["config"], *([task["config"]] if "config" in task else ())):
        _check_config(name)
    run_at = {"methods": methods, "tasks": {world: task}, "seeds": list(range(seeds)), "folder": folder}
    return settings | run_at


def _check_config(name: str) -> None:
    """A file of the working folder must not take the place of the package's."""
    ours = next(place for place in CONFIGS if place.is_dir()).joinpath(*Path(name).parts[1:])
    found = find_config(Path(name))
    if found.read_bytes() != ours.read_bytes():
        raise ValueError(
            f"The benchmark trains with the package's {name}, but the working folder has another file of that name "
            f"({found.absolute()}). Run it from another folder, or rename that file."
        )


def _method_options(request: Request) -> dict[str, str]:
    """The options of ``fit`` that make up the method."""
    options = {"model.credit": request.method}
    for given in with_estimator(request.options):
        name, joined, value = given.partition("=")
        part, dot, rest = name.partition(".")
        if part not in _PARTS or not joined or (part == "--credit" and not dot):
            raise ValueError(
                "An option of a method must be `--credit.NAME=VALUE`, `--control=NAME` or `--advantage=NAME`, with "
                f"`--control.NAME=VALUE` and `--advantage.NAME=VALUE`, but got {given!r}."
            )
        options[f"{_PARTS[part]}{dot}{rest}"] = value
    return options


def _worlds(request: Request) -> dict[str, _World]:
    """The runs of each world, those that are reported at their points if these can be chosen by now."""
    if request.seeds < 1:
        raise ValueError(f"`--seeds` must be at least 1, but got {request.seeds}.")
    own = {request.method: _method_options(request)}
    worlds = {}
    for name in dict.fromkeys(request.worlds):
        if name not in SETTINGS:
            hint = did_you_mean(name, SETTINGS) or f" They are {', '.join(SETTINGS)}."
            raise ValueError(f"`--worlds` must name worlds in which a method can be trained, but got {name!r}.{hint}")
        known = recorded(name) if request.arms != "here" else None
        choosing, reported = list[StudyRun](), list[StudyRun]()
        for methods, folder, rows in (
            (own, request.folder, known if request.arms == "all" else None),
            (ARMS, request.arms_folder or request.folder / "arms", known),
        ):
            runs = _runs(content_of(name, methods, request.seeds, str(folder / "training")), rows)
            choosing += [run for run in runs if run.choosing]
            reported += [run for run in runs if not run.choosing]
        worlds[name] = _World(choosing, reported, known)
    return worlds


def _runs(content: Mapping[str, Any], known: Recorded | None) -> list[StudyRun]:
    """The runs of the content of a file. A run waits for its point until those that choose it are finished."""
    study = study_of(content, known.row_of if known else lambda run: None)
    runs, points = list[StudyRun](), dict[tuple[str, str], Mapping[str, Any]]()
    for run in study.runs:
        ready = all(
            one.record()["state"] == "finished" for one in study.runs if one.choosing and one.group == run.group
        )
        if run.waits and ready:
            if run.group not in points:
                points[run.group] = study.best(run.group)[0]
            chosen = replace(run, point=points[run.group], waits=False)
            runs.append(replace(chosen, row=known.row_of(chosen) if known else None))
        else:
            runs.append(run)
    return runs


def _run(runner: sweep.Runner, runs: Sequence[StudyRun]) -> None:
    """Run those that are not finished; KeyboardInterrupt if a signal has stopped them."""
    runner.run(runs)
    if runner.stopped:
        raise KeyboardInterrupt


@contextmanager
def _stopped_by_signals(runner: sweep.Runner) -> Iterator[None]:
    """Let signals stop the runner, and then do again what they did before."""
    before = {number: signal.getsignal(number) for number in sweep.STOPPING}
    runner.stop_at_signals()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- what is known of them --------------------------------------------------------------------------------------------


def _unfinished(runs: Sequence[StudyRun]) -> str:
    """Why runs cannot be evaluated; empty if all are finished."""
    left = [run for run in runs if run.record()["state"] != "finished"]
    if not left:
        return ""
    said = f": {left[0].last_line()}" if left[0].last_line() else ""
    return f"{len(left)} of {len(runs)} runs of its training did not finish; the first is {left[0].folder}{said}"


def _starts(runs: Iterable[StudyRun], known: Recorded) -> dict[int, tuple[Start, Start]]:
    """What runs that were made here show before their first step, and what the recorded ones of the same seed do."""
    return {
        run.seed: (_start(run), known.starts[run.seed]) for run in runs if run.row is None and run.seed in known.starts
    }


def _start(run: StudyRun) -> Start:
    accuracy, first = run.curve(CURVE), run.curve(FIRST_BATCH)
    return Start(accuracy[min(accuracy)], first[min(first)])


def _other_start(world: _World, runs: Sequence[StudyRun]) -> str:
    """Why recorded runs cannot be compared with those that were made here; empty if they can."""
    if world.recorded is None or not (starts := _starts(runs, world.recorded)):
        return ""
    here, there = (sum(pair[k].accuracy for pair in starts.values()) / len(starts) for k in (0, 1))
    if abs(here - there) <= largest_chance(world.recorded.settings["data.init_args.num_val"], len(starts)):
        return ""
    return (
        f"Before training the accuracy is {here:.3f} here but {there:.3f} in the recorded runs of the other arms, more "
        "than other draws of responses explain. Train these arms here, too."
    )


def _describe(figures: dict[str, Any], world: _World) -> None:
    """Add to the figures of a world what was trained, and where."""
    rates = {arm: world.arm(arm)[0].point["model.optimizer.lr"] for arm in SIDES}
    figures["rate"], figures["uniform_rate"] = rates["method"], rates["uniform"]
    figures["beside_baseline"]["rate"] = rates["baseline"]
    figures["rates"] = sorted({run.point["model.optimizer.lr"] for run in world.choosing})
    figures["chosen_on"] = sorted({run.seed for run in world.choosing})
    figures["recorded"] = None
    arms = [arm for arm in SIDES if any(run.row for run in world.arm(arm))]
    if not arms or world.recorded is None:
        return
    seeds = [run.seed for run in world.arm(arms[0]) if run.row]
    part = f" (seeds {seeds[0]} to {seeds[-1]})" if len(seeds) < len(world.arm(arms[0])) else ""
    starts = _starts(world.arm("method"), world.recorded)
    same = sum(
        here.accuracy == there.accuracy and abs(here.first_batch - there.first_batch) < 1e-4
        for here, there in starts.values()
    )
    names = {"method": "the method", "uniform": "uniform credit", "baseline": "the lower baseline"}
    which = " and of ".join(names[arm] for arm in arms)
    sentence = f"The runs of {which} are recorded ones{part}, made on another machine."
    if not starts:
        sentence = "All runs are recorded ones, made on one machine."
    elif same == len(starts):
        sentence += (
            f" With each of {same} seeds accuracy before training and the first batch are the same here, so that runs "
            "are paired by problems and by draws of responses."
        )
    else:
        sentence += (
            f" With {len(starts) - same} of {len(starts)} seeds this machine draws other responses already before "
            "training, so that runs are paired by problems alone. Interval and test hold, since seeds are independent "
            "of each other; with all arms trained here the interval may be narrower."
        )
    figures["recorded"] = {"arms": arms, "same_start": same, "of": len(starts), "sentence": sentence}
