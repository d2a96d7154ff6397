"""An engine whose turns are written by hand."""

from contextlib import contextmanager

from grail_lightning import HFEngine
from grail_lightning.core.engines.base import SampledTurn


class WrittenTurns:
    """Turns by row and number; a text without an end token or a closing tag at its end is cut off by the limit."""

    def __init__(self, tokenizer, texts):
        self.tokenizer, self.texts = tokenizer, [list(own) for own in texts]

    def __call__(self, requests):
        """See `TurnSampler`."""
        turns = []
        for request in requests:
            text = self.texts[request.row].pop(0)
            ids = self.tokenizer(text)["input_ids"]
            whole = text.endswith((self.tokenizer.eos_token, *request.stop)) and len(ids) <= request.limit
            turns.append(SampledTurn(ids[: request.limit], [-0.5] * min(len(ids), request.limit), whole))
        return turns


class WritingEngine(HFEngine):
    """An engine of such turns: `texts` are those of each row."""

    def __init__(self, texts):
        super().__init__()
        self.texts = texts

    @contextmanager
    def turns(self, sampling):
        """See `RolloutEngine.turns`."""
        yield WrittenTurns(self._policy.tokenizer, self.texts)
