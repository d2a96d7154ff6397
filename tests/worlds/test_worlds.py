"""Figures of credit at forks in the world of word problems."""

from dataclasses import replace

import pytest
import torch

from grail_lightning import WordProblemTask, build_batch
from grail_lightning.core.policy.load import load_policy
from grail_lightning.core.step.figures import batch_figures
from grail_lightning.credit import TreeAdvantage, Uniform
from grail_lightning.functional import group_advantages
from tests.batches import rollouts
from tests.steps import context_for

TASK = WordProblemTask()
ROW = {
    "problem": "Anna has 8 coins. Anna finds 5 coins. Then Anna has 4 fewer coins than Ben. How many does Ben have?",
    "solution": "Anna has 8+5=13 coins.\nBen has 13+4=17 coins.\n#### 17",
    "answer": "17",
    "suggested": "+-",
}
MISLED = "Anna has 8+5=13 coins.\nBen has 13-4=9 coins.\n#### 9"


@pytest.fixture(scope="module")
def words():
    return load_policy("words").eval()


@pytest.fixture
def group(words):
    """A right response and two that take the operation that the word suggests, one of them after a slip."""
    texts = [ROW["solution"], MISLED, "Anna has 8+5=12 coins.\nBen has 12-4=8 coins.\n#### 8", MISLED]
    ids = [[*words.tokenizer(text)["input_ids"], words.end_token_ids[0]] for text in texts]
    return rollouts(build_batch(words, [TASK.prompt(ROW)], 4, ids, [True] * 4), torch.tensor([1.0, 0.0, 0.0, 0.0]))


@pytest.mark.parametrize("credit", [TreeAdvantage(), Uniform()], ids=["tree", "uniform"])
def test_figures_of_wrong_rollouts_do_not_need_an_advantage(words, group, credit):
    """Without a baseline that of wrong rollouts is 0. What the tree adds is the same."""
    found = []
    for baseline in (1.0, 0.0):
        batch = group.replace(advantages=group_advantages(group.rewards, 4, baseline=baseline))
        weights = credit(words, batch, context_for(words))
        # Scores of its own, which do not need an advantage either.
        weights = replace(weights, scores=batch.response_mask.float() if weights.scores is None else weights.scores)
        figures = batch_figures(batch, batch, weights, words.tokenizer)
        found.append((figures["credit/fork_auroc_slip"], weights.scores.tolist()))
    assert found[0] == found[1]
    assert found[0][0] == (0.5 if isinstance(credit, Uniform) else 1.0)
