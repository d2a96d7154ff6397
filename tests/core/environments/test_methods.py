"""The methods of an environment that are no tools: `reset`, rewards, scores of turns and keys of states."""

import pytest

from grail_lightning.core.environments.tools import call_number, call_reset, call_state, check_columns
from tests.core.environments.test_tools import Desk, Hostile


class Row:
    """An environment whose methods return what they are told."""

    def __init__(self, **returns):
        self.returns = returns

    def reset(self, question: str, hints: list, level: int = 0, *, seed: int):
        hints.append(1)
        self.given = (question, hints, level, seed)
        return self.returns.get("reset")

    def _give(self, name):
        value = self.returns[name]
        if isinstance(value, BaseException):
            raise value
        return value

    def get_reward(self):
        return self._give("reward")

    async def score_turn(self):
        return self._give("score")

    def state_key(self):
        return self._give("state")


def test_reset_gets_columns_and_a_seed_if_it_names_one():
    row, columns = Row(reset="Go."), {"question": "q", "hints": [], "level": 2}
    assert call_reset(row, columns, seed=7) == "Go."
    assert row.given == ("q", [1], 2, 7)
    assert columns["hints"] == [], "the rollouts of a group share a row"
    assert call_reset(row, columns | {"seed": 5}, seed=7) == "Go."
    assert row.given[3] == 5
    assert call_reset(Desk(), {"number": 4, "other": 1}, seed=7) == "Number 4."
    assert call_reset(Row(), columns, seed=7) is None
    assert call_reset(Row(reset="a\ud800"), columns, seed=7) == "a?", "files take no lone surrogate"


def test_rewards_scores_and_states():
    assert call_number(Desk(), "get_reward") == 0.0
    assert call_number(Hostile(), "get_reward") is call_number(Desk(), "score_turn") is call_state(Desk()) is None
    row = Row(reward=True, score=0.5, state=("a", 1))
    assert (call_number(row, "get_reward"), call_number(row, "score_turn")) == (1.0, 0.5)
    assert call_state(row) == ("a", 1)
    assert call_number(Row(reward=None), "get_reward") is None


ROW = {"question": "q", "hints": []}
WRONG = float("nan"), float("inf"), "1", b"1", 10**400, [1.0], object()


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: check_columns(Row, ["hints"]), "`Row.reset` must take the columns `hints` .*: missing a .*'question'"),
        (lambda: check_columns(Row, [*ROW, "answer"]), "columns `answer`, `hints`, .*'answer'. Add or remove the"),
        (lambda: call_reset(Row(reset=[1]), ROW, seed=7), r"return text, .*parts, or None, but got \[1\] of"),
        (lambda: call_reset(Row(), ROW | {"hints": "a"}, seed=7), "reset` must not fail, but raised AttributeError"),
        (lambda: call_state(Row(state=[1])), r"must return a hashable key, such as a tuple, but got \[1\] of"),
        *[
            (lambda e=e: call_number(Row(reward=e("gone")), "get_reward"), f"must not fail, .* {e.__name__}: gone")
            for e in (OSError, SystemExit)
        ],
        *[(lambda w=w: call_number(Row(reward=w), "get_reward"), "must return a finite number or None") for w in WRONG],
        (lambda: call_number(Row(score="1"), "score_turn"), "must return a finite number or None"),
    ],
)
def test_what_an_environment_must_not_do_is_told_in_one_line(ask, message):
    check_columns(Row, ROW)
    check_columns(Desk, ["anything"])
    with pytest.raises(ValueError, match=message):
        ask()
