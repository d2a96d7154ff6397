"""How far draws were from other tokens: texts are compared only where no rounding could have changed one."""

from contextlib import contextmanager

import pytest
import torch

from grail_lightning.core.engines.hf import decoding
from tests.tolerance import roundings

TIE = roundings(100, torch.float32)  # Most models take their norms in float32, also those held in float64.


@contextmanager
def without_ties():
    """Fails unless every token that is decoded in it was farther from being another than roundings reach.

    The distance is one of probabilities. For a sampled token it is the one between its number and the borders of its
    share of the cumulative sum, for a greedy one that between the likeliest two. Rows that have finished count while
    they are in the batch.
    """
    found = []

    def draw(logits, sampling, warpers, noise):
        assert not warpers, "top-k and top-p have borders of their own"
        probs = (logits / sampling.logprob_temperature).double().softmax(-1)
        if sampling.temperature == 0:
            first, second = probs.topk(2).values.T
            distances = first - second
        else:
            distances = (probs.cumsum(-1)[:, :-1] - noise[:, None]).abs()
        found.append(distances.min().item())
        return drawn(logits, sampling, warpers, noise)

    drawn = decoding.draw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "draw", draw)
        yield
    assert found
    assert min(found) > TIE, f"a token is within {min(found):.1e} of being another: choose another seed"
