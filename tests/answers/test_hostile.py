# ruff: noqa: E501 (cases are easier to read in rows, and some are about letters that look alike)
"""Hostile texts, and random text in the shape of answers: `grade` returns a verdict for each, and nothing else happens."""

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grail_lightning.answers import Verifier, find_boxes
from grail_lightning.answers.records import STATUSES

HOSTILE = [
    "\0", "3\0", "\ud800", "\udfff3", "\\", "{", "}", "{{{1", "}{", "$", "\\(", "%", "_", "^", "'", "\"", "\u202e3", "3\u0301",
    "1E1000000", "1e-999999", "1E300000", "9" * 5000, "1" * 200_000, "0." + "3" * 100_000, "a" * 200_000, "," * 5000, "(" * 200_000,
    "\\boxed{" * 5000, "1+" * 4000 + "1", "-" * 900 + "1", "!" * 500, "3" + "!" * 900, "x" + "'" * 900, "x^" * 300 + "2", "\\frac" * 300,
    "\\sqrt" * 300 + "2", "|" * 301, "\\pm" * 300 + "1", ",".join(["\\pm 1"] * 200), "(" + ",".join(["\\pm 1"] * 20) + ")",
    "8^{8^{8}}", "8^{8^{8^{8}}}", "12^{12^{12}}", "2^{1000000000}", "2^{-1000000000}", "((8!)!)!", "(10^8)!", "3^{3^{3^{3}}} \\mod 7",
    "\\binom{10^8}{5*10^7}", "\\binom{1000}{500}!", "(x+1)^{1000}", "(p+q+r+s+t)^{70}", "(1+x)^{10^9}", "e^{e^{e^{e^{e}}}}", "\\tan(10^{400})",
    "x^{x^{x^{x^{x}}}}", "\\ln 0", "0^0", "0^{-1}", "1/0", "\\frac{0}{0}", "\\infty-\\infty", "\\sqrt[0]{2}", "\\log_1 2", "\\sqrt[10^9]{2}",
    "\\sum_{n=1}^{200000000}n^n", "\\prod_{n=1}^{1000000} n", "\\int_0^\\infty \\frac{\\cos(y^4)e^{-y^3}}{2+y^7}dy",
    "__import__('os').system('touch {marker}')", "().__class__.__bases__[0].__subclasses__()", "exec(open('{marker}','w'))",
    "\\text{__import__('os').system('touch {marker}')}", "eval(\"open('{marker}','w')\")", "lambda: open('{marker}', 'w')", "\\input{/etc/passwd}",
    "\\write18{touch {marker}}", "$(touch {marker})", "`touch {marker}`", "{0.__class__}", "%s%s%s%n", "<script>", "x=5;dx;x", "NaN", "None", "True",
    "\u0660\u0661\u0662", "\uff11\uff12", "\U0001d7d9", "12\u00a0345", "\u2167", "1\u20442", "\u00bd\u00bd", "\u221e\u221e", "\u221a\u221a\u221a2",
    "0.\\overline{" + "1" * 900 + "}", "0.\\overline{0}", "1\\overline{1}", "\\overline{}", "1 1/0", "1\\frac{0}{0}", "\\begin{pmatrix}\\end{pmatrix}",
    "\\begin{pmatrix}" + "1&" * 400 + "1\\end{pmatrix}", "\\begin{pmatrix}1", "\\{x: x>\\{x: x>1\\}\\}", "\\cup", "(1,2)\\cup", "x<", "<x", "a=b=c=d=e",
    "=", "==", "7==7", "1<2<3<1", "x\\in x", "\\in", "::", "1:2:3:4", "%%", "50%%", "$$$$", "\\$\\$5", "5\\text{", "5\\text{}", "\\text{\\text{}}",
    "1_{2_{3}}", "1_", "10_{1}", "ZZ_{36}", "x_{{{", "\\lfloor", "\\left", "\\left.", "\\middle|", "\\left(\\right]", "1,,2", ";", ";;1", "and", "or and or",
    "1 and", "\\text{and}", "\\or", "3 or", "\\color", "\\color{", "\\phantom{3}", "\\hspace{1cm}", "\\tag{1}", "\\ ", "~", "\\,", "\\!", "&", "\\\\", "#", "@",
]  # fmt: skip


def test_hostile_answers_are_never_right_never_raise_and_execute_nothing(tmp_path):
    marker = tmp_path / "executed"
    hostile = [text.replace("{marker}", str(marker)) for text in HOSTILE]
    assert len(hostile) >= 150
    start = time.perf_counter()
    with Verifier(num_workers=2, timeout_seconds=1.0) as verifier:
        as_prediction = verifier.grade([("4", text) for text in hostile])
        rounds = -(-sum(verdict.status == "timeout" for verdict in as_prediction) // 2)
        verifier.grade([(text, "4") for text in hostile])
        assert not verifier.faults
    assert not any(verdict.correct for verdict in as_prediction)
    assert not marker.exists()
    assert rounds <= 4
    assert time.perf_counter() - start < 45.0


SPELLED = r"""
    \frac \dfrac12 \sqrt \sqrt[3] \left( \right] \{ \} \cup \in \le \ne \pm \infty \pi \cdot \times \circ % \% \$ $ \!
    \mid \\ & \text{min} \text{yes} \mathrm{~m} \overline{3} \begin{pmatrix} \begin{array}{r} \end{array} \boxed{ and or
    ( ) [ ] { } , ; : = < > + - * / ^ _ | ! . ' e i x y 0 1 2 9 10 007 1.5 .25 1e5 1E9999 8_{3}
"""
UNUSUAL = ["\0", "\ud800", "\u00bd", "\u0663", "\u2212", "\U0001d7d9", " ", "\n", "~", "\u202e", "\uff11"]
ATOMS = SPELLED.split() + UNUSUAL
grammar = st.lists(st.sampled_from(ATOMS), max_size=14).map("".join)
anything = st.text(st.characters(), max_size=40)
answers = st.one_of(grammar, grammar, anything)


@pytest.fixture(scope="module")
def verifier():
    with Verifier(num_workers=2, timeout_seconds=2.0, cache_size=100) as opened:
        yield opened


@pytest.mark.parametrize("examples", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_exception_leaves_grade(verifier, examples):
    pair = st.tuples(answers, answers)

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=HealthCheck)
    @given(st.lists(pair, min_size=10, max_size=10))
    def check(pairs):
        verdicts = verifier.grade(pairs)
        assert [(verdict.gold, verdict.prediction) for verdict in verdicts] == pairs
        for (gold, _), verdict in zip(pairs, verdicts, strict=True):
            assert verdict.status in STATUSES
            assert verdict.correct == (verdict.status == "right")
            assert gold.strip() or not verdict.correct  # nothing is equal to an empty reference
        assert not verifier.faults

    check()


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(answers)
def test_an_answer_is_equal_to_itself_unless_it_is_empty_and_its_boxes_stand_one_after_the_other(verifier, text):
    (verdict,) = verifier.grade([(text, text)])
    assert verdict.status == ("right" if text.strip() else "missing")
    end = 0
    for box in find_boxes(text):
        assert end <= box.start < box.content_start <= box.content_stop < box.stop <= len(text)
        end = box.stop


def test_verdicts_of_long_answers_are_not_kept(verifier):
    """They, and their trees, would fill the memory of the parent."""
    long = ("4", "+".join("123456789" * 100))
    verifier.grade([long, ("4", "5")])
    assert ("4", "5") in verifier._cache
    assert long not in verifier._cache
