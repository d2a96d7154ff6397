"""What a rollout does with its environment beside its tools: `close`, limits of seconds and calls, outside rewards."""

import signal
import threading
import time
import warnings
from dataclasses import replace

import pytest
import torch

from grail_lightning import EnvironmentTask, EpisodeLimits, RewardSpec
from grail_lightning.answers import Verifier
from grail_lightning.core.engines.base import given_batch
from grail_lightning.core.environments.calls import ParsedCall
from grail_lightning.core.environments.tools import ToolSet
from grail_lightning.core.records.task import problem_id
from grail_lightning.core.rollout.grading import grade_and_locate
from grail_lightning.core.step import episodes
from grail_lightning.core.step.collect import _record
from tests.core.environments.test_dialogue import _model
from tests.core.environments.test_tools import run
from tests.test_episodes import POLICY, played, task_of
from tests.tool_calling_policy import END
from tests.written_turns import WritingEngine

SAY = "<say>{}</say>"


class Room:
    """It keeps which of its methods were called, and in which threads."""

    made: list["Room"] = []  # noqa: RUF012

    def __init__(self):
        self.log, self.said = [], []
        self.made.append(self)

    def reset(self, wait=0.0, **row):
        """Begin."""
        self.log.append("reset")
        time.sleep(wait)
        if row.get("broken"):
            raise OSError("no room")

    def say(self, text: str) -> str:
        """Say something.

        Args:
            text: What is said; `sleep` takes long.
        """
        self.said.append(text)
        if text == "sleep":
            time.sleep(30)
        return text

    def close(self):
        """Give back what it has."""
        self.log.append("close")  # That of a task, which looks at the class, is the one that the main thread closes.
        assert "reset" not in self.log or threading.current_thread() is not threading.main_thread()


class Paid(Room):
    """It has a reward, during which it is open."""

    def get_reward(self) -> float:
        """How often something was said."""
        assert self.log[-1] != "close"
        self.log.append("get_reward")
        return float(len(self.said))


@pytest.fixture(autouse=True)
def _fresh():
    Room.made.clear()
    episodes._CLOSES_TOLD.clear()


def logs():
    """What became of each environment but the one that a task makes to see its class."""
    return [room.log for room in Room.made[1:]]


def test_an_environment_is_closed_once_behind_its_rewards_and_is_no_tool():
    def last(environments, **columns):
        assert all(room.log[-1] == "get_reward" for room in environments)
        return [float(len(room.said[-1])) for room in environments]

    paid = [RewardSpec(function="environment"), RewardSpec(function=last, weight=10.0)]
    task = task_of(Paid, rewards=paid)
    batch = played([task] * 2, [[SAY.format("ab"), f"Bye.{END}"], [SAY.format("a"), SAY.format("abc"), END]])
    assert logs() == [["reset", "get_reward", "close"]] * 2
    assert batch.rewards.tolist() == [1 + 20.0, 2 + 30.0]
    assert [*task.tools.by_name] == ["say"]
    assert Room.made[0].log == ["close"], "that of the task"


class Broken(WritingEngine):
    """An engine that fails in the second turn."""

    def turns(self, sampling):
        """See `RolloutEngine.turns`."""
        inner = super().turns(sampling)
        return _Failing(inner)


class _Failing:
    def __init__(self, inner):
        self.inner, self.left = inner, 1

    def __enter__(self):
        sample = self.inner.__enter__()

        def turn(requests):
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            return sample(requests)

        return turn

    def __exit__(self, *error):
        return self.inner.__exit__(*error)


def test_environments_are_closed_after_every_error():
    task = task_of(Paid)
    with pytest.raises(KeyboardInterrupt):
        played([task] * 2, [[SAY.format("a"), "unread"]] * 2, make=Broken)
    assert logs() == [["reset", "close"]] * 2
    Room.made[1:] = []
    with pytest.raises(ValueError, match=r"`Paid\.reset` must not fail, but raised OSError: no room"):
        played([task] * 2, [["unread"]] * 2, rows=[{"problem": "a"}, {"problem": "b", "broken": True}])
    assert logs() == [["reset", "close"]] * 2
    Room.made[1:] = []

    def fails(environments):
        raise LookupError("lost")

    with pytest.raises(ValueError, match="`fails given in Python` raised LookupError: lost"):
        played([task_of(Paid, rewards=[fails])], [[END]])
    assert logs()[-1] == ["reset", "get_reward", "close"]


def test_an_environment_whose_tool_hangs_is_closed_and_has_no_reward_outside():
    paid = RewardSpec(function=lambda environments: [float(len(room.said)) for room in environments], name="said")
    task = task_of(Room, {"tool_seconds": 0.3}, rewards=[paid])
    rows = [{"problem": "a"}, {"problem": "b"}]
    batch = played([task] * 2, [[SAY.format("sleep")], [SAY.format("a"), END]], rows)
    assert logs() == [["reset", "close"]] * 2
    assert batch.reward_values["said"].isnan().tolist() == [True, False]
    assert batch.prompts[1].columns["function_rewards"] == {"said": 1.0}


def test_how_often_a_function_failed_is_known_of_one_that_reads_environments_too():
    """The values of two calls, of which the first one fails, come together as those of a refilled batch do."""
    asked = []

    def paid(environments):
        asked.append(len(environments))
        if len(asked) in (1, 3):
            raise ConnectionError("down")
        return [1.0 for _ in environments]

    for retries, shares in ((0, {"failed": 1.0, "retried": 0.0}), (1, {"failed": 0.0, "retried": 1.0})):
        spec = RewardSpec(function=paid, after_retries="none", retries=retries, pause_seconds=0.0)
        task = task_of(Room, {"tool_seconds": 0.3}, rewards=[spec])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = [{"problem": "a"}, {"problem": "b"}]
            batch = played([task] * 2, [[SAY.format("sleep")], [END]], rows)
        assert {name: of.tolist() for name, of in batch.reward_shares.items()} == {
            f"paid/{what}": [share] * 2 for what, share in shares.items()
        }
        (kept,) = _record(batch.select(torch.tensor([1])))["columns"]
        assert kept["function_shares"] == {"paid": shares}
        asked[:] = [0, 0]
        if retries:
            once = replace(batch.prompts[1], columns={"function_shares": {"paid": {"failed": 1.0, "retried": 1.0}}})
            assert problem_id(once) == problem_id(replace(once, columns={}))
            values = task.trl_values([""] * 2, [once, batch.prompts[1]], {})["paid"]()
            assert values.shares == {"failed": 0.5, "retried": 1.0}


class Penalty(Room):
    """It pays the number that the row names."""

    def reset(self, pays=0.0, **row):
        """Begin."""
        self.pays = pays

    def get_reward(self) -> float:
        """A number."""
        return self.pays


def test_a_tool_that_hangs_is_never_the_best_of_its_group():
    hangs = [SAY.format("sleep")]
    format_too = [RewardSpec(function="environment"), RewardSpec(function=lambda r, _: [0.5] * len(r), name="same")]
    for pays, rewards, expected in (
        (-3.0, None, -3.0),
        (2.0, None, 0.0),
        (-3.0, format_too, -2.5),
        (2.0, format_too, 0.5),
    ):
        task = task_of(Penalty, {"tool_seconds": 0.3}, rewards=rewards)
        row = {"problem": "a", "pays": pays}
        batch = played([task], [hangs, [END]], [row], size=2)
        assert batch.rewards[0] == expected
        assert batch.rewards[1] == pays + (0.5 if rewards else 0)


def test_given_responses_of_an_environment_have_no_reward_of_one():
    task = task_of(Paid)
    row = task.prompt({"problem": "a", "response": "Bye."})
    with Verifier() as verifier:
        batch = grade_and_locate(given_batch(POLICY, [row]), verifier, POLICY.tokenizer)
    assert batch.scored.tolist() == [False]
    assert [verdict.status for verdict in batch.verdicts] == ["unscored"]


def test_what_functions_gave_is_kept_with_a_batch_in_flight_and_changes_no_identity():
    paid = RewardSpec(function=lambda environments: [2.0 for _ in environments], name="two")
    task = task_of(Paid, rewards=[paid])
    batch = played([task], [[END]], [{"problem": "a"}])
    (kept,) = _record(batch)["columns"]
    assert kept == {"environment_reward": 0.0, "function_rewards": {"two": 2.0}}
    assert problem_id(batch.prompts[0]) == problem_id(task.prompt({"problem": "a"}))
    assert (batch.rewards.tolist(), batch.correct.tolist()) == ([2.0], [False]), (
        "`get_reward` decides where it is there"
    )


class Stuck(Room):
    """Its `close` fails, or takes long."""

    def reset(self, seconds=0.0, **row):
        """Begin."""
        self.seconds = seconds

    def close(self):
        """Fail."""
        time.sleep(self.seconds)
        raise OSError("no network")

    def get_reward(self) -> float:
        """A number."""
        return 1.0


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0, "`Stuck.close` must not fail, but raised OSError: no network. The run goes on, and further failures"),
        (30.0, "`Stuck.close` did not return within `limits.method_seconds`, 0.5 seconds. The run goes on"),
    ],
)
def test_a_close_that_fails_ends_no_run_and_is_told_once(seconds, said, recwarn):
    task = task_of(Stuck, {"method_seconds": 0.5})
    for _ in range(2):
        batch = played([task] * 2, [[END], [END]], [{"problem": "a", "seconds": seconds}])
        assert batch.rewards.tolist() == [1.0, 1.0]
    (warning,) = [str(w.message) for w in recwarn if "close" in str(w.message)]
    assert warning.startswith(said)


def test_a_slow_reset_ends_the_run_by_its_own_limit_alone():
    row = {"problem": "a", "wait": 0.5}
    batch = played([task_of(Paid, {"tool_seconds": 0.2})], [[END]], [row])
    assert batch.rewards.tolist() == [0.0]
    with pytest.raises(ValueError, match=r"`reset`, .* within `limits.method_seconds`, but one did not in 0.2 seconds"):
        played([task_of(Paid, {"method_seconds": 0.2})], [[END]], [row])
    assert EpisodeLimits().method_seconds == 60.0


class Alarm:
    """It limits itself by a signal, as programs of one thread do."""

    def reset(self, broken=False, **row):
        """Begin."""
        if broken:
            self.ring()

    def ring(self) -> str:
        """Set an alarm."""
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        return "set"

    def get_reward(self) -> float:
        """None."""
        return 0.0


def test_a_method_that_needs_the_main_thread_is_named_with_what_to_do():
    tools = ToolSet(Alarm)
    with pytest.warns(UserWarning, match="The tool `ring` .*main thread alone.*`limits.tool_seconds` limits the time"):
        ((call,),) = run([(tools, Alarm(), [ParsedCall("ring")])])
    assert (call.status, call.result) == (
        "failed",
        "Error: ValueError: signal only works in main thread of the main interpreter",
    )
    run([(tools, Alarm(), [ParsedCall("ring")])])  # A second warning would be an error.
    with pytest.raises(ValueError, match=r"`Alarm.reset` must not fail, .* interpreter\. The methods .* in threads"):
        played([task_of(Alarm)], [[END]], [{"broken": True}])


WRITTEN = '<tool_call>{"name": "say", "arguments": {"text": "abc"}}</tool_call>'
FORMS = {
    "hermes": WRITTEN,
    "llama3": '{"name": "say", "parameters": {"text": "abc"}}',
    "tags": SAY.format("abc"),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_number_and_the_length_of_calls_are_options(form):
    text = FORMS[form]

    def statuses(**limits):
        task = EnvironmentTask(Paid, limits=EpisodeLimits(**limits), calls=form)
        tokenizer = _model("llama3_1" if form == "llama3" else "qwen3")
        dialect = task.dialect(tokenizer, tokenizer.encode, {})
        ((made),) = run([(task.tools, Paid(), dialect.calls(tokenizer(text * 3)["input_ids"]))])
        return [call.status for call in made]

    number = 1 if form == "tags" else 3
    assert statuses() == ["done"] * number
    length = len(text.removeprefix("<tool_call>").removesuffix("</tool_call>")) if form != "tags" else 3
    assert statuses(call_characters=length) == ["done"] * number
    assert set(statuses(call_characters=length - 1)) == {"invalid"}
    if number > 1:
        assert statuses(max_calls=2) == ["done", "done", "invalid"]


def test_a_limit_of_calls_that_lets_none_through_is_refused():
    with pytest.raises(ValueError, match=r"`limits\.max_calls` must be positive, but got 0"):
        EpisodeLimits(max_calls=0)
