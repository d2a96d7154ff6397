"""Sweeps of short runs of the packaged policy."""

import yaml

OPTIONS = {
    "trainer.max_steps": 2,
    "trainer.val_check_interval": 1,
    "model.sampling.max_response_length": 44,
    "model.execution.group_size": 4,
    "evaluation.sampling.max_response_length": 44,
    "data.num_train": 32,
    "data.num_val": 8,
    "data.num_test": 8,
    "data.prompts_per_batch": 4,
    "last_checkpoint.every_n_batches": 1,
}
METHODS = {"GRPO": {"model.credit": "Uniform"}, "GRAIL": {"model.credit": "GRAIL"}}


def write_study(place, /, options=None, **changes):
    """The file of a sweep: `options` are added to those of short runs, `changes` replace its keys."""
    content = {
        "config": "configs/quickstart.yaml",
        "folder": str(place / "study"),
        "options": OPTIONS | (options or {}),
        "methods": METHODS,
        "tasks": {"sums": {}},
        "seeds": [0],
    }
    file = place / "study.yaml"
    kept = {key: value for key, value in (content | changes).items() if value is not None}
    file.write_text(yaml.safe_dump(kept, sort_keys=False))
    return file
