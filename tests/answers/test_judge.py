# ruff: noqa: E501 (cases are easier to read in rows)
import math
import random
import time
from fractions import Fraction

import pytest

from grail_lightning.answers import answer_classes
from grail_lightning.answers.compare import Conventions
from grail_lightning.answers.judge import judge
from grail_lightning.answers.normalise import balanced, normalise
from grail_lightning.answers.parse import Unreadable, parse
from grail_lightning.answers.values import TooLarge, Undefined, rational

DEFAULT = Conventions()


def outcome(gold, prediction, conventions=DEFAULT):
    """Both halves in this process: first without the slow layers, then with them."""
    return judge(gold, prediction, conventions) or judge(gold, prediction, conventions, slow=True)


@pytest.mark.parametrize(
    ("gold", "prediction", "layer"),
    [
        (r"\frac{3}{8}", r"\dfrac{3}{8}", "string"),
        (r"\frac{3}{8}", "0.375", "number"),
        ("9", "9.0", "number"),
        ("3k", r"3\cdot k", "structure"),
        ("(4,9)", "(4,18/2)", "structure"),
        (r"\sqrt{63}", r"3\sqrt{7}", "symbolic"),
        ("36", r"\sum_{k=1}^{8}k", "math-verify"),
    ],
)
def test_the_verdict_names_the_layer_that_decided(gold, prediction, layer):
    assert outcome(gold, prediction)[:2] == ("right", layer)
    assert (judge(gold, prediction, DEFAULT) is None) is (layer in ("symbolic", "math-verify"))


TOO_LARGE = {
    "long": "1" * 3000, "deep": "(" * 31 + "1" + ")" * 31, "digits": "1" * 1001, "e-notation": "1E1000000", "nul": "3\0",
    "power": "2^{1000000000}", "tower": "8^{8^{8^{8}}}", "factorial of factorial": "((25)!)!", "factorial": "(10^8)!",
    "signs": "-" * 1500 + "1",
}  # fmt: skip


@pytest.mark.parametrize("kind", TOO_LARGE)
def test_what_is_too_large_is_capped_before_it_is_computed_unless_it_is_the_reference(kind):
    assert judge("3", TOO_LARGE[kind], DEFAULT)[:2] == ("capped", "none")
    assert judge(TOO_LARGE[kind], TOO_LARGE[kind], DEFAULT)[:2] == ("right", "string")


def test_powers_beyond_the_cap_are_refused_and_large_ones_are_not():
    assert rational(parse("2^{60000}")) == 2**60000
    with pytest.raises(TooLarge):
        rational(parse("2^{200000}"))


def test_an_empty_answer_is_missing_and_division_by_zero_is_wrong():
    assert {judge("7", prediction, DEFAULT)[:2] for prediction in ("", " ", "\n\t")} == {("missing", "none")}
    assert outcome("7", r"\frac{7}{0}").status == "wrong"
    with pytest.raises(Undefined):
        rational(parse(r"\frac{7}{0}"))


def test_conventions_can_be_made_stricter():
    strict = Conventions(missing_unit=False, tolerance=0.0)
    for pair in [(r"8\text{ cm}", "8"), ("4/9", "0.44444444")]:
        assert (outcome(*pair).status, outcome(*pair, strict).status) == ("right", "wrong")


def test_tolerance_is_relative_and_only_for_what_no_decimal_can_write():
    # |1/3 - 0.333333| = 1/3 * 1e-6: just within; one digit fewer is not.
    assert outcome(r"\frac{1}{3}", "0.333333").status == "right"
    assert outcome(r"\frac{1}{3}", "0.33333").status == "wrong"
    # 1/8 has an exact decimal, so a near one is wrong however near.
    assert outcome(r"\frac{1}{8}", "0.12500001").status == "wrong"
    assert outcome(r"\frac{1}{3000000000}", "0.0000000003333333").status == "right"
    assert outcome(r"\sqrt{2}", "1.414214").status == "right"
    assert outcome(r"\sqrt{2}", "1.41421").status == "wrong"


def test_exact_values_of_random_arithmetic_agree_with_python():
    # Oracle: Python's own evaluation of the same expression over Fractions, on text that this test wrote itself.
    draw = random.Random(0)
    for _ in range(200):
        numbers = [draw.randint(1, 30) for _ in range(4)]
        signs = [draw.choice("+-*/") for _ in range(3)]
        text = "".join(f"{n}{s}" for n, s in zip(numbers, [*signs, ""], strict=True))
        python = "".join(f"Fraction({n}){s}" for n, s in zip(numbers, [*signs, ""], strict=True))
        assert rational(parse(text)) == eval(python, {"Fraction": Fraction})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"\binom{5}{2}", 10), ("|3-5|", 2), ("2^{-3}", Fraction(1, 8)),
        (r"\sqrt{\frac{4}{9}}", Fraction(2, 3)), (r"0.\overline{142857}", Fraction(1, 7)), ("-2^2", -4), ("2(3)(4)", 24), ("6/2*3", 9), (".5", Fraction(1, 2)),
        ("5!", math.factorial(5)), ("4!/2!", 12),
    ],
)  # fmt: skip
def test_exact_values(text, value):
    assert rational(parse(text)) == value


@pytest.mark.parametrize(
    "text", ["", "1 2", "1+", "(1", r"\frac{1}", r"\sqrt{}", ")", "1..2", r"\int x", "a_", "^2", "x^", "|x", r"\foo"]
)
def test_formulas_outside_of_the_grammar_are_refused(text):
    with pytest.raises((Unreadable, IndexError)):
        parse(text)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        (r"\dfrac{1}{2}", r"\frac{1}{2}"), (r" \left( 1 , 2 \right) ", "(1,2)"), (r"x \leq 3", r"x \le 3"), ("10²³", "10^{23}"),
        (r"1\,000\,000", "1000000"), (r"\textbf{(C)}", "(C)"), ("8.", "8"), ("½", r"\frac{1}{2}"), (r"\operatorname{sin} x", r"\sin x"),
        (r"\boxed{\boxed{3}}", "3"), ("the answer is 5", "5"),
    ],
)  # fmt: skip
def test_spellings_are_made_one(text, normal):
    assert normalise(text) == normal


def test_brackets_of_intervals_may_differ_but_must_close():
    texts = {"[0,1)": True, r"\left\{1\right\}": True, "(1,2": False, "7}{": False, "1)(": False}
    assert {text: balanced(text) for text in texts} == texts


def test_answers_that_say_the_same_are_one_class():
    answers = ["1/2", r"\frac{1}{2}", "0.5", "$0.50$", "2", "1,2", "2, 1", None, "", "  "]
    assert answer_classes(answers) == [0, 0, 0, 0, 1, 2, 2, -1, -1, -1]
    # The slow layers, which could see that these are equal, are asked for neither right nor wrong answers.
    assert len(set(answer_classes(["(x+1)^2", "x^2+2x+1"]))) == 2


def test_classes_of_hostile_answers_take_bounded_time():
    hostile = [
        "9" * 100_000,
        "{" * 50_000,
        r"\frac{" * 2000,
        "10^{10^{10^{10}}}",
        "__import__('os')",
        "\ud800",
        "x" * 3000,
        *(f"({','.join([f'{k}/7'] * 200)})" for k in range(1, 20)),  # Below the caps, and long to read.
    ]
    start = time.monotonic()
    classes = answer_classes([*hostile, *hostile])
    assert classes[: len(hostile)] == classes[len(hostile) :]
    assert len(set(classes)) == len(hostile)
    assert time.monotonic() - start < 10
