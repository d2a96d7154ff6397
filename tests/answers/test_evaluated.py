r"""Answers that are equal to the reference and could still be carried out, and those that are written out."""

import time

import pytest

from grail_lightning.answers import Boxed, Fenced, Marker, Pattern, Verifier
from grail_lightning.answers.evaluated import unevaluated

# ruff: noqa: RUF001 (signs that look alike)

# Each right answer is right without the option; with it those of the second list are refused.
STAYS = {
    "8": ["8", "+8", "8.", "8.0", r"\text{8}", r"**8**", r"8\text{ cm}", "8 apples", "8%", "800%", r"\$8", "eight"],
    "-8": ["-8", "−8", r"-\frac{16}{2}", r"\frac{-16}{2}", r"\frac{16}{-2}", "(-8)", "(-2)^3"],
    "7/2": [r"\frac72", "7/2", r"\dfrac{14}{4}", "3.5", r"3\frac12", "3½", "3 1/2", r"\frac{3.5}{1}", "350%"],
    "1024": ["2^{10}", "1,024", "1{,}024", "1\\,024", "2^10", "2**10", "4^5", r"\left(\frac{1}{2}\right)^{-10}"],
    "1/3": [r"0.\overline{3}", "0.(3)", "0.333...", "3^{-1}"],
    "3628800": ["10!", r"\frac{11!}{11}", r"\frac{20!}{20!}\cdot 10!"],
    "50400": [r"\frac{10!}{3!3!2!}", r"\frac{10!}{3!\cdot3!\cdot2!}", r"\frac{10!}{(3!)^2\cdot2!}", "10!/(3!3!2!)"],
    "10": [r"\binom52", r"\binom{5}{2}", r"\frac{5!}{2!3!}", r"{5 \choose 2}"],
    "300000000": [r"3\cdot10^8", r"3\times 10^{8}", "3e8", "3 x 10^8", r"10^8\cdot 3", r"3\cdot10^8\text{ m/s}"],
    "0.00025": [r"2.5\cdot10^{-4}", "2.5e-4", "2.5×10⁻⁴", r"\frac{1}{4000}", r"2.5\times10^{-4}"],
    "12": ["7+5=12", "x=12", "12=7+5", "x=7+5=12", r"m+n=12", "24/2", r"\frac{24}{2}"],
    "24": ["(B)24", "4!", r"\frac{4!}{1!}"],
    "(12,3)": ["(12,3)", "x=12, y=3", r"\left(\frac{24}{2}, 3\right)"],
    r"\{1,2\}": [r"\{2,1\}", r"\{\frac22, 2\}"],
    "45^\\circ": [r"45", r"45^\circ", r"\frac{\pi}{4}"],
    "25\\text{ m}^2": ["25m^2", "25"],
    "5\\text{ m}": ["x=5 m", "5 m"],
    # Of other references nothing is asked: irrational, symbolic, sets of numbers, matrices, words,
    r"3\sqrt2": [r"3\sqrt2", r"\sqrt{18}", r"3\cdot\sqrt{2}", r"\sqrt{2}+2\sqrt{2}"],
    r"\frac{\pi}{4}": [r"\frac{\pi}{4}", r"\pi/2-\pi/4", r"\frac{3\pi}{12}"],
    r"1+\sqrt2": [r"1+\sqrt2", r"\sqrt{2}+1", r"2-1+\sqrt{2}"],
    "x^2+2x+1": ["(x+1)^2", "x^2+x+x+1"],
    "x>4": ["x>2+2"],
    r"(4,\infty)": [r"(2+2,\infty)"],
    r"\begin{pmatrix}1\\2\end{pmatrix}": [r"\frac12\begin{pmatrix}2\\4\end{pmatrix}"],
    "(1,2)": [r"\frac12\begin{pmatrix}2\\4\end{pmatrix}"],
    "(a+1,2)": ["(a+1,1+1)"],
    # and of references that leave something open themselves.
    "2^{100}-2": ["2^{100}-2", "2^{50}\\cdot2^{50}-2", "2(2^{99}-1)"],
    r"7 \times 9": ["63", "9*7", "60+3"],
    r"\frac{10!}{3!3!2!}": ["50400", r"\frac{10!}{72}"],
}
REFUSED = {
    "12": [
        *("7+5", "7 + 5", "7 + (+5)", "15-3", "15 − 3", "7+5+0", "12+0", r"7+5\text{ cm}", "7+5 apples", "$7+5$"),
        *("3*4", "3×4", "3·4", r"3\times4", r"3\cdot 4", "(3)(4)", "3(4)", "12*1", r"\frac{3*4}{1}", "(3*4)^1"),
        *("--12", "-(-12)", "|-12|", "24÷2", r"24\div2", r"\frac{\frac{24}{1}}{2}", "24/2/1", r"\frac{24}{4/2}"),
        *(r"\sqrt{144}", "144^{1/2}", "sqrt(144)", r"\log_2 4096", r"12\cos 0", r"e^{\ln 12}", "12+0i", "x-x+12"),
        *(r"\gcd(24,36)", r"\text{lcm}(3,4)", r"\max(3,12)", r"\lfloor 12.3\rfloor", r"\prod_{k=1}^{1} 12", "3!+3!"),
        *(r"\sum_{k=1}^{3} 4", r"\int_0^{12} 1\,dx", r"\lim_{x\to 12} x", "2^3+4", r"3\cdot2^2", r"2^2\cdot 3"),
        *("12x/x", r"\frac{12\pi}{\pi}", r"\frac{d}{dx}(12x)"),
        *("x=7+5", "7+5=x", "2+10=7+5", "m+n=7+5", r"7+5\approx12", r"7+5\approx8", "(B)7+5"),
        *(r"\boxed{7+5}", "The answer is 7+5.", r"10+\frac42", r"\frac{7+5}{1}", r"\binom{7+5}{1}", "3 \\cdot 10^0+9"),
    ],
    "-8": ["7+5-20", "-(5+3)", "-2*4", "-(2)(4)", r"(-2)\cdot 4"],
    "-1": ["i^2", r"e^{i\pi}", r"\cos\pi"],
    "2": [r"17 \mod 5", r"\lim_{x\to 0}\frac{\sin 2x}{x}"],
    "1/2": [r"\sin 30^\circ", r"\frac14+\frac14", r"\frac12\cdot 1"],
    "5/6": [r"\frac12+\frac13", "1/2+1/3", r"1-\frac16"],
    "2 1/3": ["2+1/3", r"2+\frac13"],
    "92": ["100-8", "100-8%", r"92\cdot 1"],
    "8%": ["10-2%"],
    "1776": ["37*48", r"37\cdot48"],
    "8": ["7+5-3+8-9"],
    "55": [r"\sum_{k=1}^{10} k"],
    "1/3": [r"\int_0^1 x^2\,dx"],
    "120": [r"5\cdot4\cdot3\cdot2\cdot1", r"5\cdot 4!"],
    # A tuple, a list or a set of numbers, member by member.
    "(12,3)": ["(7+5,3)", "x=7+5, y=3", r"(12,\frac{3}{1}+0)"],
    "12, 3": ["7+5, 3", "7+5 and 3"],
    r"\{12,3\}": [r"\{7+5,3\}"],
    "x=12": ["x=7+5", "7+5"],
}


@pytest.fixture(scope="module")
def verifier():
    with Verifier(num_workers=1) as opened:
        yield opened


def _pairs(table):
    return [(gold, answer) for gold, answers in table.items() for answer in answers]


def test_each_answer_is_right_where_nothing_is_asked_of_its_form(verifier):
    pairs = _pairs(STAYS) + _pairs(REFUSED)
    wrong = [pair for pair, verdict in zip(pairs, verifier.grade(pairs), strict=True) if not verdict.correct]
    assert wrong == []


@pytest.mark.parametrize("gold", STAYS)
def test_numbers_that_are_written_out_stay_right(gold):
    assert [answer for answer in STAYS[gold] if unevaluated(gold, answer)] == []


@pytest.mark.parametrize("gold", REFUSED)
def test_what_could_still_be_carried_out_is_told_from_its_value(gold):
    assert [answer for answer in REFUSED[gold] if not unevaluated(gold, answer)] == []


def test_a_sign_of_the_remainder_is_an_operation_whatever_a_verifier_says():
    assert unevaluated("2", r"17 \bmod 5")
    assert not unevaluated("2", r"2 \pmod 5")  # names the modulus


@pytest.mark.parametrize(
    "answer",
    [
        *("1" + "+1" * 900, "1" + "*1" * 900, "-" * 1900 + "8", "(" * 29 + "8" + ")" * 29, "{" * 1000, "2^" * 900),
        *("8!" * 900, r"\frac{1}{" * 29 + "8" + "}" * 29, r"\sum" * 400, "÷" * 1999, "7" * 100_000, "9" * 999 + "!"),
        *(
            "=" * 1999,
            "8=" * 900,
            "x=" * 900 + "8",
            r"\text{" * 300,
            "\0",
            "8" + " " * 1900 + "+0",
            "⅞" * 9,
        ),
    ],
)
@pytest.mark.parametrize("gold", ["8", "(8,9)", "2^{2^{2^{2^{2^2}}}}", "1/0", r"\frac{1}{0}", "5000!", "9" * 5000])
def test_hostile_texts_end_at_once(gold, answer):
    """Also those that no verifier would call right."""
    start = time.process_time()
    unevaluated(gold, answer)
    assert time.process_time() - start < 0.5


def test_forms_of_answers_accept_computations_unless_they_are_told_otherwise():
    assert not any(form.evaluated for form in (Boxed(), Marker(), Pattern("x"), Fenced()))
    made = (Boxed(evaluated=True), Marker(evaluated=True), Pattern("x", evaluated=True), Fenced(evaluated=True))
    assert all(form.evaluated for form in made)
