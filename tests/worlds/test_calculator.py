"""The calculator: the scores of its turns by a worked solution, and its states."""

import pytest

from grail_lightning.worlds.sums.calculator import Calculator
from grail_lightning.worlds.words.task import WordProblemSpace


def begun(**row):
    environment = Calculator()
    assert environment.reset(**row) is None
    return environment


def test_each_call_of_a_worked_solution_scores_once():
    row = next(r for r in WordProblemSpace(min_steps=2, max_steps=2, calls=True).sample(20, "train"))
    environment, calls = begun(**row), row["solution"].split("<calculator>")[1:]
    assert environment.score_turn() is None, "a turn without a call has no score"
    for call in calls:
        environment.calculator(call.partition("<")[0])
        assert environment.score_turn() == 1.0
        environment.calculator(call.partition("<")[0])
        assert environment.score_turn() == 0.0
    assert environment.state_key()[-1] == row["answer"]


def test_a_call_that_fails_scores_nothing_and_changes_no_state():
    environment = begun(solution="<calculator>1 + 2</calculator>\n<result>3</result>\n#### 3")
    with pytest.raises(ValueError, match="division by zero"):
        environment.calculator("1/0")
    assert (environment.score_turn(), environment.state_key()) == (0.0, ())
    environment.calculator("4 - 1")
    assert (environment.score_turn(), environment.state_key()) == (1.0, ("3",))


def test_without_a_worked_solution_turns_have_no_score_and_results_keep_their_digits():
    environment = begun(problem="How many?")
    asked = ("+1000000.1 + 0", "123456.78+0.01", "1/3", "-(+2)*2000000.25", "1/8 + 1")
    told = [environment.calculator(text) for text in asked]
    assert told == ["1000000.1", "123456.79", "0.333333333333", "-4000000.5", "1.125"]
    assert environment.score_turn() is None
    environment.reset()
    assert environment.state_key() == ()
