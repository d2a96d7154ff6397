import json

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint

from grail_lightning.callbacks import Evaluation, Throughput
from grail_lightning.callbacks.monitors import check_monitors, logged_metrics
from grail_lightning.data import ArithmeticData, DatasetSpec, MathData
from grail_lightning.tasks import ArithmeticTask
from tests.runs import module, trainer


class Looks(Callback):
    """Keeps what callbacks can monitor: what is known before a run, and what the run has logged at its end."""

    def setup(self, trainer, pl_module, stage):
        self.known = logged_metrics(trainer, pl_module)

    def on_train_end(self, trainer, pl_module):
        self.logged = set(trainer.callback_metrics)


def _math(folder):
    """Training and two validation datasets, one of which has a name that a metric cannot have."""
    rows = [json.dumps({"problem": f"{k}+1", "answer": str(k + 1)}) for k in range(1, 5)]
    for name in ("train", "first", "second"):
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    val = [DatasetSpec(str(folder / "first.jsonl")), DatasetSpec(str(folder / "second.jsonl"), name="a b/c")]
    return MathData(train=str(folder / "train.jsonl"), val=val, task=ArithmeticTask(), prompts_per_batch=4)


def _arithmetic(folder):
    return ArithmeticData(num_train=8, num_val=4, prompts_per_batch=4)


@pytest.mark.parametrize("data", [_math, _arithmetic])
def test_the_metrics_that_are_known_before_a_run_are_those_that_it_logs(data, tmp_path):
    looks = Looks()
    options = {"val_check_interval": 1, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0}
    run = trainer(1, Evaluation(num_samples=2, pass_at=(1, 2)), Throughput(), looks, **options)
    run.fit(module(), datamodule=data(tmp_path))
    assert set(looks.known.names) == looks.logged
    assert not looks.known.complete, "`Looks` is no class of the package"
    if data is _math:
        assert {"val/first/accuracy", "val/a_b_c/pass_at_2"} <= looks.logged


def _check(*callbacks):
    """As before a fit on arithmetic problems; returns the metrics that are known then."""
    known = []

    class Checks(Callback):
        __module__ = "grail_lightning.callbacks"  # so that it counts as one of the package

        def setup(self, trainer, pl_module, stage):
            check_monitors(trainer, pl_module)
            known.extend(logged_metrics(trainer, pl_module).names)
            raise KeyError("no mistake")

    run = trainer(1, Evaluation(), Checks(), *callbacks, enable_checkpointing=True, num_sanity_val_steps=0)
    with pytest.raises(KeyError, match=r"no mistake"):
        run.fit(module(), datamodule=_arithmetic(None))
    return known


def _best(monitor, **options):
    return ModelCheckpoint(monitor=monitor, dirpath="nowhere", **options)


@pytest.mark.parametrize(
    "name", ["val/accuracy", "val/arithmetic/accuracy", "val/verdict/timeout", "train/reward", "epoch", "step"]
)
def test_a_metric_that_is_logged_can_be_monitored(name):
    known = _check(_best(name, filename="{step}-{" + name + ":.2f}"))
    assert name in [*known, "epoch"], "Lightning adds the epoch"


def test_a_function_of_the_users_own_may_log_anything():
    with pytest.raises(ValueError, match=r"`checkpoint.monitor` must be a metric .*'mine'"):
        _check(_best("mine"))
    _check(_best("mine"), LambdaCallback(on_train_end=lambda *_: None))
    _check(_best("val/accuracy_ema"), LambdaCallback(on_train_end=lambda *_: None))
    with pytest.raises(ValueError, match=r"'val/acuracy'. Did you mean val/accuracy"):
        _check(_best("val/acuracy"), LambdaCallback(on_train_end=lambda *_: None))


@pytest.mark.parametrize("name", ["reward", "accuracy", "tokens_per_second"])
def test_the_name_by_which_an_earlier_version_logged_a_metric_is_refused_with_the_new_one(name):
    new = {"tokens_per_second": "speed/tokens_per_second"}.get(name, f"train/{name}")
    for option in ({"monitor": name}, {"monitor": "val/accuracy", "filename": "{" + name + ":.2f}"}):
        with pytest.raises(ValueError, match=rf"'{name}'. It is {new} now\.$"):
            _check(_best(**option))
    with pytest.raises(ValueError, match=rf"It is {new} now. Give a metric of your own another name\."):
        _check(_best(name), LambdaCallback(on_train_end=lambda *_: None))


def test_one_of_several_checkpoints_is_named_by_its_class():
    with pytest.raises(ValueError, match=r"`monitor` of ModelCheckpoint must be a metric"):
        _check(_best("val/accuracy"), _best("mine"))


def test_early_stopping_counts_no_epochs():
    with pytest.raises(ValueError, match=r"`monitor` of EarlyStopping must be a metric .*'epoch'"):
        _check(EarlyStopping("epoch"))
    _check(EarlyStopping("val/accuracy"))
