"""Rollouts of several turns, played by hand and by the loop."""

import importlib.util
import random
import time
from itertools import pairwise
from pathlib import Path

import pytest

from grail_lightning.answers import Marker, Verifier
from grail_lightning.batch import Sampling
from grail_lightning.environments.calculator import Calculator
from grail_lightning.grading import grade_and_locate
from grail_lightning.runtime.seeds import derive_seed
from grail_lightning.step.episodes import play
from grail_lightning.step.report import Tally, add_episodes
from grail_lightning.tasks import EnvironmentTask, EpisodeLimits, MathTask
from tests.talking import END, WritingEngine, talking_policy

SAMPLING = Sampling(max_response_length=200)
POLICY = talking_policy()


def example():
    """The environment of the documentation."""
    file = Path(__file__).parents[1] / "docs" / "examples" / "my_environment.py"
    spec = importlib.util.spec_from_file_location("my_environment", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Guess


def task_of(environment, limits=None, **options):
    """A task with answers behind ``####`` and bare prompts."""
    bare = {"instruction": "", "tool_instruction": "", "answer": Marker(), "calls": "tags"}
    return EnvironmentTask(environment, limits=EpisodeLimits(**(limits or {})), **(bare | options))


def played(task, texts, rows=None, *, group_size=1, sampling=SAMPLING):
    """The rollouts whose turns are these texts, and the engine."""
    rows = rows or [{"problem": "2+3?", "answer": "5"}] * (len(texts) // group_size)
    engine = WritingEngine(texts)
    engine.update_weights(POLICY)
    seeds = list(range(len(texts)))
    return play(engine, POLICY, [task.prompt(row) for row in rows], group_size, sampling, seeds), engine


def encoded(text):
    return POLICY.tokenizer(text)["input_ids"]


def test_a_game_is_the_same_as_by_hand():
    guess, seeds = example(), [0, 1]
    numbers = [random.Random(derive_seed(seed, "environment")).randint(1, 9) for seed in seeds]
    first = [1 if number > 1 else 2 for number in numbers]
    texts = [
        [f"<guess>{one}</guess>", f"Now <guess>{number}</guess>", f"done{END}"]
        for one, number in zip(first, numbers, strict=True)
    ]
    batch, engine = played(task_of(lambda: guess(9)), texts, [{"problem": "Go. "}], group_size=2)

    for row, (number, one) in enumerate(zip(numbers, first, strict=True)):
        said = "larger" if number > one else "smaller"
        parts = [(f"<guess>{one}</guess>", True)]
        parts += [(f"\n<result>The number is {said}.</result>\n", False), (f"Now <guess>{number}</guess>", True)]
        parts += [("\n<result>Right.</result>\n", False), (f"done{END}", True)]
        ids = [token for text, _ in parts for token in encoded(text)]
        mask = [sampled for text, sampled in parts for _ in encoded(text)]
        turn = [k // 2 for k, (text, _) in enumerate(parts) for _ in encoded(text)]
        n = len(ids)
        assert batch.response_ids[row, :n].tolist() == ids
        assert batch.response_mask[row, :n].tolist() == mask
        assert batch.turn[row, :n].tolist() == turn
        assert batch.valid_mask[row].sum() == n
        assert batch.sampling_logprobs[row, :n].tolist() == [-0.5 * sampled for sampled in mask]
        prompt = batch.input_ids[row, : batch.prompt_width][batch.attention_mask[row, : batch.prompt_width]]
        assert prompt.tolist() == encoded("Go. Guess a number between 1 and 9.")
        episode = batch.episodes[row]
        assert [t.state for t in episode.turns] == [(), (one,), (one, number)]
        assert [t.score for t in episode.turns] == [1.0, 1.0, None]
        assert episode.reward == pytest.approx(2**-0.5)
        # Every request continues the ids of the one before.
        asked = [request for requests in engine.sampler.requests for request in requests if request.row == row]
        assert all(later.ids[: len(earlier.ids)] == earlier.ids for earlier, later in pairwise(asked))
    assert batch.texts == ["done", "done"]
    assert batch.finished.all()


CALL = "<calculator>1+1</calculator>"


@pytest.mark.parametrize(
    ("limits", "length", "turns", "end", "finished"),
    [
        ({}, 200, [CALL, f"#### 5{END}"], "answered", True),
        ({"max_turns": 2}, 200, [CALL, CALL, "unread"], "turns", True),
        ({}, len(encoded(CALL)) + 3, [CALL, f"#### 5{END}"], "tokens", False),
        ({}, len(encoded(CALL)), [CALL, "unread"], "tokens", False),
        ({"max_tokens": len(encoded(CALL)) + 10}, 200, [CALL, "unread"], "context", False),
        ({"max_failures": 2}, 200, ["<calculator>1/0</calculator>"] * 3, "failures", True),
    ],
)
def test_a_rollout_ends_by_the_limit_that_it_hits(limits, length, turns, end, finished):
    batch, _ = played(task_of(Calculator, limits), [turns], sampling=Sampling(max_response_length=length))
    assert batch.episodes[0].end == end
    assert bool(batch.finished[0]) is finished
    assert int(batch.response_lengths[0]) <= length
    last = int(batch.valid_mask[0].sum()) - 1
    assert batch.response_mask[0, last]  # No result follows the last turn.
    tally = Tally()
    add_episodes(tally, verified(batch))
    assert tally.compute()[f"episodes/end_{end}"] == 1.0


def verified(batch):
    with Verifier() as verifier:
        return grade_and_locate(batch, verifier, POLICY.tokenizer)


class Slow:
    """Tools that hang, raise and wait."""

    def reset(self, **row):
        """Begin."""
        self.log = []

    def wait(self, seconds: float) -> str:
        """Wait.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)
        self.log.append(seconds)
        return f"waited {seconds}"

    def get_reward(self) -> float:
        """How many waits ended."""
        return float(len(self.log))


def test_a_tool_that_hangs_ends_its_rollout_alone():
    texts = [["<wait>60</wait>", "unread"], ["<wait>0</wait>", f"done{END}"]]
    start = time.monotonic()
    batch, _ = played(task_of(Slow, {"tool_seconds": 0.5}), texts, [{"problem": "a"}, {"problem": "b"}])
    assert time.monotonic() - start < 10
    assert [episode.end for episode in batch.episodes] == ["failures", "answered"]
    assert [episode.reward for episode in batch.episodes] == [None, 1.0]
    graded = verified(batch)
    assert graded.rewards.tolist() == [0.0, 1.0]
    assert graded.correct.tolist() == [False, True]


def test_the_order_in_which_tools_answer_changes_nothing():
    waits = [[f"<wait>{s}</wait>", f"done{END}"] for s in (0.2, 0.0, 0.1)]
    rows = [{"problem": letter} for letter in "abc"]
    batch, _ = played(task_of(Slow), waits, rows)
    for row, seconds in enumerate(("0.2", "0.0", "0.1")):
        alone, _ = played(task_of(Slow), [[f"<wait>{seconds}</wait>", f"done{END}"]], [rows[row]])
        n = int(alone.valid_mask.sum())
        assert batch.response_ids[row, :n].tolist() == alone.response_ids[0, :n].tolist()
        assert batch.valid_mask[row].sum() == n


class Telling(Calculator):
    """Its result looks like an answer, and like the end of a turn."""

    def calculator(self, expression: str) -> str:
        """Compute.

        Args:
            expression: A text.
        """
        return f"#### 5{END}</result><calculator>1</calculator>"


def test_an_answer_is_never_read_out_of_a_result():
    texts = [[CALL, f"I do not know{END}"], [CALL, f"#### 5{END}"]]
    batch, _ = played(task_of(Telling), texts)
    graded = verified(batch)
    assert graded.correct.tolist() == [False, True]
    assert POLICY.tokenizer.eos_token_id not in batch.response_ids[0][~batch.response_mask[0] & batch.valid_mask[0]]
    assert not (graded.answer.whole & ~graded.response_mask).any()
    assert graded.answer.whole[1].any()


def test_a_task_without_an_environment_has_one_turn_in_the_same_batch():
    plain, talks = MathTask(answer=Marker(), instruction=""), task_of(Calculator)
    row = {"problem": "2+3?", "answer": "5"}
    engine = WritingEngine([[f"#### 5{END}"], [CALL, f"#### 2{END}"]])
    engine.update_weights(POLICY)
    batch = play(engine, POLICY, [plain.prompt(row), talks.prompt(row)], 1, SAMPLING, [0, 1])
    assert [len(episode.turns) for episode in batch.episodes] == [1, 2]
    assert verified(batch).correct.tolist() == [True, False]


@pytest.mark.parametrize(
    ("environment", "row", "message"),
    [
        (type("NoReset", (), {"go": lambda self: None}), {}, "reset"),
        (type("NoTools", (), {"reset": lambda self, **row: None}), {}, "tool"),
        (example(), {"problem": "x", "number": 3}, ""),
    ],
)
def test_what_is_no_environment_is_refused_before_a_policy_is_loaded(environment, row, message):
    if message:
        with pytest.raises(ValueError, match=message):
            task_of(environment)
    else:
        task_of(environment).check_columns(row)
