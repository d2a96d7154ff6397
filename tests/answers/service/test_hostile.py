# ruff: noqa: E501 (cases are easier to read in rows, and some are about letters that look alike)
import random
import time

from grail_lightning.answers import Verifier

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
    with Verifier(num_workers=2, timeout_seconds=2.0) as verifier:
        as_prediction = verifier.grade([("4", text) for text in hostile])
        rounds = -(-sum(verdict.status == "timeout" for verdict in as_prediction) // 2)
        verifier.grade([(text, "4") for text in hostile])
        assert not verifier.faults
    assert not any(verdict.correct for verdict in as_prediction)
    assert not marker.exists()
    assert rounds <= 4
    assert time.perf_counter() - start < 45.0


def test_random_text_never_raises():
    atoms = [
        "\\frac",
        "{",
        "}",
        "(",
        ")",
        "[",
        "]",
        "\\{",
        "\\}",
        "1",
        "2.5",
        "x",
        "+",
        "-",
        "^",
        "_",
        ",",
        ";",
        "=",
        "<",
        "\\le ",
        "\\text{a b}",
        "%",
    ]
    atoms += [
        "\\sqrt",
        "\\sin ",
        "\\pi ",
        "!",
        "|",
        "/",
        "\\cup ",
        "\\in ",
        "\\pm ",
        ":",
        "'",
        "e",
        "i",
        "\\infty ",
        " ",
        "\\begin{pmatrix}",
        "\\\\",
        "\ud801",
        "é",
    ]
    draw = random.Random(1)
    pairs = [
        ("".join(draw.choices(atoms, k=draw.randint(1, 12))), "".join(draw.choices(atoms, k=draw.randint(1, 12))))
        for _ in range(1500)
    ]
    with Verifier(num_workers=2, timeout_seconds=5.0) as verifier:
        verdicts = verifier.grade(pairs)
        assert not verifier.faults
    known = {"right", "wrong", "missing", "capped", "unparseable", "timeout", "crashed"}
    assert {verdict.status for verdict in verdicts} <= known
    assert all(verdict.correct == (verdict.status == "right") for verdict in verdicts)
