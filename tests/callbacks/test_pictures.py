"""Pictures of credit in a real run: what is drawn when, at which cost, and that training does not notice."""

import random
import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grail_lightning.callbacks import CreditPictures, RolloutTable
from grail_lightning.callbacks.pictures import mixed_pairs
from grail_lightning.credit import GRAIL, UCAS
from grail_lightning.credit.base import TokenWeights
from grail_lightning.module import GrailModule
from grail_lightning.step.advantages import effective_weights, token_advantages
from grail_lightning.step.outputs import StepOutput
from grail_lightning.tasks import ArithmeticTask
from tests.runs import SAMPLING, Watch, batches, module, trainer, weights

IMAGES = ["credit/rollouts", "credit/weight_by_position"]


def board(folder):
    return TensorBoardLogger(folder, name="", version="")


def always(**options):
    """Pictures of every batch, whatever they cost."""
    return CreditPictures(**{"every_n_batches": 1, "max_time_share": 1.0} | options)


def events_of(folder):
    return EventAccumulator(str(folder), size_guidance={"images": 0, "histograms": 0}).Reload()


def test_tensorboard_shows_pictures_and_a_histogram_when_they_are_due(tmp_path):
    watch = Watch()
    loggers = [board(tmp_path), CSVLogger(tmp_path)]  # The second one takes no pictures.
    run = trainer(3, always(every_n_batches=2), watch, logger=loggers)
    run.fit(module(credit=GRAIL()), batches(3, size=8))
    events = events_of(tmp_path)
    assert events.Tags()["images"] == IMAGES
    for name in IMAGES:
        assert [image.step for image in events.Images(name)] == [1, 3]
        assert all(image.width >= 576 and image.height > 300 for image in events.Images(name))
        assert all(len(image.encoded_image_string) < 150_000 for image in events.Images(name))
    # The histogram is that of the rollouts with an advantage.
    for event, output in zip(events.Histograms("credit/weights"), watch.outputs[::2], strict=True):
        batch = output.batch
        values = output.weights.values[(batch.advantages != 0)[:, None] & batch.response_mask]
        told = event.histogram_value
        assert told.num == sum(told.bucket) == len(values) > 0
        assert told.sum == pytest.approx(values.double().sum().item(), rel=1e-9)
        assert (told.min, told.max) == (values.min().item(), values.max().item())


class Board(CSVLogger):
    """Has Lightning's interface for pictures and tables, as `WandbLogger` has."""

    def __init__(self, folder):
        super().__init__(folder)
        self.pictures, self.tables = [], []

    def log_image(self, key, images, step=None):
        self.pictures.append((key, step, images[0].shape[2]))

    def log_table(self, key, columns, data, step=None):
        self.tables.append((key, step, columns, len(data)))


def test_a_logger_with_lightnings_interface_gets_pictures_and_tables(tmp_path):
    logger = Board(tmp_path)
    trainer(1, always(), RolloutTable(num_rollouts=3), logger=logger).fit(module(credit=GRAIL()), batches(1, size=8))
    assert logger.pictures == [(name, 1, 3) for name in IMAGES]
    assert logger.tables == [("train/rollouts", 1, ["rollout", "prompt", "response", "reference"], 3)]


def test_training_is_the_same_bit_for_bit_with_and_without(tmp_path):
    ends = []
    for callbacks in ([], [always()]):
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        policy = module(credit=GRAIL())
        trainer(3, *callbacks, logger=board(tmp_path / str(len(ends)))).fit(policy, batches(3))
        ends.append((weights(policy), torch.get_rng_state(), random.getstate(), np.random.get_state()[1]))
    assert len(events_of(tmp_path / "1").Images("credit/rollouts")) == 3
    without, with_ = ends
    assert all(torch.equal(weight, without[0][name]) for name, weight in with_[0].items())
    assert torch.equal(with_[1], without[1])
    assert with_[2] == without[2]
    assert np.array_equal(with_[3], without[3])


def test_pictures_wait_until_they_take_no_more_than_their_share(tmp_path):
    """The first one is drawn; a second one would be more than a thousandth of the time."""
    pictures = CreditPictures(every_n_batches=1, max_time_share=0.001)
    trainer(3, pictures, logger=board(tmp_path)).fit(module(credit=GRAIL()), batches(3))
    assert [image.step for image in events_of(tmp_path).Images("credit/rollouts")] == [1]
    assert pictures.seconds > 0
    off = CreditPictures(every_n_batches=0)
    trainer(1, off, logger=board(tmp_path / "off")).fit(module(credit=GRAIL()), batches(1))
    assert (events_of(tmp_path / "off").Tags()["images"], off.seconds) == ([], 0)
    with pytest.raises(ValueError, match=r"`max_time_share` must lie in \(0, 1\], but got 0.0. For no pictures set"):
        CreditPictures(max_time_share=0.0)


def test_a_task_that_labels_wrongly_is_one_warning_and_no_end(tmp_path):
    class Mislabels(ArithmeticTask):
        def label_steps(self, text, prompt):
            return "nonsense"

    prompts = [Mislabels().prompt({"problem": f"1+{k}+2"}) for k in range(4)]
    loader = torch.utils.data.DataLoader([prompts] * 3, batch_size=None)
    run = trainer(3, always(), logger=board(tmp_path))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(module(), loader)  # Uniform credit has no scores, so the step itself asks for no labels.
    said = [str(w.message) for w in caught if "picture" in str(w.message)]
    assert len(said) == 1
    assert said[0].startswith("No more pictures of the credit, because one could not be drawn: ValueError(")
    assert "`Mislabels.label_steps` must return" in said[0]
    assert run.global_step == 3
    assert events_of(tmp_path).Tags()["images"] == []


def test_groups_without_a_difference_are_shown_if_there_are_no_others(tmp_path):
    class Dead(GrailModule):
        """Every rollout is wrong."""

        def training_step(self, prompts, batch_idx):
            made = super().training_step(prompts, batch_idx)["output"]
            wrong = {"correct": torch.zeros_like(made.batch.correct), "advantages": torch.zeros(len(made.batch))}
            return {"output": StepOutput(made.batch.replace(**wrong), made.weights, made.metrics)}

    policy = Dead("arithmetic", SAMPLING, credit=GRAIL())
    trainer(1, always(), logger=board(tmp_path)).fit(policy, batches(1))
    tags = events_of(tmp_path).Tags()
    assert tags["images"] == ["credit/rollouts"], "no token has an advantage, so there is no distribution"
    assert tags["histograms"] == []


def test_a_pair_is_a_right_and_a_wrong_rollout_of_one_group():
    assert mixed_pairs([False, True, True, True, True, False], [0, 0, 1, 1, 2, 2]) == [(1, 0), (4, 5)]
    assert mixed_pairs([True, True, False, False], [3, 3, 7, 7]) == [(0, 1), (2, 3)]
    assert mixed_pairs([True], [0]) == [(0, 0)]


def test_an_additive_stage_is_counted_into_the_weight():
    watch = Watch()
    trainer(1, watch).fit(module(credit=UCAS()), batches(1, size=8))
    batch, found = watch.outputs[0].batch, watch.outputs[0].weights
    assert found.additive is not None
    shares, live = effective_weights(batch.advantages, found), batch.advantages != 0
    assert live.any()
    assert torch.allclose(shares[live] * batch.advantages[live, None], token_advantages(batch.advantages, found)[live])
    assert torch.equal(shares[~live], found.values[~live])
    plain = TokenWeights(values=found.values, fallback=found.fallback)
    assert torch.equal(effective_weights(batch.advantages, plain), found.values)
