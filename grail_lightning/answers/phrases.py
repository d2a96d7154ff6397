r"""What stands around an answer and is no part of it: introductions, remarks, marks at its end, environments.

An introduction goes only if it names what follows, as `The area is`, and denies or changes nothing of it.
"""

import re

from grail_lightning.answers.lexicon import MULTIPLIED

_RESULT = (
    r"(?:so\s+|thus,?\s+|hence,?\s+|therefore,?\s+)?(?:the\s+)?(?:final\s+|correct\s+)?(?:answer|solution|result)s?"
)
_LEAD = re.compile(
    rf"^\s*(?:#+\s*)?(?:(?:{_RESULT}(?:\s+(?:is|are))?\s*[:=]?|\\approx|=|:)(?=[\s\\({{\[|\d.+\-$a-zA-Z\x60*])"
    r"|(?:\\text\{\s*)?(?:approximately|about|roughly)\s*\}?\s*(?=[\d.\\$-]))",
    re.IGNORECASE,
)
_HEADING = re.compile(r"^\s*(?:#+\s*|\\(?:implies|[Rr]ightarrow|[Ll]ongrightarrow|to)(?![a-z])\s*)(?=\S)")
_QUOTED_ALL = re.compile(r"([\"'])([^\"']+)\1")
# A sentence around a number in bold type.
_BOLD = re.compile(r"\s*(?P<before>[A-Za-z][A-Za-z ,']*:?)\s\*\*(?P<bold>[^*]*[0-9][^*]*)\*\*(?P<after>[^*0-9]*)")
_CHANGED = re.compile(
    r"\b(?:more|less|fewer|greater|times|third|quarter|part|question|step|case|option|or|and|exercise|problem|between|around|nearly|almost)\b",
    re.IGNORECASE,
)
_THEN = r"(?:therefore|thus|then|hence|now)\b"
# Up to a verb that ends the upright type or, for the phrase that all use, that stands inside of it.
_INTRODUCTION = re.compile(
    rf"\\text\{{\s*(?:(?P<inside>{_RESULT}\s+(?:is|are)(?:\s{_THEN})?\s*[:,]?\s(?!{_THEN})(?=[^\s}}]))"
    rf"|(?:(?:so|thus|hence|therefore)\s*,?|[A-Za-z][A-Za-z ,']*?(?:\s(?:is|are|equals|equal to)(?:\s{_THEN})?|\s*:))"
    r"\s*:?\s*\}\s*(?=\S))",
    re.IGNORECASE,
)
# Whose the number is: `She has 27`, `We get 15`.
_OWNER = re.compile(
    r"^(?P<type>\\text\{)?\s*(?:(?:so|thus|hence|therefore),?\s)?(?:(?:he|she|it|they|we|you|I|one)\s"
    r"(?:(?:will\s)?(?:have|need|get|take|pay|obtain)|has|needs|gets|takes|pays|paid|spent|earned|costs|equals)"
    r"|(?:so|thus|hence|therefore),?)(?:\s(?:exactly|that))?(?:\s*(?P<end>\})\s*|\s)(?=[0-9]|\\\$|\\frac)",
    re.IGNORECASE,
)
_THUS = re.compile(r"^\\text\{\s*(?:so|thus|hence|therefore)\s*\}\s*,\s*(?=\S)", re.IGNORECASE)
# `\text{The value of } x \text{ is } 8`.
_SEVERAL_TYPES = re.compile(
    r"^\\text\{\s*(?:(?:so|thus|hence|therefore),?\s)?(?:the|our)\b[^{}:]*\}"
    r"[^{}\\=]{1,20}\\text\{\s*(?:is|equals|is equal to)\s*:?\s*\}\s*(?=\S)",
    re.IGNORECASE,
)
# A sentence about a thing that ends with its value: `The number of residents is 73`, `The sequence is convergent`.
_SENTENCE = re.compile(
    r"(?P<type>\\text\{\s*)?(?:(?:so|thus|hence|therefore)\s*,?\s+)?"
    r"(?:the|this|it|its|there|our|their|his|her)\b[A-Za-z ,']*?"
    r"\s(?:is|are|equals|equal to)\s+(?:equal to\s+|an?\s+|exactly\s+)?"
    r"(?P<rest>\S(?:[^,;=.]|\.(?=[0-9]))*[.!]?\}?[.!]?)",
    re.IGNORECASE | re.DOTALL,
)
_VERB = re.compile(r"(?:\\text\{)?\s*(?:the|this|it)\s(?:[a-z]+\s){0,3}?(converges|diverges)\.?\s*\}?", re.IGNORECASE)
# What follows is an end of the values, or near the value.
_BOUND = (
    r"\b(?:at (?:least|most)|up to|above|below|over|under|beyond|near|nearly|almost|close to|bounded by|within"
    r"|starting (?:at|from))\s*\}?\s*$"
)
# A denial, a comparison or a calculation, or at the beginning a bound or a part of what follows.
_DENIAL = re.compile(
    r"\b(?:not?|never|nor|neither|cannot|false|wrong|incorrect|unless|if|whether|than|opposite|negative|minus|plus|reciprocal|half|twice|double|triple|impossible|invalid"
    r"|rejected|excluded|extraneous|undefined|guess|maybe|perhaps|possibly|candidate|mistake|error|typo|trap|negation"
    r"|assum(?:e|ing)|suppos(?:e|ing)|imagine|let|exceeds|none|nobody|nothing|hardly|barely"
    r"|squared|cubed|logarithm|add(?:s|ed|ing)?|subtract(?:s|ed|ing)?|divid(?:e|es|ed|ing)|multipl(?:y|ies|ied|ying))\b"
    r"|\bits (?:square|cube|inverse|conjugate|complement|square root|cube root)\b"
    rf"|{_BOUND}"
    r"|n't|\bof (?:the |my )?(?:\w+ )?(?:answers?|results?|solution)\b"
    r"|(?<!number )(?<!sum )(?<!product )\bof (?:the |my )?(?:\w+ )?solutions\b"
    r"|^(?:\\text\{)?\s*(?:at (?:least|most)|(?:less|more|fewer|greater) than|(?:everything )?except)\b",
    re.IGNORECASE,
)
_NUMBER_IN_TYPE = re.compile(r"^\\text\{\s*([+-]?[0-9][0-9.,]*)(\s+[A-Za-z][^0-9{}]*)\}$")
_REMARK = re.compile(
    r"\s*(?:\\text\{\s*\((?:by|since|because|as)\b[^{}()]*\}[^{}()]*\)|\\text\{\s*\((?:by|since|because|as)\s(?P<typed>[^{}()]*)\)\s*\}|(?<=[\s}])\((?:by|since|because|as)\s(?P<plain>[^()]*)\))\s*\.?$"
)
_REFUSAL = re.compile(r"\b(?:not?|never|wrong|incorrect|false|impossible|extraneous|rejected)\b|n't", re.IGNORECASE)

_ALIGNED = r"(?:align(?:ed|at)?|gather(?:ed)?|equation|split|eqnarray|multline|flalign|center)\*?"
_ENVIRONMENT = re.compile(
    rf"\\begin\{{{_ALIGNED}\}}(?:\[[tbc]\])?(?:\{{[0-9a-z]*\}})?((?:(?!\\begin|\\end).)*)\\end\{{{_ALIGNED}\}}",
    re.DOTALL,
)
_SAID_RIGHT = re.compile(
    r"(?<=\S)\s*(?:\\text\{)?\s*\bis (?:correct|right|true|the (?:correct |final )?(?:answer|solution))\s*\}?\.?$"
    r"|(?<=\S)\s*(?:\\text\{|(?<=\s))\s*\(?Q\.?E\.?D\.?\)?\s*\}?$"
)
_BECAUSE = re.compile(r"(?<=\S)\s*,?\s*\\text\{\s*,?\s*(?:because|since)\b.*$", re.DOTALL)
_SYSTEM = re.compile(r"\s*\\left\s*\\\{(.*)\\right\s*\.\s*", re.DOTALL)
_CASES = re.compile(
    r"(?:\\left)?(?:\\\{)?\s*\\begin\{(?:cases|array|matrix)\}(?:\{[lcr|]*\})?((?:(?!\\begin|\\end|&).)*=(?:(?!\\begin|\\end).)*)\\end\{(?:cases|array|matrix)\}(?:\\right\.)?",
    re.DOTALL,
)


def without_environment(text: str) -> str:
    r"""The lines of `align` and of `cases` of equations as a list, or as one chain where lines begin with a sign."""
    if r"\begin" not in text:
        rows = [row.strip(" ,;") for row in text.split(r"\\") if row.strip()]
        return ", ".join(rows) if len(rows) > 1 and all(row.count("=") == 1 for row in rows) else text
    text = _ENVIRONMENT.sub(lambda match: _lines(match[1].replace("&", "")), text)
    if r"\begin{cases}" in text or (r"\begin{" in text and re.match(r"(?:\\left)?\\\{", text)):
        text = _CASES.sub(_system, text)
    if r"\begin" not in text and (system := _SYSTEM.fullmatch(text)) is not None:
        text = system[1]
    return text


_SPACES = re.compile(r"^(?:\s|\\[,;:! ])+")
_ROW_END = re.compile(r"\\\\(?:\[[^\]]*\])?")


def _lines(body: str) -> str:
    lines = [_SPACES.sub("", line.strip(" ,;\n")) for line in _ROW_END.split(body)]
    joined = ""
    for line in filter(None, lines):
        joined += (
            f"{', ' if joined and not line.startswith(('=', '<', '>', chr(92) + 'le', chr(92) + 'ge')) else ''}{line}"
        )
    return joined


def _system(match: re.Match[str]) -> str:
    rows = [row for row in _ROW_END.split(match[1]) if row.strip()]
    each = all(row.count("=") == 1 and not re.search(r"[<>]|\\[lg]e|\\text|\bif\b", row) for row in rows)
    one_sided = all(not row.partition("&")[0].strip().endswith(",") for row in rows)
    if not (each and one_sided) or any("&" in row and "=" not in row.replace("&", "").strip() for row in rows):
        return match[0]
    return _lines(match[1].replace("&", ""))


def number_in_bold(text: str) -> str:
    """The number in bold type and what follows, of a sentence around it that neither denies nor changes it."""
    match = _BOLD.fullmatch(text)
    if match is None or any(words.search(match["before"]) for words in (_DENIAL, _CHANGED, MULTIPLIED)):
        return text
    return f"{match['bold']}{match['after']}"


def _without_owner(text: str) -> str:
    return _OWNER.sub(lambda owner: "" if owner["end"] or not owner["type"] else owner["type"], text)


def without_phrases(text: str) -> str:
    """A text in one spelling without what introduces it, and without a remark that explains it."""
    if (remark := _REMARK.search(text)) is not None and not _REFUSAL.search(remark[0]):
        text = text[: remark.start()]
    if (reason := _BECAUSE.search(text)) is not None and not _REFUSAL.search(reason[0]):
        text = text[: reason.start()]
    text = _THUS.sub("", _SAID_RIGHT.sub("", _without_owner(text)))
    text = _SEVERAL_TYPES.sub(lambda phrase: phrase[0] if _DENIAL.search(phrase[0]) else "", text)
    phrase = _INTRODUCTION.match(text)
    listed = phrase is not None and ":" in phrase[0] and ":" in text[phrase.end() :]  # `\text{Tom: }4, \text{Ann: }6`
    if phrase is not None and not listed and not _DENIAL.search(phrase[0]):
        text = rf"\text{{{text[phrase.end() :]}" if phrase["inside"] else text[phrase.end() :]
    text = _QUOTED_ALL.sub(r"\2", text) if text[:1] in "\"'" and _QUOTED_ALL.fullmatch(text) else _HEADING.sub("", text)
    for _ in range(3):  # `The answer is \\approx 3`
        text, times = _LEAD.subn("", text)
        if not times:
            break
        text = _without_owner(text)
    if (verb := _VERB.fullmatch(text)) is not None and not _DENIAL.search(text):
        return rf"\text{{{verb[1]}}}"
    sentence = _SENTENCE.fullmatch(text)
    if sentence is not None and not _DENIAL.search(text[: sentence.start("rest")]):
        rest = sentence["rest"]
        if rest[:1].isdigit() or rest[:1] in "\\-{" or (sentence["type"] and rest.count("}") == rest.count("{") + 1):
            text = (sentence["type"] or "") + rest
    return _NUMBER_IN_TYPE.sub(r"\1\\text{\2}", text) if text.startswith(r"\text") else text


# Sets and symbols with several spellings
_REALS = re.compile(
    r"\\mathbb\s*\{?R\}?\s*(?:\^\s*\{?\s*([+-])\s*\}?|_\s*\{?\s*(\+|-|>\s*0|<\s*0|\\ge\s*0|\\le\s*0)\s*\}?)"
)
_HALF_LINES = {"+": r"(0,\infty)", ">0": r"(0,\infty)", "-": r"(-\infty,0)", "<0": r"(-\infty,0)"}
_HALF_LINES |= {r"\ge0": r"[0,\infty)", r"\le0": r"(-\infty,0]"}
_CHOOSE = re.compile(
    r"(?:\{\})?(?:_\{?(?P<n>[0-9a-z]+)\}?|\^\{?(?P<m>[0-9a-z]+)\}?)\s*(?:\\text\{)?(?P<what>[CP])\}?\s*_\{?(?P<k>[0-9a-z]+)\}?"
)
_INTEGER = re.compile(
    r"(?P<head>.*?[^\s,])[\s,]*(?:\b(?:where|for|with)\s+)?(?:(?:some|any|all|every|each|an|the)\s+)?"
    r"(?:integers?\s+(?P<last>[a-z])|(?P<first>[a-z])\s+(?:is|are|being)\s+(?:an?|any|some)\s+(?:arbitrary\s+)?integer)",
    re.DOTALL,
)


_DECLARED = re.compile(
    r"[\s,]*(?:\\text\{[\s,]*(?:where|for|with)?(?: some| any| all| every)?\s*\}|\b(?:where|for)\b)?\s*"
    r"\(?([a-z]\s*\\in\s*\\mathbb\{[A-Z]\})\)?$"
)
_POSITIVE = re.compile(r"\\mathbb\{N\}(?:\^\{?[+*]\}?|_\{?\+\}?)")
_WITHOUT = re.compile(r"(\\mathbb\{[A-Z]\})\s*-\s*\\\{")
_FIGURE = re.compile(r"(?:\\text\{\s*)(triangle|angle)\s*\}\s*(?=[A-Z]{3}(?![A-Za-z]))")
_ENDS = re.compile(r"\\angle\s?([A-Z])([A-Z])([A-Z])(?![A-Za-z])|(?<![0-9.])\\overline\{([A-Z])([A-Z])\}")
_REVERSED = re.compile(r"([\[\]])([^\[\]()]+,[^\[\]()]+)([\[\]])")
_CHOOSE_RAISED = re.compile(r"(?<![A-Za-z\\])([CA])_\{?([0-9]+)\}?\^\{?([0-9]+)\}?")
_UNIT_VECTOR = re.compile(r"\\(?:hat|vec)\s*\{?\s*(?:\\([ij])math|([ijk])(?![A-Za-z]))\s*\}?")


def _by_ends(match: re.Match[str]) -> str:
    """An angle, or a segment, with its ends in the order of the alphabet."""
    if match[4]:
        return rf"\overline{{{''.join(sorted(match[4] + match[5]))}}}"
    first, last = sorted(match[1] + match[3])
    return rf"\angle {first}{match[2]}{last}"


def _raised(match: re.Match[str]) -> str:
    if len(match[2] + match[3]) > 8 or int(match[3]) >= int(match[2]):
        return match[0]
    return _selections(match[2], match[3], ordered=match[1] == "A")


def _chosen(match: re.Match[str]) -> str:
    return _selections(match["n"] or match["m"], match["k"], ordered=match["what"] == "P")


def _selections(n: str, k: str, *, ordered: bool) -> str:
    """The number of ways to take `k` of `n` things."""
    return rf"\frac{{{n}!}}{{({n}-{k})!}}" if ordered else rf"\binom{{{n}}}{{{k}}}"


def with_one_spelling(text: str) -> str:
    r"""Half lines, binomial coefficients and statements that a letter is an integer in one spelling."""
    if r"\mathbb" in text:
        text = _DECLARED.sub(r",\1", text)
        text = _WITHOUT.sub(r"\1\\setminus \\{", text).replace(r"\mathbb{Z}_{>0}", r"\mathbb{Z}^+")
        text = _POSITIVE.sub(r"\\mathbb{Z}^+", text)
        text = _REALS.sub(lambda match: _HALF_LINES[(match[1] or match[2]).replace(" ", "")], text)
    if "triangle" in text or "angle" in text:
        text = _FIGURE.sub(r"\\\1 ", text)
    if r"\angle" in text or r"\overline" in text:
        text = _ENDS.sub(_by_ends, text)
    if r"\hat" in text or r"\vec" in text:
        text = _UNIT_VECTOR.sub(r"\1\2", text)
    if (text[:1] == "]" or text[-1:] == "[") and (match := _REVERSED.fullmatch(text)):
        text = f"{'(' if match[1] == ']' else '['}{match[2]}{')' if match[3] == '[' else ']'}"
    if "C_" in text or "A_" in text:
        text = _CHOOSE_RAISED.sub(_raised, text)
    if "C_" in text or "P_" in text:
        text = _CHOOSE.sub(_chosen, text)
    if "integer" in text[-60:] and "=" in text:
        match = _INTEGER.fullmatch(re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).rstrip(" ."))
        if match is not None:
            text = rf"{match['head']},{match['first'] or match['last']}\in\mathbb{{Z}}"
    return text


_SPACED = re.compile(
    r"(?<![0-9.,_^A-Za-z\\}])([+-]?(?:\\\$|[£€¥])?)([1-9][0-9]{0,2}(?: [0-9]{3})+)"
    r"(?![0-9])(?! [0-9])(?=(?:\.[0-9]+)?(?:$|[\s\\%]))",
    re.ASCII,
)
_QUOTED = re.compile(r"(?<![0-9A-Za-z.,'])[1-9][0-9]{0,2}(?:'[0-9]{3})+(?![0-9'])", re.ASCII)
_INDIAN = re.compile(r"(?<![0-9.,_^A-Za-z\\({\[])[1-9][0-9]?(?:,[0-9]{2})+,[0-9]{3}(?![0-9,)\]])", re.ASCII)
_UNDERLINED = re.compile(r"(?<![\w.])[1-9][0-9]{0,2}(?:_[0-9]{3}){2,}(?!\w)", re.ASCII)
_DOTTED = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:\.[0-9]{3}){2,}(?![0-9.])", re.ASCII)


def without_separators(text: str) -> str:
    """Digits in groups of three run together: those between spaces only if they begin the answer."""
    if " " in text and (match := _SPACED.match(text)) is not None:
        text = match[0].replace(" ", "") + text[match.end() :]
    if "'" in text:
        text = _QUOTED.sub(lambda run: run[0].replace("'", ""), text)
    if text.count(",") > 1:
        text = _INDIAN.sub(lambda run: run[0].replace(",", ""), text)
    if text.count("_") > 1:
        text = _UNDERLINED.sub(lambda run: run[0].replace("_", ""), text)
    if text.count(".") > 1:
        text = _DOTTED.sub(lambda run: run[0].replace(".", ""), text)
    return text
