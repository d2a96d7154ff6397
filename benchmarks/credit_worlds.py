"""The labelled worlds of benchmarks/credit_quality.py: chains of sums, and word problems.

This module belongs to credit_quality.py and is not run by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grail_lightning.batch import Sampling
from grail_lightning.data import ArithmeticData, PromptData, WordProblemData
from grail_lightning.tasks import ProblemSpace, WordProblemSpace, WordProblemTask

WorldName = Literal["chains", "words"]
GROUP_SIZE = 8  # Unless it is given.


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where rollouts come from.

    Attributes:
        title: What is printed above a table.
        policy: The packaged policy that responds.
        data: The problems.
        sampling: The options of the rollouts.
        group_size: The number of rollouts of a problem.
    """

    title: str
    policy: str
    data: PromptData
    sampling: Sampling
    group_size: int = GROUP_SIZE


def setting(world: WorldName, terms: int, num_prompts: int, seed: int) -> Setting:
    """A world with its policy and its test problems.

    Args:
        world: Chains of sums, or word problems.
        terms: The number of terms of a chain.
        num_prompts: The number of test problems.
        seed: Of the choice of problems.
    """
    if world == "words":
        space = WordProblemSpace(min_steps=2, max_steps=3, largest=12, comparisons=True)
        data: PromptData = WordProblemData(num_test=num_prompts, problems=space, seed=seed, task=WordProblemTask())
        return Setting(title="word problems", policy="words", data=data, sampling=Sampling(max_response_length=64))
    # The quickstart's policy knows five terms alone, `chains` 5 to 10, `long_chains` 15 to 20.
    return Setting(
        title=f"chains of {terms} terms",
        policy="arithmetic" if terms == 5 else "chains" if terms <= 10 else "long_chains",
        data=ArithmeticData(num_test=num_prompts, problems=ProblemSpace(terms, terms), seed=seed),
        sampling=Sampling(max_response_length=max(64, 11 * terms)),
    )
