"""TRL's loop of tools with token credit: turns, their calls, and the credit of turns by hand."""

import pytest
import torch

from grail_lightning.credit import GiGPO, TreeAdvantage
from tests.core.environments.test_trl_tools import END, Scripted, _call, _policy
from tests.trl_trainers import OF_TRL, CreditPages, TokenCreditMixin

pytestmark = OF_TRL
ROW = {"prompt": [{"role": "user", "content": "Go."}], "target": 3}


class Counter:
    """A number that goes up."""

    def reset(self, target: int, **row: object) -> str:
        """Begin at 0."""
        self.number, self.target = 0, target
        return " Count."

    def add(self, number: int) -> int:
        """Add a number.

        Args:
            number: The number.

        Returns:
            The sum.
        """
        self.number += number
        return self.number

    def get_reward(self) -> float:
        """1 on the target."""
        return float(self.number == self.target)


class Playing(TokenCreditMixin, Scripted):
    """TRL's trainer with token credit, whose turns are written by hand."""


TEXTS = [  # The turns of four rollouts: right, wrong, right in three turns, and without a call.
    [f"Two.{_call('add', number=3)}{END}", f"Done.{END}"],
    [f"Two.{_call('add', number=2)}{END}", f"Done.{END}"],
    [f"Two.{_call('add', number=2)}{END}", f"{_call('add', number=1)}{END}", f"So.{END}"],
    [f"None.{END}"],
]


@pytest.fixture
def play(tmp_path):
    from datasets import Dataset
    from trl import GRPOConfig

    def run(credit, **more):
        model, tokenizer = _policy()
        made = Playing(
            model=model,
            args=GRPOConfig(
                output_dir=str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
                num_generations=4, per_device_train_batch_size=4, max_completion_length=500, max_steps=1,
                save_strategy="no", scale_rewards="none", disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([ROW]),
            processing_class=tokenizer,
            environment_factory=Counter,
            credit=credit,
            **more,
        )  # fmt: skip
        made.texts = [[*texts] for texts in TEXTS]
        made.model.train()
        return made, made._generate_and_score_completions([ROW] * 4)

    return run


def test_gigpo_compares_turns_that_began_with_the_same_ids(play):
    """The reward is that of the last turn, and 0.95 of it a turn before; all rollouts begin in one state.

    Returns of first turns: 0.95, 0, 0.9025, 0; their mean is 0.463125. Second turns: rows 1 and 2 wrote and were told
    the same, so that they begin in one state, with the returns 0 and 0.95; that of row 0 is elsewhere. The group's mean
    reward is 0.5.
    """
    made, output = play(GiGPO())
    advantages, sampled = output["advantages"], output["tool_mask"].bool() & output["completion_mask"].bool()
    whole = torch.tensor([0.5, -0.5, 0.5, -0.5])
    first = torch.tensor([0.95, 0.0, 0.9025, 0.0]) - 0.463125
    turns = [[first[0], 0.0], [first[1], -0.475], [first[2], 0.475, 0.0], [first[3]]]
    for row, terms in enumerate(turns):
        mask = sampled[row]
        number = (mask & ~torch.nn.functional.pad(mask[:-1], (1, 0), value=False)).long().cumsum(0) - 1
        expected = torch.tensor([whole[row] + terms[k] for k in number[mask].tolist()])
        torch.testing.assert_close(advantages[row][mask], expected, rtol=0, atol=1e-6)
        assert (advantages[row][~mask] == 0).all()
        assert number.max() == len(terms) - 1
    assert made._metrics["train"]["credit/shared_states"] == [pytest.approx(6 / 8)]


def test_the_page_shows_turns_with_their_calls(play, tmp_path):
    from grail_lightning.core.records.columns import PREDICTION, read_rows
    from grail_lightning.core.records.episode import read_episode

    play(TreeAdvantage(state="turns"), callbacks=[CreditPages()])
    rows = list(read_rows(tmp_path / "credit" / "step_00000000.parquet", PREDICTION))
    episodes = [read_episode(row["episode"]) for row in rows]
    assert [len(episode.turns) for episode in episodes] == [2, 2, 3, 1]
    (call,) = episodes[0].turns[0].calls
    assert (call.name, call.arguments, call.result) == ("add", {"number": 3}, "3")
    assert episodes[3].turns[0].text.startswith("None.")
    assert (tmp_path / "credit" / "step_00000000.html").stat().st_size > 10_000
