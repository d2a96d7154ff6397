"""Which sampled tokens carry which characters: exact alignment of token ids with the decoded text.

Nothing is re-tokenised: a policy may sample ids that its tokenizer would never produce for the same text, so a second
tokenisation is off by one sooner or later. Instead each id is turned into what it adds to the decoded text.
Three readings are tried, each checked against `tokenizer.decode`:

1. byte-level BPE (GPT, Qwen, Llama 3): a token is a string of bytes; characters are cut from the bytes as UTF-8;
2. SentencePiece-like (Llama 2, Gemma, Mistral): `▁` is a space, `<0x0A>` a byte;
3. any other tokenizer: windowed incremental decoding.

A token that carries some of a character's bytes covers that character, so several tokens may cover one emoji.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from os.path import commonprefix
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
# GPT-2's printable stand-ins for the 256 bytes (`bytes_to_unicode` of its encoder).
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = dict(zip(map(chr, [*_PRINTABLE, *range(256, 256 + len(_OTHERS))]), _PRINTABLE + _OTHERS, strict=True))
# Tokens decoded before the one in question: decoders look back over one character (four bytes) or one word piece.
_WINDOW = 8
# A run of tokens that never completes a character is cut here, so that hostile ids cost linear time.
_LONGEST_RUN = 64


Decoder = Any  # a Hugging Face tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Alignment:
    """A decoded text and the range of characters that each of its N tokens covers.

    Args:
        text: `tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)`.
        starts: [N] first character of each token; among tokens with text it never falls.
        stops: [N] index after its last character; equal to the start for a token without text, such as a special one.
    """

    text: str
    starts: tuple[int, ...]
    stops: tuple[int, ...]

    def overlapping(self, start: int, stop: int, among: Sequence[int] | None = None) -> list[int]:
        """Indices of the tokens, or of some of them, that cover at least one character of `text[start:stop]`."""
        starts, stops = self.starts, self.stops
        tokens = range(len(starts)) if among is None else among
        # As `max(low, start) < min(high, stop)`, without the calls: this loop goes over all tokens of a batch.
        return [k for k in tokens if starts[k] < stop and stops[k] > start and starts[k] < stops[k] and start < stop]


def align(token_ids: Sequence[int], tokenizer: Decoder, special: frozenset[int] | None = None) -> Alignment:
    """The character range of each token in the decoded text.

    Args:
        token_ids: [N] ids as they were sampled, special tokens and padding included.
        tokenizer: a Hugging Face tokenizer.
        special: what `special_ids` returns for this tokenizer, if many rows are aligned.
    """
    ids = [int(token_id) for token_id in token_ids]
    text = _decode(tokenizer, ids)
    tokens = _visible_tokens(tokenizer, ids, special_ids(tokenizer) if special is None else special)
    spans = None
    for pieces_of in (_byte_level_pieces, _sentencepiece_pieces):
        if spans is None and tokens is not None:
            spans = _spans_of_pieces(pieces_of(tokens, text), text)
    if spans is None:
        spans = _incremental_spans(tokenizer, ids, text)
    return Alignment(text=text, starts=tuple(start for start, _ in spans), stops=tuple(stop for _, stop in spans))


def token_span(token_ids: Sequence[int], tokenizer: Decoder, start: int, stop: int) -> list[int]:
    """Indices of the tokens that cover at least one character of the decoded text's range [start, stop).

    Args:
        token_ids: [N] ids as they were sampled.
        tokenizer: a Hugging Face tokenizer.
        start: first character of the range in the decoded text.
        stop: index after its last character.
    """
    return align(token_ids, tokenizer).overlapping(start, stop)


def _decode(tokenizer: Decoder, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def special_ids(tokenizer: Decoder) -> frozenset[int]:
    """The ids that `decode` leaves out with `skip_special_tokens`."""
    special = {*tokenizer.all_special_ids}
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if hasattr(backend, "get_added_tokens_decoder"):
        special |= {index for index, token in backend.get_added_tokens_decoder().items() if token.special}
    return frozenset(special)


def unknown_ids(tokenizer: Decoder, token_ids: Sequence[int]) -> set[int]:
    """Those of the ids for which the tokenizer has no token: a model's head may have more rows than it has entries."""
    try:
        tokens = tokenizer.convert_ids_to_tokens(token_ids)
    except (IndexError, KeyError, ValueError, OverflowError):  # Of tokenizers in Python.
        return set(token_ids).difference(tokenizer.get_vocab().values())
    stand_in, stand_in_id = tokenizer.unk_token, tokenizer.unk_token_id
    pairs = zip(token_ids, tokens, strict=True)
    return {index for index, token in pairs if token is None or (token == stand_in and index != stand_in_id)}


def _visible_tokens(tokenizer: Decoder, ids: list[int], special: frozenset[int]) -> list[str | None] | None:
    """Each id's entry in the vocabulary; None for what `decode` leaves out (special, or beyond it)."""
    try:
        tokens = tokenizer.convert_ids_to_tokens(ids)
    except (IndexError, KeyError, ValueError, OverflowError):
        return None
    return [token if index not in special else None for index, token in zip(ids, tokens, strict=True)]


def _byte_level_pieces(tokens: list[str | None], text: str) -> list[bytes]:
    return [b"" if token is None else _bytes_of(token) for token in tokens]


@lru_cache(maxsize=1 << 18)  # about a vocabulary
def _bytes_of(token: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError:  # an added token such as `<think>` with characters outside of the table stands for itself
        return _utf8(token)


def _sentencepiece_pieces(tokens: list[str | None], text: str) -> list[bytes]:
    pieces = []
    for token in tokens:
        byte = _BYTE_TOKEN.match(token) if token else None
        pieces.append(bytes([int(byte[1], 16)]) if byte else _utf8((token or "").replace("\u2581", " ")))
    _break_invalid_runs(tokens, pieces)
    leading = next((place for place, piece in enumerate(pieces) if piece), None)
    if leading is not None and pieces[leading].startswith(b" ") and b"".join(pieces) != _utf8(text):
        pieces[leading] = pieces[leading][1:]  # these decoders strip the one space that encoding put before the text
    return pieces


def _break_invalid_runs(tokens: list[str | None], pieces: list[bytes]) -> None:
    """A run of byte tokens that is not UTF-8 as a whole decodes to one replacement character per byte."""
    of_bytes = [token is None or _BYTE_TOKEN.match(token) is not None for token in tokens]
    for whole, places in groupby(range(len(pieces)), key=of_bytes.__getitem__):
        run = list(places)
        data = b"".join(pieces[place] for place in run)
        if whole and data.decode(errors="ignore").encode() != data:
            for place in run:
                pieces[place] = pieces[place] and _utf8("\ufffd")


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _spans_of_pieces(pieces: list[bytes], text: str) -> list[tuple[int, int]] | None:
    """Character range of each piece, or None if the pieces do not make the text."""
    data = b"".join(pieces)
    if data.decode("utf-8", "replace") != text:
        return None
    character_at = _character_of_byte(data, text)
    spans, position = [], 0
    for piece in pieces:
        start, position = position, position + len(piece)
        first = character_at[start]
        spans.append((first, character_at[position - 1] + 1 if piece else first))
    return spans


def _character_of_byte(data: bytes, text: str) -> Sequence[int]:
    """Index of the character that each byte belongs to, and the number of characters for the end."""
    if text.isascii():
        return range(len(text) + 1)
    owners: list[int] = []
    for index, character in enumerate(text):
        start = len(owners)
        encoded = character.encode()
        # U+FFFD may be in the data as itself, or stand for as many bytes as a broken sequence has before it breaks.
        length = len(encoded) if data.startswith(encoded, start) else _broken_length(data, start)
        owners.extend([index] * length)
    return [*owners, len(text)]


def _broken_length(data: bytes, start: int) -> int:
    """Bytes that one replacement character stands for (Unicode's maximal subpart, in Python as in Rust)."""
    try:
        data[start : start + 4].decode()
    except UnicodeDecodeError as error:
        return error.end
    raise AssertionError("a replacement character without broken bytes")


def _incremental_spans(tokenizer: Decoder, ids: list[int], text: str) -> list[tuple[int, int]]:
    """What each token adds when decoded after its predecessors; tokens that only make text together share its range."""
    spans: list[tuple[int, int]] = []
    written = ""
    first = 0  # of the tokens that wait for their text
    before = ""
    for stop in range(1, len(ids) + 1):
        window = max(0, first - _WINDOW)
        if stop == first + 1:
            before = _decode(tokenizer, ids[window:first])
        now = _decode(tokenizer, ids[window:stop])
        waits = now.endswith("\ufffd") or not now.startswith(before)
        if waits and stop - first < _LONGEST_RUN and stop < len(ids):
            continue
        added = now[len(before) :]
        spans.extend([(len(written), len(written) + len(added))] * (stop - first))
        written += added
        first = stop
    return _reconciled(spans, written, text)


def _reconciled(spans: list[tuple[int, int]], written: str, text: str) -> list[tuple[int, int]]:
    """Where the windows did not make the text, every token that touches the doubtful stretch covers all of it."""
    if written == text:
        return spans
    head = len(commonprefix([written, text]))  # noqa: RUF071 (texts, not paths)
    tail = len(commonprefix([written[head:][::-1], text[head:][::-1]]))  # noqa: RUF071
    shift, doubt_stop, text_stop = len(text) - len(written), len(written) - tail, len(text) - tail
    nobodys = head == doubt_stop  # characters that no window wrote: the neighbours on both sides answer for them
    reconciled = []
    for start, stop in spans:
        if stop < head or (stop == head and not nobodys):
            reconciled.append((start, stop))
        elif start > doubt_stop or (start == doubt_stop and not nobodys):
            reconciled.append((start + shift, stop + shift))
        else:
            reconciled.append((min(start, head), max(stop + shift, text_stop)))
    return reconciled
