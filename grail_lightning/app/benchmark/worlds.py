"""The worlds of the benchmark: problems with a packaged policy, whose rollouts are stored with the package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from grail_lightning.app.benchmark.programs import StoredCode
from grail_lightning.core.data.modules import PromptData
from grail_lightning.core.rollout.batch import Sampling
from grail_lightning.worlds.charts.data import ChartsData
from grail_lightning.worlds.code.data import CodeData
from grail_lightning.worlds.search.data import SearchData
from grail_lightning.worlds.search.task import SearchSpace
from grail_lightning.worlds.sums.data import ArithmeticData
from grail_lightning.worlds.sums.task import ProblemSpace
from grail_lightning.worlds.words.data import WordProblemData
from grail_lightning.worlds.words.task import WordProblemSpace, WordProblemTask

ERRORS = ("slip", "misconception")
BAD_TURN = "bad turn"
DATA = Path(__file__).parent / "data"
"""The folder of the files with the stored rollouts, their labels and the resampled values of their states."""


@dataclass(frozen=True, kw_only=True)
class World:
    """A world of the benchmark.

    Attributes:
        name: Its name on the command line and in results.
        title: What it is, in words.
        policy: The packaged policy, which sampled the rollouts.
        config: The training configuration in ``configs/``, without its suffix.
        length: `sampling.max_response_length`.
        make_data: A function from a number of training problems to the data module.
        turns: Whether rollouts have several turns, in which an environment answers. Labels are then those of turns.
        programs: Whether responses are programs. Labels are then those of statements.
    """

    name: str
    title: str
    policy: str
    config: str
    length: int
    make_data: Callable[[int], PromptData]
    turns: bool = False
    programs: bool = False

    @property
    def errors(self) -> tuple[str, ...]:
        """The kinds of errors that are told apart."""
        return (BAD_TURN,) if self.turns else ERRORS

    @property
    def sampling(self) -> Sampling:
        """The options with which the rollouts were sampled, at temperature 1."""
        return Sampling(max_response_length=self.length)

    @property
    def file(self) -> Path:
        """The file of the stored rollouts."""
        return DATA / f"{self.name}.npz"

    def data(self, number: int) -> PromptData:
        """The data module, whose first training problems are those of the stored rollouts; `number` of them."""
        return self.make_data(number)


def _sums(terms: int, number: int) -> PromptData:
    return ArithmeticData(problems=ProblemSpace(terms, terms), num_train=number)


def _words(number: int) -> PromptData:
    space = WordProblemSpace(min_steps=2, max_steps=3, largest=12, comparisons=True)
    return WordProblemData(problems=space, task=WordProblemTask(), num_train=number)


_WORLDS = (
    World(
        name="sums",
        title="sums of five terms",
        policy="arithmetic",
        config="quickstart",
        length=64,
        make_data=partial(_sums, 5),
    ),
    World(
        name="long_sums",
        title="sums of ten terms",
        policy="chains",
        config="quickstart_chains",
        length=110,
        make_data=partial(_sums, 10),
    ),
    World(
        name="words",
        title="word problems",
        policy="words",
        config="quickstart_words",
        length=64,
        make_data=_words,
    ),
    World(
        name="code",
        title="functions in Python",
        policy="code",
        config="quickstart_code",
        length=80,
        make_data=lambda number: CodeData(task=StoredCode(), num_train=number),
        programs=True,
    ),
    World(
        name="search",
        title="questions with a search tool",
        policy="search",
        config="quickstart_search",
        length=64,
        make_data=lambda number: SearchData(problems=SearchSpace(min_hops=2, max_hops=3), num_train=number),
        turns=True,
    ),
    World(
        name="charts",
        title="questions about pictures of charts",
        policy="charts",
        config="quickstart_charts",
        length=48,
        make_data=lambda number: ChartsData(num_train=number),
        turns=True,
    ),
)
WORLDS = {world.name: world for world in _WORLDS}
DEFAULT_WORLDS = ("sums", "words", "code")


def world_of(name: str) -> World:
    """The world with a name; a ValueError if there is none."""
    if name not in WORLDS:
        raise ValueError(f"`worlds` must be some of {', '.join(WORLDS)}, but got {name!r}.")
    return WORLDS[name]
