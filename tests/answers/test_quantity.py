# ruff: noqa: E501 (cases are easier to read in rows)
"""Words around a number: only what a list knows is dropped, and two kinds are never the same."""

import random
import time

import pytest

from grail_lightning.answers.compare import Conventions
from grail_lightning.answers.judge import judge
from grail_lightning.answers.lexicon import CARDINALS, COUNTED, DESCRIBING, MULTIPLES, PARTS, UNITS, singular
from grail_lightning.answers.normalise import GREEK
from grail_lightning.answers.numerals import spelled
from grail_lightning.answers.quantity import NOTHING, Said, agree, classify, split_words
from tests.answers.test_judge import outcome


def test_words_that_are_in_no_list_are_never_dropped():
    draw = random.Random(0)
    known = {*UNITS, *COUNTED, *DESCRIBING}
    for _ in range(300):
        word = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(4, 9)))
        if {word, singular(word)} & known or spelled(word):
            continue
        for text in (f"7 {word}", rf"7\text{{ {word}}}", rf"\text{{{word} }}7", f"7 apples {word}", f"7 {word} apples"):
            for pair in (("7", text), (text, "7"), ("7 apples", text)):
                assert outcome(*pair).status != "right", pair


def test_no_word_that_changes_a_number_is_in_the_list_of_harmless_nouns():
    numbers = {*CARDINALS, *MULTIPLES, *PARTS, *map(str.lower, GREEK), "pi", "score", "couple"}
    directions = {"left", "right", "up", "down", "north", "south", "east", "west", "clockwise", "counterclockwise"}
    values = {"profit", "loss", "gain", "increase", "decrease", "mean", "median", "mode", "area", "perimeter", "radius"}
    assert not COUNTED & (numbers | directions | values)
    assert all(singular(noun) == noun for noun in COUNTED), "the list has singulars"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("cm^2", Said("cm^2")),
        ("square centimeters", Said("cm^2")),
        ("kg m/s^2", Said("kg*m*s^-2")),
        ("newtons", Said("kg*m*s^-2")),
        ("miles per hour", Said("h^-1*mi")),
        ("red apples in total", Said("?red apple")),
        ("apples left", Said("?apple", qualifier="left")),
        ("units left", Said("unit", qualifier="left", mild=False)),
        ("years old", Said("year", qualifier="old")),
        ("% profit", Said("%", qualifier="profit", mild=False)),
        ("° clockwise", Said("deg", qualifier="clockwise", mild=False)),
        ("in total", NOTHING),
        ("theta", Said("?theta", known=False)),
    ],
)
def test_what_words_say(words, said):
    assert classify(words) == said


def test_kinds_agree_with_themselves_and_with_a_bare_number_and_with_no_other():
    kinds = ["cm", "m", "cm^2", "kg", "s", "h", "%", "deg", "dollar", "euro", "gbp", "?apple", "?orange", "mol", "j"]
    for one in kinds:
        for two in kinds:
            assert agree(Said(one), Said(two)) is (one == two)
        assert agree(Said(one), NOTHING)
        assert not agree(Said(one), NOTHING, missing=False)
        assert not agree(Said(one, known=False), NOTHING)
    assert agree(Said("unit^2"), Said("cm^2"))
    assert agree(Said("pound"), Said("lb"))
    assert agree(Said("pound"), Said("gbp"))
    assert not agree(Said("lb"), Said("gbp"))
    assert agree(Said("dollar"), Said("dollar*h^-1"))
    assert not agree(Said("km"), Said("h^-1*km"))


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("twenty-one", "21"), ("one hundred and five", "105"), ("two thousand twenty-four", "2024"), ("minus seven", "-7"), ("a dozen", "12"),
        ("three million", "3000000"), ("two thirds", r"\frac{2}{3}"), ("two and a half", r"\frac{5}{2}"), ("half", r"\frac{1}{2}"), ("three point two", r"\frac{16}{5}"),
    ],
)  # fmt: skip
def test_numbers_in_words(words, number):
    assert spelled(words) == (number, "")


def test_words_that_are_no_number_stay():
    assert [spelled(text) for text in ("the third", "one, two", "second", "once", "Toone", "tenor")] == [None] * 6
    assert outcome("line", r"\text{a line}").status == "right", "no quotient of letters"
    assert split_words(r"7\text{ dozen eggs}") == ("84", Said("?egg"))


def test_numbers_that_are_close_are_not_equal_however_large_they_are():
    for digits in (50, 200, 1000):
        root = rf"\sqrt{{10^{{{2 * digits}}}+1}}"
        assert outcome(f"10^{{{digits}}}", root).status == "wrong"
        assert outcome(rf"\sqrt{{10^{{{2 * digits}}}}}", f"10^{{{digits}}}").status == "right"
    assert outcome("1", r"\sqrt{1+10^{-400}}").status == "wrong"
    assert outcome("0", r"\sin \pi").status == "right", "rounding is no difference"
    assert outcome(r"\sqrt{10^{9000}+1}", r"\sqrt{10^{9000}+2}").status == "capped"


def test_long_answers_of_words_take_less_than_a_second():
    pieces = [
        "one hundred ",
        "apples per ",
        r"\text{a}",
        "the ",
        "1'000",
        "x=1,",
        "(1,2)+",
        r"\vec{a}+",
        "1 and a ",
        "** 1",
    ]
    for piece in pieces:
        text = piece * (1990 // len(piece))
        start = time.process_time()
        judge("x=1, y=2", text, Conventions())
        judge(text, "4", Conventions())
        assert time.process_time() - start < 1, piece


def test_a_long_factor_of_many_entries_takes_little_time():
    digits = "9" * 990
    rows = r"1&2\\" * 190
    for text in (rf"{digits}\begin{{pmatrix}}{rows}\end{{pmatrix}}", f"{digits}({'1,' * 480}1)"):
        start = time.process_time()
        judge("(1,2)", text, Conventions())
        judge(text.replace("1", "3"), text, Conventions())
        assert time.process_time() - start < 1, text[985:1010]
    assert outcome(r"\begin{pmatrix}20\\40\end{pmatrix}", r"10\begin{pmatrix}2\\4\end{pmatrix}").status == "right"


def test_numbers_beyond_floats_and_factorials_of_many_digits_are_no_fault_and_take_little_time():
    pairs = [
        (r"\sin(1)10^{2900}", r"10^{2900}\sin(\frac{2}{2})"),
        (r"(\sqrt2)!+10^{300}", r"10^{300}+(\frac{2}{\sqrt2})!"),
    ]
    for pair in pairs:
        start = time.process_time()
        assert outcome(*pair).status in ("wrong", "capped"), pair
        assert time.process_time() - start < 5, pair
    assert outcome(r"5!\sqrt2\cdot10^{30}", r"\sqrt2\cdot120\cdot10^{30}").status == "right"
