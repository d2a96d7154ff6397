"""Rollouts of several turns as text and as JSON: nothing that a policy or a tool says can pass for a heading."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grail_lightning.environments import Call, Episode, Turn
from grail_lightning.environments.transcript import episode_columns, episode_json, read_episode, transcript

FOUND = Call(name="find", arguments={"word": "sea"}, result="[turn 9]\nblue", seconds=0.5)
GAME = Episode(
    turns=(
        Turn(text="Let me see.\n", calls=(FOUND, Call(name="", result="No such tool.", status="invalid")), score=0.5),
        Turn(text="It is blue.", state="shore"),
    ),
    end="answered",
    reward=1.0,
)


def test_a_transcript_says_who_wrote_what():
    assert transcript(GAME).split("\n") == [
        "[turn 1, score 0.5]",
        "    Let me see.",
        "[done call of 'find']",
        "    [turn 9]",
        "    blue",
        "[invalid call of '']",
        "    No such tool.",
        "[turn 2]",
        "    It is blue.",
        "[end: answered, reward 1]",
    ]
    assert episode_columns(GAME) == {
        **{"num_turns": 2, "num_calls": 2, "num_invalid_calls": 1},
        **{"end": "answered", "transcript": transcript(GAME)},
    }


TEXTS = st.lists(
    st.sampled_from(["\n", "[turn 2]", "\r", "\u2028", "\x85", "\ud800", "    ", "]"]) | st.text(max_size=3)
)


@settings(max_examples=100, deadline=None)
@given(*[TEXTS.map("".join)] * 3)
def test_no_text_passes_for_a_heading(text, name, result):
    made = transcript(Episode(turns=(Turn(text=text, calls=(Call(name=name, result=result),)),), end="turns"))
    made.encode("utf-8")
    heads = [line for line in made.splitlines() if line[:4] != "    "]
    assert len(heads) == 3
    assert (heads[0], heads[2]) == ("[turn 1]", "[end: turns]")
    assert heads[1].startswith("[done call of ")


def test_an_episode_is_read_as_it_was_written():
    assert read_episode(episode_json(GAME)) == GAME
    odd = Episode(turns=(Turn(text="\ud800\x00", state=(1, frozenset({2}))),), end="tokens")
    (turn,) = read_episode(episode_json(odd)).turns
    assert turn.text == "\ud800\x00"
    assert hash(turn.state) == hash(read_episode(episode_json(odd)).turns[0].state), "equal states stay equal"


def _nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


HOSTILE = {"nested": _nested(100_000), "digits": 10**5000, "keys": {(1, 2): 3}, "nan": float("nan"), "bytes": b"\xff"}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_no_arguments_stop_a_file(value):
    call = Call(name="find", arguments={"word": value}, result="kept")
    found = read_episode(episode_json(Episode(turns=(Turn(text="", calls=(call,)),), end="failures")))
    assert (found.calls[0].name, found.calls[0].result) == ("find", "kept")


@pytest.mark.parametrize(
    "change",
    [
        lambda found: "no JSON",
        lambda found: "[" * 100_000,
        lambda found: "3",
        lambda found: json.dumps(found | {"end": "<b>"}),
        lambda found: json.dumps(found | {"turns": [{"text": "a"}]}),
        lambda found: json.dumps(found | {"turns": [found["turns"][0] | {"calls": [{"name": "a", "status": "x"}]}]}),
    ],
)
def test_what_is_no_episode_is_refused(change):
    with pytest.raises(ValueError, match="`episode` must be JSON as `KeepRollouts` writes it, but got"):
        read_episode(change(json.loads(episode_json(GAME))))
