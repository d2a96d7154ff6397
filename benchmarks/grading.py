r"""Accuracy and strictness of the verifier.

    python benchmarks/grading.py --cases CASES.jsonl --benchmarks FOLDER
    python benchmarks/grading.py --cases CASES.jsonl --kinds --edits 28000
    python benchmarks/grading.py --benchmarks FOLDER --names gsm8k_train math_train --themselves

Three tables. `cases`: hand-labelled pairs, one JSON object a line with `gold`, `pred`, `expected`, `category`; those of
the category `debatable` are left out. `golds`: the references of each benchmark against rewritings of themselves, as
typesetting (`\dfrac`, `\left(`, spaces, `\text`, a full stop) and in another form (a decimal for a fraction and back, a
fraction that is not reduced, `x+0`), the latter for which string equality fails. `near misses`: references with one
sign, digit, bracket, base or exponent changed, and references against others, drawn at random; accepted
pairs are listed, except those that are equal (by sympy, or because both are the same exact number). A benchmark is
`NAME.jsonl` with `answer`.

With `--kinds` the cases are counted by category, beside math-verify alone. `--edits` changes a digit, a sign, a word, a
name or a value of right answers, or adds a word, and lists what is still accepted. `--themselves` grades each reference
of the benchmarks against itself in seven usual rewritings alone.
"""

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from grail_lightning.answers import Verifier
from grail_lightning.answers.normalise import normalise, string_key

NAMES = ("math500", "minerva_math", "aime24", "amc23", "olympiadbench", "college_math")
Rewriting = Callable[[str], str | None]

# --- rewritings -------------------------------------------------------------------------------------------------------

_FRACTION = re.compile(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_NUMBER = r"-?(?:\d+\.?\d*|\.\d+)"
_OPENING, _CLOSING = r"(?<!\\)(?<!\\left)(?<!\\right)[(\[]", r"(?<!\\)(?<!\\left)(?<!\\right)[)\]]"


def _is_formula(gold: str) -> bool:
    """One formula without units, words, lists or relations, which may be put into another formula."""
    bare = re.sub(r"\\[A-Za-z]+", " ", gold)
    return not re.search(r"[.+-]$|\d[eE]|@|\\approx|\\cdots|\\mathbb|\\text|\\mathrm|\\circ|\\%|\\\$|%|[,;:=<>]|\\[lg]eq?|\\in(?:fty)?\b|\\[cp]m\b|\\cup|\\mp|\\pm|\\begin|\\%|_|\\mid|\\[{}]|[\[\]]", gold) and not re.search(r"[A-Za-z]{2}|[A-Za-z]\s+[A-Za-z]{2}|\d\s+\d|\d\s+[A-Z]", bare)  # fmt: skip  # noqa: E501


def is_sentence(gold: str) -> bool:
    return "\n" in gold or re.search(r"(?:(?<![\\A-Za-z])[A-Za-z]{2,}\s+){2,}[A-Za-z]{2,}", gold) is not None


def left_right(gold: str) -> str | None:
    if not re.search(_OPENING, gold) or len(re.findall(_OPENING, gold)) != len(re.findall(_CLOSING, gold)):
        return None
    return re.sub(_CLOSING, r"\\right\g<0>", re.sub(_OPENING, r"\\left\g<0>", gold))


def text_wrapped(gold: str) -> str:
    return rf"\text{{{gold}}}" if re.fullmatch(r"-?[\d.]+|[A-Za-z ]+", gold) else f"$ {gold} $"


def spaced(gold: str) -> str | None:
    return None if r"\text" in gold else re.sub(r"\s*(?<![eE])([=+])\s*", r"\\, \1 \\;", f" {gold} ")


def exact_decimal(gold: str) -> str | None:
    found = re.fullmatch(r"(-?)(?:\\[dt]?frac\{(\d+)\}\{(\d+)\}|(\d+)\s*/\s*(\d+))", gold)
    if found is None or not int(found[3] or found[5]):
        return None
    value = Fraction(int(found[2] or found[4]), int(found[3] or found[5]))
    for places in range(1, 16):
        if (10**places) % value.denominator == 0:
            whole, rest = divmod(int(value * 10**places), 10**places)
            return f"{found[1]}{whole}.{rest:0{places}d}"
    return None


def exact_fraction(gold: str) -> str | None:
    if not re.fullmatch(r"-?\d*\.\d+", gold):
        return None
    value = Fraction(gold)
    return rf"{'-' * (value < 0)}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def whole_as_fraction(gold: str) -> str | None:
    return rf"\frac{{{2 * int(gold)}}}{{2}}" if re.fullmatch(r"-?\d{1,30}", gold) else None


def scientific(gold: str) -> str | None:
    found = re.fullmatch(rf"({_NUMBER})[eE]([+-]?\d+)", gold)
    return rf"{found[1]} \times 10^{{{int(found[2])}}}" if found else None


def root_as_power(gold: str) -> str | None:
    if re.search(r"\\(?:sin|cos|tan|ln|log)", gold):  # where does the argument of `\cos {2}^{1/2} x` end?
        return None
    return re.sub(r"\\sqrt\{(\d+)\}", r"{\1}^{1/2}", gold)


def unreduced(gold: str) -> str:
    return _FRACTION.sub(lambda found: rf"\frac{{{3 * int(found[1])}}}{{{3 * int(found[2])}}}", gold)


TYPESETTING: dict[str, Rewriting] = {
    "dfrac": lambda gold: gold.replace(r"\frac", r"\dfrac"),
    "left right": left_right,
    "spaces": spaced,
    "text": text_wrapped,
    "full stop": lambda gold: f"{gold}.",
    "all of these": lambda gold: f"${(left_right(gold) or gold).replace(chr(92) + 'frac', chr(92) + 'dfrac')}$.",
}
FORM: dict[str, Rewriting] = {
    "decimal": exact_decimal,
    "fraction": exact_fraction,
    "whole as fraction": whole_as_fraction,
    "n.0": lambda gold: f"{gold}.0" if re.fullmatch(r"-?\d+", gold) else None,
    "times ten to the": scientific,
    "unreduced": unreduced,
    "root as power": root_as_power,
    "plus zero": lambda gold: f"{gold}+0" if _is_formula(gold) else None,
    "half of twice": lambda gold: rf"\frac{{2\left({gold}\right)}}{{2}}" if _is_formula(gold) else None,
}


def rewritings(gold: str, rules: dict[str, Rewriting]) -> Iterator[tuple[str, str]]:
    seen = {gold}
    for name, rule in rules.items():
        text = rule(gold)
        if text is not None and text not in seen:
            seen.add(text)
            yield name, text


def decided_by_string(gold: str, prediction: str) -> bool:
    return string_key(normalise(gold)) == string_key(normalise(prediction))


# --- near misses ------------------------------------------------------------------------------------------------------


def other_sign(gold: str, draw: random.Random) -> str | None:
    places = [found.start() for found in re.finditer(r"(?<![eE{^])[+-](?=[\d\\A-Za-z( ])", gold)]
    if places:
        place = draw.choice(places)
        return gold[:place] + ("-" if gold[place] == "+" else "+" if place else "") + gold[place + 1 :]
    return f"-{gold}" if re.match(r"[\d.\\]", gold) and _is_formula(gold) else None


def other_digit(gold: str, draw: random.Random) -> str | None:
    places = [found.start() for found in re.finditer(r"\d", gold)]
    if not places:
        return None
    place = draw.choice(places)
    return gold[:place] + str((int(gold[place]) + draw.randint(1, 8)) % 10) + gold[place + 1 :]


def other_bracket(gold: str, draw: random.Random) -> str | None:
    found = re.fullmatch(r"(.*?)([(\[])([^()\[\]]*,[^()\[\]]*?)(\\right)?([)\]])(.*)", gold, re.DOTALL)
    if found is None:
        return None
    swap = {"(": "[", "[": "(", ")": "]", "]": ")"}
    parts = list(found.groups(""))
    place = draw.choice((1, 4))
    parts[place] = swap[parts[place]]
    return "".join(parts)


def other_base(gold: str, draw: random.Random) -> str | None:
    changed = re.sub(r"(?<=\d)_\{?(\d+)\}?$", lambda found: f"_{{{int(found[1]) + 1}}}", gold)
    return changed if changed != gold else None


def other_exponent(gold: str, draw: random.Random) -> str | None:
    places = list(re.finditer(r"\^\{?(-?\d+)\}?", gold))
    if not places:
        return None
    found = draw.choice(places)
    return f"{gold[: found.start()]}^{{{int(found[1]) + 1}}}{gold[found.end() :]}"


NEAR = (other_sign, other_digit, other_bracket, other_base, other_exponent)


UNIT_WORDS = ["cm", "m", "ft", "inches", "seconds", "hours", "days", "kg", "dollars", "cents", "percent", "years"]
NUMBER_WORDS = ["hundred", "million", "lakh", "dozen", "half", "thirds", "sevenths", "tenths", "squared", "theta", "pi"]
OTHER_WORDS = ["apples", "boys", "left", "up", "north", "clockwise", "profit", "loss", "more", "wrong", "not"]


def changed_digit(text: str, draw: random.Random) -> str | None:
    return other_digit(text, draw)


def changed_sign(text: str, draw: random.Random) -> str | None:
    return other_sign(text, draw)


def changed_word(text: str, draw: random.Random) -> str | None:
    words = list(re.finditer(r"(?<![\\A-Za-z{])[A-Za-z]{3,}|(?<=text\{)[A-Za-z ]+", text))
    if not words:
        return None
    found = draw.choice(words)
    return text[: found.start()] + draw.choice(UNIT_WORDS + NUMBER_WORDS + OTHER_WORDS) + text[found.end() :]


def added_word(text: str, draw: random.Random) -> str:
    word = draw.choice(NUMBER_WORDS + OTHER_WORDS)
    return draw.choice((rf"{text} {word}", rf"{text}\text{{ {word}}}", rf"\text{{{word} }}{text}"))


def swapped_names(text: str, draw: random.Random) -> str | None:
    names = sorted({*re.findall(r"(?<![\\A-Za-z])[a-zA-Z](?![A-Za-z])", text)})
    if len(names) < 2:
        return None
    one, two = draw.sample(names, 2)
    return re.sub(rf"(?<![\\A-Za-z])[{one}{two}](?![A-Za-z])", lambda name: two if name[0] == one else one, text)


def swapped_values(text: str, draw: random.Random) -> str | None:
    numbers = list(re.finditer(r"\d+", text))
    if len(numbers) < 2:
        return None
    one, two = sorted(draw.sample(numbers, 2), key=lambda found: found.start())
    return f"{text[: one.start()]}{two[0]}{text[one.end() : two.start()]}{one[0]}{text[two.end() :]}"


EDITS = (changed_digit, changed_sign, changed_word, added_word, swapped_names, swapped_values)


def equal_after_all(pair: tuple[str, str]) -> bool:
    """Whether sympy finds the two equal, with another parser than the verifier's own."""
    import sympy
    from latex2sympy2_extended import latex2sympy

    try:
        one, two = (latex2sympy(text) for text in pair)
        return bool(one == two or sympy.simplify(one - two) == 0)
    except Exception:
        return False


# --- tables -----------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def share(part: int, whole: int) -> str:
    return f"{part}/{whole} ({part / max(whole, 1):.2%})"


def cases_table(path: Path, verifier: Verifier) -> None:
    rows = [row for row in read(path) if row["category"] != "debatable"]
    verdicts = verifier.grade([(str(row["gold"]), str(row["pred"])) for row in rows])
    expected = [bool(row["expected"]) for row in rows]
    wrong = [(row, v) for row, v, wanted in zip(rows, verdicts, expected, strict=True) if v.correct != wanted]
    accepts = sum(verdict.correct for _, verdict in wrong)
    print(f"\ncases: {len(rows)} pairs without `debatable`, {sum(expected)} of them equal")
    print(f"  right {share(len(rows) - len(wrong), len(rows))}, false accepts {accepts}, misses {len(wrong) - accepts}")
    print(f"  {dict(Counter(verdict.status for verdict in verdicts))}")
    for row, verdict in wrong:
        kind = "FALSE ACCEPT" if verdict.correct else "miss"
        print(f"  {kind} {row['category']}: {row['gold']!r} | {row['pred']!r} | {verdict.status}, {verdict.layer}")


def accepted_by_math_verify(pair: tuple[str, str]) -> bool:
    """What math-verify alone says of a pair, each side as its whole text in dollar signs or a box."""
    from math_verify import parse, verify

    try:
        gold, prediction = (parse(text, parsing_timeout=None) for text in (f"${pair[0]}$", rf"\boxed{{{pair[1]}}}"))
        return bool(verify(gold, prediction, timeout_seconds=None))
    except Exception:
        return False


def kinds_table(path: Path, verifier: Verifier) -> None:
    rows = [row for row in read(path) if row["category"] not in ("debatable", "pathological")]
    pairs = [(str(row["gold"]), str(row["pred"])) for row in rows]
    ours, theirs = [verdict.correct for verdict in verifier.grade(pairs)], list(map(accepted_by_math_verify, pairs))
    print("\ncases by kind: pairs, then false accepts and misses of the verifier, and of math-verify alone")
    for kind in [*sorted({row["category"] for row in rows}), "all"]:
        places = [k for k, row in enumerate(rows) if kind in (row["category"], "all")]
        wanted = [bool(rows[k]["expected"]) for k in places]
        counts = []
        for verdicts in (ours, theirs):
            found = [verdicts[k] for k in places]
            counts.append(sum(is_right and not right for is_right, right in zip(found, wanted, strict=True)))
            counts.append(sum(right and not is_right for is_right, right in zip(found, wanted, strict=True)))
        print(f"  {kind:<24} {len(places):>4}   {counts[0]:>3} {counts[1]:>3}   {counts[2]:>3} {counts[3]:>3}")


def golds_table(names: dict[str, list[str]], verifier: Verifier) -> None:
    for title, rules in (("typesetting", TYPESETTING), ("another form", FORM)):
        print(f"\ngolds against themselves, rewritten: {title}")
        for name, golds in names.items():
            made = [(rule, gold, text) for gold in golds for rule, text in rewritings(gold, rules)]
            verdicts = verifier.grade([(gold, text) for _, gold, text in made])
            by_string = [decided_by_string(gold, text) for _, gold, text in made]
            hard = [v.correct for v, easy in zip(verdicts, by_string, strict=True) if not easy]
            plain = [v.correct for v, (_, gold, _) in zip(verdicts, made, strict=True) if not is_sentence(gold)]
            layers = dict(Counter(v.layer for v in verdicts if v.correct).most_common())
            print(
                f"  {name:<14} accepted {share(sum(v.correct for v in verdicts), len(made))}; string decides "
                f"{sum(by_string) / max(len(made), 1):.1%}; of the others {share(sum(hard), len(hard))}; "
                f"sentences aside {share(sum(plain), len(plain))}; {layers}"
            )
            for (rule, gold, text), verdict in zip(made, verdicts, strict=True):
                if not verdict.correct:
                    print(f"    miss ({rule}): {gold!r} | {text!r} | {verdict.status}, {verdict.layer}")


THEMSELVES: dict[str, Callable[[str], str]] = {
    "full stop": lambda gold: f"{gold}.",
    "formula": lambda gold: rf"\( {gold} \)",
    "sentence": lambda gold: f"The answer is ${gold}$.",
    "bold": lambda gold: f"**{gold}**",
    "box": lambda gold: rf"\boxed{{{gold}}}",
    "dfrac": lambda gold: gold.replace(r"\frac", r"\dfrac"),
    "text": text_wrapped,
}


def themselves_table(names: dict[str, list[str]], verifier: Verifier) -> None:
    print("\nreferences against themselves in usual rewritings")
    for name, golds in names.items():
        made = [(rule, gold, rewrite(gold)) for gold in dict.fromkeys(golds) for rule, rewrite in THEMSELVES.items()]
        verdicts = verifier.grade([(gold, text) for _, gold, text in made])
        lost = [row for row, verdict in zip(made, verdicts, strict=True) if not verdict.correct]
        print(f"  {name:<14} {len(made)} pairs, lost {len(lost)}")
        for rule, gold, text in lost:
            print(f"    lost ({rule}): {gold!r} | {text!r}")


def near_table(names: dict[str, list[str]], verifier: Verifier) -> None:
    print("\nnear misses and shuffled references: what is accepted")
    draw = random.Random(0)
    for name, golds in names.items():
        changes = ((change.__name__.removeprefix("other_"), g, change(g, draw)) for g in golds for change in NEAR)
        made = [(rule, gold, text) for rule, gold, text in changes if text is not None]
        made += [("shuffled", gold, draw.choice(golds)) for gold in golds for _ in range(3)]
        made = [(rule, gold, text) for rule, gold, text in made if gold.strip() != text.strip()]
        verdicts = verifier.grade([(gold, text) for _, gold, text in made])
        accepted = [(made[k], v) for k, v in enumerate(verdicts) if v.correct]
        doubtful = [(row, v) for row, v in accepted if not equal_after_all(row[1:])]
        print(f"  {name:<14} {len(made)} pairs {dict(Counter(rule for rule, *_ in made))}: accepted {len(accepted)}, "
              f"equal after all {len(accepted) - len(doubtful)}, to look at {len(doubtful)}")  # fmt: skip
        for (rule, gold, text), verdict in doubtful:
            print(f"    look ({rule}): {gold!r} | {text!r} | {verdict.layer}")


def edits_table(pairs: list[tuple[str, str]], number: int, verifier: Verifier) -> None:
    """Random edits of right answers: those that are accepted are listed, unless SymPy finds the two equal."""
    draw, made = random.Random(0), []
    while len(made) < number:
        gold, answer = draw.choice(pairs)
        edit = draw.choice(EDITS)
        text = edit(answer, draw)
        if text is not None and text.strip() not in (answer.strip(), gold.strip()):
            made.append((edit.__name__, gold, answer, text))
    verdicts = verifier.grade([(gold, text) for _, gold, _, text in made])
    accepted = [row for row, verdict in zip(made, verdicts, strict=True) if verdict.correct]
    doubtful = [row for row in accepted if not equal_after_all((row[1], row[3]))]
    print(f"\nedits: {len(made)} pairs {dict(Counter(name for name, *_ in made))}")
    print(f"  accepted {len(accepted)}, to look at {len(doubtful)}")
    for name, gold, answer, text in doubtful:
        print(f"    look ({name}): {gold!r} | {text!r} | from {answer!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, help="hand-labelled pairs")
    parser.add_argument("--benchmarks", type=Path, help="folder of NAME.jsonl files")
    parser.add_argument("--names", nargs="+", default=NAMES, help="which of them")
    parser.add_argument("--kinds", action="store_true", help="count the cases by category, beside math-verify")
    parser.add_argument("--edits", type=int, default=0, help="so many random edits of the cases' right answers")
    parser.add_argument("--themselves", action="store_true", help="the references against themselves alone")
    parser.add_argument("--workers", type=int, default=2, help="worker processes")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds for one pair")
    options = parser.parse_args()
    with Verifier(num_workers=options.workers, timeout_seconds=options.timeout, cache_size=1 << 18) as verifier:
        if options.cases:
            cases_table(options.cases, verifier)
            if options.kinds:
                kinds_table(options.cases, verifier)
            if options.edits:
                rows = [row for row in read(options.cases) if row["expected"] and row["category"] != "debatable"]
                edits_table([(str(row["gold"]), str(row["pred"])) for row in rows], options.edits, verifier)
        if options.benchmarks:
            names = {
                name: [row["answer"] for row in read(options.benchmarks / f"{name}.jsonl")] for name in options.names
            }
            if options.themselves:
                themselves_table(names, verifier)
                return
            golds_table(names, verifier)
            near_table(names, verifier)


if __name__ == "__main__":
    main()
