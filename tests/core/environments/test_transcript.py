"""Rollouts of several turns as text and as JSON: nothing that a policy or a tool says can pass for a heading."""

import json
import os
import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grail_lightning.core.records.episode import Episode, ToolCall, Turn, episode_json, read_episode, transcript
from tests.core.environments.test_tools import DEEP

FOUND = ToolCall(name="find", arguments={"word": "sea"}, result="[turn 9]\nblue", seconds=0.5)
GAME = Episode(
    turns=(
        Turn(
            text="Let me see.\n", calls=(FOUND, ToolCall(name="", result="No such tool.", status="invalid")), score=0.5
        ),
        Turn(text="It is blue.", state="shore"),
    ),
    end="answered",
    reward=1.0,
    opening="[turn 8]\nWhich colour?",
)
TRANSCRIPT = """[reset]
    [turn 8]
    Which colour?
[turn 1, score 0.5]
    Let me see.
[done call of 'find']
    [turn 9]
    blue
[invalid call of '']
    No such tool.
[turn 2]
    It is blue.
[end: answered, reward 1]"""


def test_a_transcript_says_who_wrote_what():
    assert transcript(GAME) == TRANSCRIPT


TEXTS = st.lists(
    st.sampled_from(["\n", "[turn 2]", "\r", "\u2028", "\x85", "\ud800", "    ", "]"]) | st.text(max_size=3)
)


@settings(max_examples=50, deadline=None)
@given(*[TEXTS.map("".join)] * 3)
def test_no_text_passes_for_a_heading(text, name, result):
    made = transcript(Episode(turns=(Turn(text=text, calls=(ToolCall(name=name, result=result),)),), end="turns"))
    made.encode("utf-8")
    first, call, last = [line for line in made.splitlines() if line[:4] != "    "]
    assert (first, last) == ("[turn 1]", "[end: turns]")
    assert call.startswith("[done call of ")


def test_an_episode_is_read_as_it_was_written():
    assert read_episode(episode_json(GAME)) == GAME
    locked = Turn(text="", state=threading.Lock())  # It cannot be copied.
    odd = Episode(turns=(Turn(text="\ud800\x00", state=(1, frozenset({2}))), locked), end="tokens")
    (turn, _), (same, _) = (read_episode(episode_json(odd)).turns for _ in range(2))
    assert turn.text == "\ud800\x00"
    assert hash(turn.state) == hash(same.state), "equal states stay equal"


IN_ANOTHER_PROCESS = """
from dataclasses import dataclass
from typing import NamedTuple
from grail_lightning.core.records.episode import Episode, Turn, episode_json

class Hand(NamedTuple):
    cards: frozenset

@dataclass(frozen=True)
class Table:
    hands: tuple

class Named(frozenset):
    pass

words = frozenset(["sea", "shore", "sand", "wave"])
states = words, (1, words), (words,), Hand(words), Table((Hand(words), 2)), frozenset([words, frozenset([3])])
states += (Named(words),)
print(episode_json(Episode(turns=tuple(Turn(text="", state=state) for state in states), end="tokens")))
"""


def test_equal_states_are_equal_in_the_files_of_all_processes():
    """Whose sets have other orders: hashes of texts are drawn when a process begins."""
    found = set()
    for seed in "12345":
        command = [sys.executable, "-c", IN_ANOTHER_PROCESS]
        run = subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True)
        assert not run.stderr
        found.add(tuple(turn.state for turn in read_episode(run.stdout).turns))
    (states,) = found
    assert len(set(states)) == len(states), "states that differ stay apart"
    assert states[1] == "(1, frozenset({'sand', 'sea', 'shore', 'wave'}))"


@pytest.mark.parametrize("value", [DEEP, 10**5000, {(1, 2): 3}, float("nan"), b"\xff"], ids=lambda v: type(v).__name__)
def test_no_arguments_stop_a_file(value):
    call = ToolCall(name="find", arguments={"word": value}, result="kept")
    found = read_episode(episode_json(Episode(turns=(Turn(text="", calls=(call,)),), end="failures")))
    assert (found.calls[0].name, found.calls[0].result) == ("find", "kept")


KNOWN = json.loads(episode_json(GAME))
BAD_CALL = KNOWN["turns"][0] | {"calls": [{"name": "a", "status": "x"}]}


@pytest.mark.parametrize(
    "text",
    [
        *("no JSON", "[" * 100_000, "3"),
        *(json.dumps(KNOWN | change) for change in ({"end": "<b>"}, {"turns": [{"text": "a"}]}, {"turns": [BAD_CALL]})),
    ],
)
def test_what_is_no_episode_is_refused(text):
    with pytest.raises(ValueError, match="`episode` must be JSON as `KeepRollouts` writes it, but got"):
        read_episode(text)
