"""The words that may stand beside a number, read from `words.txt`: units, counted nouns, phrases, and words of numbers.

The file is a list of what is known to be harmless. What is not in it makes another answer of the number it stands with.
"""

import re
from importlib.resources import files

_IRREGULAR = {
    **{"people": "person", "children": "child", "grandchildren": "grandchild", "men": "man", "women": "woman"},
    **{"feet": "foot", "teeth": "tooth", "mice": "mouse", "geese": "goose", "wolves": "wolf", "knives": "knife"},
    **{"leaves": "leaf", "loaves": "loaf", "shelves": "shelf", "scarves": "scarf", "calves": "calf", "dice": "die"},
    **{"vertices": "vertex", "matrices": "matrix", "axes": "axis", "bacteria": "bacterium", "extrema": "extremum"},
    **{
        "movies": "movie",
        "cookies": "cookie",
        "calories": "calorie",
        "brownies": "brownie",
        "pies": "pie",
        "ties": "tie",
    },
    **{"shoes": "shoe", "toes": "toe", "horseshoes": "horseshoe", "buses": "bus", "hertz": "hertz", "lens": "lens"},
    **{"hoodies": "hoodie", "centuries": "century", "pesos": "peso", "photos": "photo", "hypotheses": "hypothesis"},
    **dict.fromkeys(["series"], "series"),
}
_PLURALS = (("ies", "y"), ("sses", "ss"), ("shes", "sh"), ("ches", "ch"), ("xes", "x"), ("zzes", "z"), ("oes", "o"))


def _sections() -> dict[str, list[list[str]]]:
    """Of each section the entries between `|` and line ends, as words."""
    sections: dict[str, list[list[str]]] = {}
    for line in (files("grail_lightning.answers") / "words.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            entries = sections.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            entries += [entry.split() for entry in line.split("|")]
    return sections


def singular(word: str) -> str:
    """The singular of an English noun in small letters, and any other word nearly as it is."""
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    for ending, replacement in _PLURALS:
        if word.endswith(ending) and len(word) > len(ending) + 1:
            return word.removesuffix(ending) + replacement
    return word[:-1] if word.endswith("s") and not word.endswith(("ss", "us", "is")) and len(word) > 2 else word


_FOUND = _sections()
_words_of = {name: frozenset(word for entry in entries for word in entry) for name, entries in _FOUND.items()}


def _names(section: str) -> dict[str, str]:
    return {name: names[0] for names in _FOUND[section] for name in names}


UNITS = _names("units")
TYPED_UNITS = UNITS | _names("typed")
"""The name that stands for all names of a unit, by the singular; `TYPED_UNITS` has those in upright type, too."""
SYMBOLS = _words_of["symbols"]
AMBIGUOUS = {names[0]: frozenset(names[1:]) for names in _FOUND["ambiguous"]}
COUNTED, PLURAL, DESCRIBING, UNCOUNTABLE = (
    _words_of[name] for name in ("counted", "plural", "describing", "uncountable")
)
TOTALS, QUALIFIERS = (frozenset(map(" ".join, _FOUND[name])) for name in ("totals", "qualifiers"))
MONTHS = tuple("january february march april may june july august september october november december".split())  # noqa: SIM905
CARDINALS = {word: value for value, word in enumerate(_FOUND["cardinals"][0])}
CARDINALS |= {word: 10 * place for place, word in enumerate(_FOUND["tens"][0], start=2)}
MULTIPLES, PARTS = (
    {name: int(entry[-1]) for entry in _FOUND[section] for name in entry[:-1]} for section in ("multiples", "parts")
)
"""The number of each word: `dozen` is 12, and `third` is the third part."""
_COUNT, _MULTIPLE, _PART = ("|".join(sorted(words)) for words in (CARDINALS, MULTIPLES, PARTS))
MULTIPLIED = re.compile(
    rf"\b(?:{_COUNT}|{_MULTIPLE}) times\b|\b(?:an?|{_COUNT})[ -](?:{_PART})s? of\b"
    rf"|^(?:\\text\{{)?\s*(?:(?:(?:an? )?(?:{_MULTIPLE})|(?:{_PART})(?:s| of))\b|(?:squared|cubed)\s*(?:\}}|$))",
    re.IGNORECASE,
)
"""What is said of a number's multiple or part: `three times the area`, `a third of the sum`, `million`."""


def unit_name(word: str, *, typed: bool = True) -> str | None:
    """The name that stands for all names of a unit; None for a word that is no unit."""
    units = TYPED_UNITS if typed else UNITS
    return units.get(word) or units.get(singular(word))
