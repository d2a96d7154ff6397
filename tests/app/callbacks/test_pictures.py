"""Pictures of credit in a real run: what is drawn when, and that training does not notice."""

import random
import warnings

import numpy as np
import torch
from lightning.pytorch.loggers import CSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grail_lightning import ArithmeticTask, CreditPictures, Step, StepOutput, build_batch
from grail_lightning.answers import Verifier
from grail_lightning.app.callbacks.credit_plots import _shown
from grail_lightning.app.views.heatmap import heatmap
from grail_lightning.core.credit.base import TokenWeights
from grail_lightning.core.records.episode import Episode, ToolCall, Turn
from grail_lightning.core.rollout.grading import align_rows, answer_masks, grade_and_locate
from grail_lightning.credit import GRAIL
from tests.app.callbacks.scripted import board
from tests.runs import Watch, batches, module, trainer, weights


def events_of(folder):
    return EventAccumulator(str(folder), size_guidance={"images": 0}).Reload()


class Board(CSVLogger):
    """Has Lightning's interface for pictures, as `WandbLogger` has."""

    def __init__(self, folder):
        super().__init__(folder)
        self.pictures = []

    def log_image(self, key, images, step=None):
        self.pictures.append((key, step, images[0].shape[2]))


def _state(policy):
    """The weights, and the states of all random numbers."""
    drawn = torch.get_rng_state(), torch.tensor(random.getstate()[1]), torch.tensor(np.random.get_state()[1])
    return {**weights(policy), **{str(number): state for number, state in enumerate(drawn)}}


def test_loggers_get_pictures_when_they_are_due_and_training_is_the_same_bit_for_bit(tmp_path, monkeypatch):
    watch, groups, logger, ends = Watch(), [], Board(tmp_path / "theirs"), []
    monkeypatch.setattr(
        "grail_lightning.app.callbacks.credit_plots.heatmap", lambda *shown: groups.append(shown) or heatmap(*shown)
    )
    for callbacks in ([], [CreditPictures(every_n_batches=2), watch]):
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        ours = module(credit=GRAIL())
        # The last logger takes no pictures.
        loggers = [board(tmp_path / f"ours{len(callbacks)}"), logger, CSVLogger(tmp_path / f"csv{len(callbacks)}")]
        trainer(3, *callbacks, logger=loggers).fit(ours, batches(3, size=2))
        ends.append(_state(ours))
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    assert logger.pictures == [("credit/rollouts", step, 3) for step in (1, 3)]
    # A right and a wrong rollout of a group that has both.
    for (prompt, pair), output in zip(groups, watch.outputs[::2], strict=True):
        rows = [row for row, of in enumerate(output.batch.prompts) if of.messages == prompt]
        texts = {bool(output.batch.correct[row]): output.batch.texts[row] for row in reversed(rows)}
        assert [(rollout.title[:5], rollout.text.rstrip()) for rollout in pair] == [
            ("right", texts[True].rstrip()),
            ("wrong", texts[False].rstrip()),
        ]
    events = events_of(tmp_path / "ours2")
    assert events.Tags()["images"] == ["credit/rollouts"]
    images = events.Images("credit/rollouts")
    assert [image.step for image in images] == [1, 3]
    assert all(image.width == 832 and image.height > 300 for image in images)
    assert all(len(image.encoded_image_string) < 150_000 for image in images)


def test_a_task_that_labels_wrongly_is_one_warning_and_no_end(tmp_path):
    class Mislabels(ArithmeticTask):
        def label_steps(self, text, prompt):
            return [Step(start=0, stop=len(text) + 1, kind="sound")]

    prompts = [Mislabels().prompt({"problem": f"1+{k}+2"}) for k in range(2)]
    loader = torch.utils.data.DataLoader([prompts] * 2, batch_size=None)
    run = trainer(2, CreditPictures(1), logger=board(tmp_path))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(module(), loader)  # Uniform credit has no scores, so the step itself asks for no labels.
    said = [str(w.message) for w in caught if "picture" in str(w.message)]
    assert len(said) == 1
    assert said[0].startswith("No more pictures of the credit, because one could not be drawn: ValueError(")
    assert "`Mislabels.label_steps` must return" in said[0]
    assert run.global_step == 2
    assert events_of(tmp_path).Tags()["images"] == []


def test_the_answer_that_is_framed_is_the_one_that_the_method_used(arithmetic):
    """The first box with GRAIL's option `box: first`; none in a last turn that calls a tool, which has no answer."""
    tokenizer, prompt = arithmetic.tokenizer, ArithmeticTask().prompt({"problem": "1+2+3"})
    ids = tokenizer(r"so \boxed{6}. no, \boxed{7}", add_special_tokens=False)["input_ids"]
    plain = build_batch(arithmetic, [prompt], 1, [ids], [True])
    turn = build_batch(arithmetic, [prompt], 1, [ids], [True], sampled=[[True] * len(ids)], turn=[[0] * len(ids)])
    called = Turn(text=plain.texts[0], calls=(ToolCall(name="calculator"),))
    framed = []
    with Verifier() as verifier:
        for made in (plain, turn.replace(episodes=[Episode(turns=(called,), end="turns")])):
            batch = grade_and_locate(made, verifier, tokenizer)
            aligned, values = align_rows(batch, tokenizer), torch.ones(1, len(ids))
            for which in ("first", "last"):
                given = TokenWeights(values=values, answer=answer_masks(batch, aligned, which))
                shown = _shown(StepOutput(batch, given), 0, values[0], tokenizer)
                framed.append(shown.answer and shown.text[slice(*shown.answer)])
    assert framed == [r"\boxed{6}", r"\boxed{7}", None, None]
