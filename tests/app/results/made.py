"""Runs as files: kept samples by the real writer, events by TensorBoard's, configs as a run leaves them."""

import json

import numpy as np
import yaml
from torch.utils.tensorboard import SummaryWriter

from grail_lightning.app.results.records import FORMAT, append_samples, set_digest, write_evaluation
from grail_lightning.core.records.columns import SAMPLE

SAMPLING = {"max_response_length": 64, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "stop": []}
DATASETS = "part 0", "part 1"
HOSTILE = [
    "</style><script>document.title='owned'</script>",
    "<img src=x onerror=alert(1)>",
    "=HYPERLINK(1)",
    "\u202eright to left \x1b[31m | pipe `code` **bold** [a](http://example.org)",
    "$\\frac{1}{0}$ {{ 7*7 }} {% x %}",
]


def chances(problems, rate, seed=0):
    """The probability of each problem to be solved, with this mean."""
    return np.random.default_rng(seed).beta(2 * rate, 2 * (1 - rate), problems)


def answers(probabilities, num_samples=3, seed=0):
    """Which samples are right, ``[N, n]``."""
    return np.random.default_rng(seed).random((len(probabilities), num_samples)) < probabilities[:, None]


def keep_samples(folder, datasets, first=None, text="\\boxed{1}", order=1, **facts):
    """Write the samples of an evaluation; `datasets` holds which ones are right ``[N, n]``, by name.

    With the `order` -1 the data has the same problems from the last to the first.
    """
    folder.mkdir(parents=True)
    ids = {name: [f"{name} {k}".encode().hex() for k in range(len(right))] for name, right in datasets.items()}
    num_samples = next(iter(datasets.values())).shape[1]
    about = {
        name: {
            "problems": len(right),
            "digest": set_digest(ids[name]),
            "source": "MathData",
            "first": (first or {}).get(name),
        }
        for name, right in datasets.items()
    }
    write_evaluation(
        folder,
        {
            "format": FORMAT,
            "model": {"policy": "arithmetic", "checkpoint": None, "digest": "0", "step": 0},
            "sampling": SAMPLING,
            "num_samples": num_samples,
            "seed": 0,
            "datasets": about,
            "grading": {name: {"compare": "math"} for name in datasets},
        }
        | facts,
    )
    for name, right in datasets.items():
        for index, problem in enumerate(range(len(right))[::order]):
            place = {"dataset": name, "problem": ids[name][problem], "index": index, "seed": problem}
            place |= {"finished": bool(problem % 4)} | dict.fromkeys(("prompt", "reference", "response"), text)
            append_samples(folder, 0, [_drawn(place, k, bool(right[problem, k])) for k in range(num_samples)])
    return folder


def _drawn(place, number, correct):
    status, prediction = ("right", "1") if correct else ("wrong" if number else "missing", "2")
    tokens = 10 + place["seed"] % 5 + number
    return sample(**place, sample=number, status=status, prediction=prediction, correct=correct, num_tokens=tokens)


def sample(**changes):
    """A sample of one problem."""
    names = {"dataset": "d", "problem": "0" * 16, "index": 0, "sample": 0}
    texts = {"prompt": "p", "reference": "", "response": "", "prediction": None}
    verdict = {"correct": False, "status": "wrong", "layer": "none"}
    others = {"num_tokens": 3, "finished": True, "seed": 0, "columns": {}}
    return dict.fromkeys(SAMPLE) | names | texts | verdict | others | changes


def config(seed=0, name="run", credit="GRAIL", **options):
    """The parts of a resolved config that a report reads."""
    logger = {"class_path": "TensorBoardLogger", "init_args": {"save_dir": "runs", "name": name}}
    return {
        "seed_everything": seed,
        "trainer": {"logger": logger, "max_steps": 100, "default_root_dir": None},
        "model": {"policy": "arithmetic", "credit": {"class_path": credit}, "sampling": SAMPLING},
        "data": {"class_path": "ArithmeticData", "init_args": {"num_val": 512, "prompts_per_batch": 16}},
        "evaluation": {"num_samples": 1, "sampling": None},
    } | options


def make_run(folder, curve=None, sweep=None, **options):
    """A run's folder with its config, and its learning curve and sweep's file if there are any."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config(**options)))
    if sweep is not None:
        (folder / "sweep.json").write_text(json.dumps(sweep))
    if curve is not None:
        with SummaryWriter(str(folder)) as writer:
            for step, value in curve.items():
                writer.add_scalar("val/accuracy", value, step)
                writer.add_scalar("train/reward", 0.5, step)
    return folder


def study(folder, methods):
    """A sweep with samples of two datasets: three runs of each method, of which `methods` says how good it is."""
    for method, better in methods.items():
        for seed in range(3):
            effect = better + 0.02 * np.random.default_rng([seed, len(method)]).standard_normal()
            place = folder / f"{len(list(folder.glob('*'))):03d}"
            make_run(place, None, {"method": method, "task": "", "seed": seed}, seed=seed, name=str(place))
            right = {
                name: answers((chances(12 + 8 * k, 0.5, k) + effect).clip(0, 1), 3, seed * 10 + k)
                for k, name in enumerate(DATASETS)
            }
            keep_samples(place / "test" / "samples", right)
    return sorted(map(str, folder.glob("*")))
