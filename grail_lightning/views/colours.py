"""The colour of a token's weight, the same on the page and in every picture.

A weight of 1, the rollout's advantage unchanged as under GRPO, has no colour; larger weights are orange, smaller ones
blue. The two hues are those of `palette.css` in its light theme; all common kinds of colour blindness tell them apart.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from importlib import resources

LARGEST = 5.0
"""The weight from which on the colour is full: the one that GRAIL gives to an answer."""
_NOT_FINITE = (204, 204, 204)


def asset(name: str) -> str:
    """The text of a file of the package's templates."""
    return resources.files("grail_lightning.views").joinpath("templates", name).read_text(encoding="utf-8")


def strength(weight: float) -> float:
    """How strong the colour of a weight is: from -1 at 0 and below, over 0 at 1, to 1 at `LARGEST` and above.

    `draw.js` has the same formula for the page.
    """
    at = max(weight - 1, -1.0) if weight < 1 else min(math.log(weight) / math.log(LARGEST), 1.0)
    return math.copysign(abs(at) ** 0.75, at)


def colour_of(weight: float) -> tuple[int, int, int]:
    """The background of a token of this weight on white, as red, green and blue up to 255; grey if it is not finite."""
    if not math.isfinite(weight):
        return _NOT_FINITE
    part = strength(weight)
    red, green, blue = (round(255 + abs(part) * (full - 255)) for full in _hue("more" if part > 0 else "less"))
    return red, green, blue


@lru_cache(maxsize=2)
def _hue(name: str) -> tuple[int, ...]:
    found = re.search(rf"--{name}: light-dark\(#(\w{{6}})", asset("palette.css"))
    assert found, "the palette has the two hues"
    return tuple(bytes.fromhex(found[1]))
