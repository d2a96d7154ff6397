"""Runs on two datasets, one of which has what a credit method reads: every batch trains, whatever is drawn for it."""

import importlib.util
from pathlib import Path

import pytest
import torch

from grail_lightning import ArithmeticTask, EnvironmentTask, GrailModule, Preflight, PromptData, RewardSpec, Sampling
from grail_lightning.core.data.loaders import PromptSet
from grail_lightning.credit import EGCA, CriticSearch, ExecutedMask, GiGPO, Resampled, SpanScores, TurnRewards
from tests.core.credit.test_contract import REFERENCE
from tests.runs import Watch, trainer
from tests.steps import configured
from tests.tool_calling_policy import calling_policy
from tests.worlds.programs.traced import Trusted

spec = importlib.util.spec_from_file_location(
    "my_environment", Path(__file__).parents[1] / "docs" / "examples" / "my_environment.py"
)
my_environment = importlib.util.module_from_spec(spec)
spec.loader.exec_module(my_environment)


def letters(responses, references, **columns):
    """Differs between the rollouts of a group."""
    return [float(len(response) % 7) for response in responses]


BY_LETTERS = [RewardSpec(function="tests.test_mixture_runs.letters")]
SUMS = ArithmeticTask(rewards=BY_LETTERS)
GAMES = EnvironmentTask(
    lambda: my_environment.Guess(20), instruction="", tool_instruction="", calls="tags", rewards=BY_LETTERS
)


class Mixed(PromptData):
    """Sums, and games or programs; one prompt a batch."""

    def __init__(self, other):
        super().__init__(prompts_per_batch=1, eval_prompts_per_batch=1)
        self.other = other

    def load(self, split):
        if split != "train":
            return []
        sums = [SUMS.prompt({"problem": f"{k}+3-1"}) for k in (4, 5, 7, 8)]
        return [PromptSet("sums", sums), PromptSet("others", self.other)]


def games():
    return [GAMES.prompt({"problem": f"Go {k}?"}) for k in range(4)]


def programs():
    row = {"entry": "f", "tests": [[[2], 2], [[1], 1]], "reference": REFERENCE}
    return [Trusted().prompt(row | {"problem": f"Write {k}."}) for k in range(4)]


def ran(credit, other, folder, steps=4):
    """The outputs of the steps of a run."""
    policy = calling_policy()
    policy.model.float().save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    what, how = configured({"group_size": 4})
    module = GrailModule(
        str(folder),
        objective=what,
        execution=how,
        credit=credit,
        sampling=Sampling(max_response_length=24),
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-3),
    )
    watch = Watch()
    trainer(steps, Preflight(), watch).fit(module, datamodule=Mixed(other()))
    return watch.outputs


@pytest.mark.filterwarnings("ignore:.*of the rollouts (ended by|call no)", "ignore:.*training sets lack it")
@pytest.mark.parametrize("credit", [TurnRewards(), CriticSearch(), GiGPO(scores=True), SpanScores()])
def test_a_mixture_of_games_and_sums_trains_to_its_end(credit, tmp_path):
    outputs = ran(credit, games, tmp_path)
    played = [output.batch.episodes is not None for output in outputs]
    assert {*played} == {True, False}, "batches of either kind"
    alive = {own for output, own in zip(outputs, played, strict=True) if output.metrics["grad_norm"] > 0}
    assert alive == {True, False}, "batches of either kind have a gradient"
    for output, own in zip(outputs, played, strict=True):
        assert ("episodes/turns" in output.metrics) == own


@pytest.mark.parametrize("credit", [EGCA(), ExecutedMask()])
def test_a_mixture_of_programs_and_sums_trains_to_its_end(credit, tmp_path):
    outputs = ran(credit, programs, tmp_path)
    sums = [output for output in outputs if output.batch.prompts[0].task is SUMS]
    assert any((output.batch.advantages < 0).any() for output in sums)
    for output in sums:
        assert torch.equal(output.weights.values, output.batch.response_mask.to(output.weights.values))


def test_a_mixture_whose_games_a_method_cannot_take_ends_before_a_batch_is_sampled(tmp_path):
    with pytest.raises(ValueError, match=r"`Resampled` continues rollouts .* a training set whose task has an"):
        ran(Resampled(), games, tmp_path)


@pytest.mark.filterwarnings("ignore:.*of the rollouts ended by")
def test_a_set_without_scores_is_told_once_at_the_start(tmp_path):
    with pytest.warns(
        UserWarning, match="`CriticSearch` reads the scores .* but 1 of 2 training sets lack it: that of"
    ):
        ran(CriticSearch(), games, tmp_path, steps=1)
