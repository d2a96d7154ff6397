"""What TensorBoard shows first, and the hyper-parameters of a run beside its final figures."""

import re

import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import metadata, plugin_data_pb2

from grail_lightning.callbacks import Dashboard, Evaluation, Throughput
from grail_lightning.callbacks.dashboard import LAYOUT, plain
from grail_lightning.credit import GRAIL, UCAS, Product, SaliencyOptions
from grail_lightning.data import ArithmeticData
from grail_lightning.step.outputs import GROUPS
from tests.callbacks.scripted import board
from tests.runs import module, trainer


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    """The events of a short run with a KL term, large enough for forks of either kind; its trainer and evaluation."""
    folder = tmp_path_factory.mktemp("run")
    evaluation = Evaluation()
    run = trainer(
        2,
        *(Dashboard(), evaluation, Throughput()),
        logger=board(folder),
        num_sanity_val_steps=0,
    )
    data = ArithmeticData(num_train=48, num_val=4, prompts_per_batch=24)
    run.fit(module({"kl_coefficient": 0.1, "group_size": 4}, credit=GRAIL(std=0.25)), datamodule=data)
    return EventAccumulator(str(folder)).Reload(), run, evaluation


def test_the_layout_shows_the_most_important_curves_first_and_names_real_ones(events):
    found, *_ = events
    layout = layout_pb2.Layout()
    layout.ParseFromString(found.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == ["outcome", "policy", "credit", "speed"]
    assert layout.category[0].chart[0].title == "accuracy"
    scalars = found.Tags()["scalars"]
    for category in layout.category:
        for chart in category.chart:
            for pattern in chart.multiline.tag:
                assert len([name for name in scalars if re.search(pattern, name)]) == 1, (chart.title, pattern)
    assert sum(len(charts) for charts in LAYOUT.values()) == sum(len(category.chart) for category in layout.category)


def test_every_curve_is_in_a_group_and_credit_has_few(events):
    found, *_ = events
    tags = found.Tags()
    assert {name.partition("/")[0] for kind in ("scalars", "images", "histograms") for name in tags[kind]} <= {*GROUPS}
    assert len([name for name in tags["scalars"] if name.startswith("credit/")]) <= 11


def _hparams(found, tag):
    content = found.summary_metadata[tag].plugin_data.content
    return plugin_data_pb2.HParamsPluginData.FromString(content)


def test_a_finished_run_is_a_line_of_hyper_parameters_with_final_figures(events):
    found, run, evaluation = events
    experiment = _hparams(found, metadata.EXPERIMENT_TAG).experiment
    assert {info.name.tag for info in experiment.metric_infos} == {
        *("val/first_accuracy", "val/final_accuracy", "train/final_reward"),
    }
    values = {
        "val/first_accuracy": evaluation.first["accuracy"],
        "val/final_accuracy": evaluation.last["accuracy"],
        "train/final_reward": float(run.callback_metrics["train/reward"]),
    }
    for name, value in values.items():
        assert [(point.step, point.value) for point in found.Scalars(name)] == [(2, pytest.approx(value))], name
    told = _hparams(found, metadata.SESSION_START_INFO_TAG).session_start_info.hparams
    expected = {"policy": "arithmetic", "credit/class": "GRAIL", "data/class": "ArithmeticData"}
    assert {name: told[name].string_value for name in expected} == expected
    numbers = {"credit/std": 0.25, "objective/kl_coefficient": 0.1, "execution/group_size": 4, "learning_rate": 1e-4}
    assert {name: told[name].number_value for name in numbers} == numbers
    assert "hp_metric" not in found.Tags()["scalars"]


@pytest.mark.filterwarnings("ignore:Experiment logs directory")  # CSVLogger's, of the second fit.
def test_the_folder_of_a_run_has_the_hyper_parameters_of_the_newest_fit(tmp_path):
    for rate in (1e-4, 3e-4):
        loggers = [kind(tmp_path / kind.__name__, name="", version="") for kind in (TensorBoardLogger, CSVLogger)]
        run = trainer(1, Dashboard(), logger=loggers, limit_val_batches=0)
        policy = module(optimizer=lambda p, rate=rate: torch.optim.AdamW(p, lr=rate))
        run.fit(policy, datamodule=ArithmeticData(num_train=8, prompts_per_batch=4))
        for logger in loggers:
            kept = yaml.safe_load((tmp_path / type(logger).__name__ / "hparams.yaml").read_text())
            assert (kept["learning_rate"], kept["credit"], kept["max_steps"]) == (rate, {"class": "Uniform"}, 1)


def test_options_of_nested_methods_are_plain_values():
    shown = plain(Product(GRAIL(saliency=SaliencyOptions(box="first")), UCAS()))
    assert (shown["class"], shown["first"]["class"], shown["second"]["class"]) == ("Product", "GRAIL", "UCAS")
    assert (shown["first"]["std"], shown["first"]["saliency"]["box"]) == (0.5, "first")
    assert (plain(None), plain((1, "a")), plain(object())) == (None, "[1, 'a']", {"class": "object"})
