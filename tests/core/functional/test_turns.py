"""Where turns begin, and what one is worth beside others, on rows that fit on a sheet of paper."""

import torch

from grail_lightning.core.functional.advantages import (
    existing_turns,
    relative,
    spread_turns,
    sum_by_turn,
    turn_numbers,
    turn_starts,
)

# Row 0: a turn of 2 tokens, an answer of 1, an empty turn 1, turn 2. Row 1: one token, then padding. Row 2: no token.
MASK = torch.tensor([[1, 1, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
TURN = torch.tensor([[0, 0, 0, 2, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]])


def test_turns_are_found_between_what_was_not_sampled():
    numbers = turn_numbers(MASK, TURN)
    assert numbers.tolist() == [[0, 0, -1, 2, -1], [0, -1, -1, -1, -1], [-1] * 5]
    assert existing_turns(numbers).tolist() == [[True] * 3, [True, False, False], [False] * 3]
    assert turn_starts(numbers, 3).tolist() == [[0, 3, 3], [0, 5, 5], [5, 5, 5]], "an empty turn begins with the next"
    values = torch.arange(15.0).reshape(3, 5)
    assert sum_by_turn(values, numbers, 3).tolist() == [[1, 0, 3], [5, 0, 0], [0, 0, 0]]
    spread = spread_turns(torch.tensor([[7.0, 8, 9]] * 3), numbers)
    assert spread.tolist() == [[7, 7, 0, 9, 0], [7, 0, 0, 0, 0], [0] * 5]


def test_without_turns_a_row_is_one_and_rows_without_tokens_have_none():
    assert turn_numbers(MASK, None).tolist() == [[0, 0, -1, 0, -1], [0, -1, -1, -1, -1], [-1] * 5]
    for shape, exists in (((2, 3), [[False], [False]]), ((2, 0), [[False], [False]]), ((0, 3), [])):
        assert existing_turns(torch.full(shape, -1)).tolist() == exists


def test_values_are_compared_with_those_of_their_key():
    values = torch.tensor([[1, 3, 5, 99], [0.1 + 0.2, 0.3, 0.3, 7]], dtype=torch.float64)
    key, counted = torch.tensor([[4, 4, 4, 4], [9, 9, 9, 2]]), values < 99
    # 1 3 5: mean 3, unbiased deviation 2. Values that are equal up to rounding, and a single one, have exactly 0.
    assert relative(values, key, counted).tolist() == [[-2, 0, 2, 0], [0, 0, 0, 0]]
    expected = [[-2 / 2.0001, 0, 2 / 2.0001, 0], [0, 0, 0, 0]]
    assert relative(values, key, counted, standardise=True).tolist() == expected
