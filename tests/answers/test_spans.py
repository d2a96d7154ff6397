import itertools
import json
import random
import time
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from grail_lightning.answers.find import find_boxes
from grail_lightning.answers.spans import Alignment, align, token_span

GOLDEN = Path(__file__).parents[1] / "golden"
TEXT = [
    "So the answer is \\boxed{12}.$",
    "we get $x = \\boxed{\\frac{1}{2}}.$ Done",
    "naïve café 東京 😀 ends",
    "1 + 2 = 3, thus \\boxed{3}.\n\n",
] * 5
CASES = [
    "So $x=\\boxed{12}.$ Done",
    "😀\\boxed{😀👩‍👩‍👧}é 東京",
    "a\\boxed{1+\\boxed{2}}b",
    "  leading and  double  spaces \n\t\\boxed{ 3 }",
    "plain",
    "",
    " ",
    "\\boxed{\\text{�}}",
]


def merging(*merges):
    """A byte-level tokenizer with these merges alone."""
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=380, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens(["<think>", "→☃"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


@pytest.fixture(scope="module")
def sentencepiece():
    """As Llama 2: `▁` for spaces, a prefix space, byte tokens for what is unknown."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ascii_text = [text.encode("ascii", "ignore").decode() for text in TEXT]
    trained.train_from_iterator(
        ascii_text,
        trainers.BpeTrainer(vocab_size=440, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False),
    )
    document = json.loads(trained.to_str())
    special = {"<unk>", "<s>", "</s>"}
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] in special]
    tokenizer = Tokenizer.from_str(json.dumps(document))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def metaspace():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        TEXT,
        trainers.UnigramTrainer(
            vocab_size=150, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def word_pieces():
    """Neither byte-level nor SentencePiece: spaces are put in by the decoder."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.train_from_iterator(
        TEXT, trainers.WordPieceTrainer(vocab_size=150, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, sep_token="[SEP]", unk_token="[UNK]")


ALL = ["byte_level", "sentencepiece", "metaspace", "word_pieces"]


def decoded(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def spans_of(alignment):
    return list(zip(alignment.starts, alignment.stops, strict=True))


def broken_invariants(alignment, tokenizer, ids):
    """The names of those that do not hold."""
    spans = spans_of(alignment)
    visible = [(start, stop) for start, stop in spans if start < stop]
    covered = {place for start, stop in spans for place in range(start, stop)}
    holds = {
        "the text is the decoded one": alignment.text == decoded(tokenizer, ids),
        "one range a token": len(spans) == len(ids),
        "inside the text": all(0 <= start <= stop <= len(alignment.text) for start, stop in spans),
        "in order": all(a <= c and b <= d for (a, b), (c, d) in itertools.pairwise(visible)),
        "every character has a token": covered == set(range(len(alignment.text))),
    }
    return [name for name, held in holds.items() if not held]


def test_golden_spans_are_reproduced():
    from safetensors.torch import load_file

    tokenizer = AutoTokenizer.from_pretrained(GOLDEN / "model")
    tensors = load_file(GOLDEN / "golden.safetensors")
    expected = json.loads((GOLDEN / "spans.json").read_text())
    for row, boxes in expected.items():
        ids = tensors["completion_ids"][int(row)][tensors["completion_mask"][int(row)].bool()].tolist()
        alignment = align(ids, tokenizer)
        found = [
            {
                "chars": [box.start, box.stop],
                "tokens": alignment.overlapping(box.start, box.stop),
                "content_tokens": alignment.overlapping(box.content_start, box.content_stop),
            }
            for box in find_boxes(alignment.text)
        ]
        assert found == boxes


@pytest.mark.parametrize("name", ALL)
def test_the_text_is_the_decoded_one_and_every_character_has_a_token(name, request):
    tokenizer, draw = request.getfixturevalue(name), random.Random(0)
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in CASES]
    rows += [[draw.randrange(len(tokenizer)) for _ in range(40)] for _ in range(40)]
    assert [ids for ids in rows if broken_invariants(align(ids, tokenizer), tokenizer, ids)] == []


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("text", CASES)
def test_ranges_are_those_of_the_tokenizers_own_offsets(name, text, request):
    # Oracle: the offsets that the Rust encoder reports for ids of its own making.
    # The prefix space of SentencePiece is in no decoded text.
    tokenizer = request.getfixturevalue(name)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    alignment = align(encoded["input_ids"], tokenizer)
    if alignment.text != text:
        pytest.skip("this tokenizer does not round-trip the text")
    for span, offsets in zip(spans_of(alignment), encoded["offset_mapping"], strict=True):
        assert span == tuple(offsets) or span[0] == span[1]


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_every_token_of_a_split_emoji_covers_its_character(name, request):
    tokenizer = request.getfixturevalue(name)
    ids = tokenizer("x𝄞y", add_special_tokens=False)["input_ids"]
    alignment = align(ids, tokenizer)
    place = alignment.text.index("𝄞")
    # U+1D11E is four bytes and in no training text, so neither vocabulary has a merge for them.
    assert len(alignment.overlapping(place, place + 1)) == 4
    assert alignment.overlapping(place + 1, place + 2) == [len(ids) - 1]


def byte_ids(tokenizer, data):
    """Ids of single bytes in a byte-level vocabulary: printable Latin-1 is itself, the rest U+0100 and on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[chr(byte) if byte in printable else chr(256 + rest.index(byte))] for byte in data]


def test_a_special_token_inside_the_text_has_an_empty_range(byte_level):
    ids = byte_level("ab", add_special_tokens=False)["input_ids"]
    ids = [ids[0], byte_level.eos_token_id, *ids[1:], byte_level.eos_token_id]
    alignment = align(ids, byte_level)
    assert alignment.text == "ab"
    assert spans_of(alignment) == [(0, 1), (1, 1), (1, 2), (2, 2)]
    assert alignment.overlapping(0, 2) == [0, 2]
    first, *rest = byte_ids(byte_level, "é".encode())  # between the bytes of a character
    alignment = align([first, byte_level.eos_token_id, *rest], byte_level)
    assert alignment.text == "é"
    assert alignment.overlapping(0, 1) == [0, 2]


def test_added_tokens_that_are_not_special_stay_in_the_text(byte_level):
    ids = byte_level("a<think>b→☃c", add_special_tokens=False)["input_ids"]
    alignment = align(ids, byte_level)
    assert alignment.text == "a<think>b→☃c"
    assert spans_of(alignment) == [(0, 1), (1, 8), (8, 9), (9, 11), (11, 12)]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a\xffb", [(0, 1), (1, 2), (2, 3)]),
        # A truncated four-byte sequence is one replacement character, the lone continuation after `x` another.
        (b"\xf0\x9f\x98x\x80", [(0, 1), (0, 1), (0, 1), (1, 2), (2, 3)]),
        # The encoded replacement character itself: three bytes, one character.
        (b"\xef\xbf\xbd!", [(0, 1), (0, 1), (0, 1), (1, 2)]),
        # C0 never begins a character, so each byte stands alone; E2 28 breaks after one byte.
        (b"\xc0\x80\xe2(", [(0, 1), (1, 2), (2, 3), (3, 4)]),
    ],
)
def test_broken_bytes_are_replacement_characters_with_their_own_tokens(byte_level, data, expected):
    ids = byte_ids(byte_level, data)
    alignment = align(ids, byte_level)
    assert alignment.text == decoded(byte_level, ids) == data.decode("utf-8", "replace")
    assert spans_of(alignment) == expected


def test_a_token_that_ends_one_emoji_and_begins_the_next_covers_both():
    # One merge: the last byte of U+1F600 (80, stand-in U+0122) with the first of the next (F0, itself).
    fast = merging(("\u0122", "\u00f0"))
    ids = fast("😀😀", add_special_tokens=False)["input_ids"]
    alignment = align(ids, fast)
    assert alignment.text == "😀😀"
    assert alignment.overlapping(0, 1) == [0, 1, 2, 3]
    assert alignment.overlapping(1, 2) == [3, 4, 5, 6]


def test_braces_merged_with_their_neighbours_belong_to_both():
    fast = merging(("}", "."), ("}.", "$"), ("2", "}.$"))
    ids = fast("\\boxed{12}.$", add_special_tokens=False)["input_ids"]
    # \ b o x e d { 1 2}.$  -> tokens 0..8
    box = find_boxes("\\boxed{12}.$")[0]
    assert token_span(ids, fast, box.start, box.stop) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert token_span(ids, fast, box.content_start, box.content_stop) == [7, 8]
    assert token_span(ids, fast, box.stop, box.stop + 2) == [8]


def test_ids_that_no_encoder_would_choose_are_aligned_as_they_were_sampled(byte_level):
    # The text spelled byte by byte although the vocabulary has merges for it: re-tokenising would shift every index.
    ids = byte_ids(byte_level, b"is \\boxed{12}")
    assert len(ids) > len(byte_level("is \\boxed{12}", add_special_tokens=False)["input_ids"])
    assert token_span(ids, byte_level, 3, 13) == list(range(3, 13))


def test_the_prefix_space_of_sentencepiece_covers_nothing(sentencepiece):
    vocabulary = sentencepiece.get_vocab()
    ids = [vocabulary["▁"], vocabulary["x"], vocabulary["▁"], vocabulary["x"]]
    alignment = align(ids, sentencepiece)
    assert alignment.text == "x x"
    assert spans_of(alignment) == [(0, 0), (0, 1), (1, 2), (2, 3)]


def test_broken_byte_tokens_of_sentencepiece_are_one_replacement_character_each(sentencepiece):
    vocabulary = sentencepiece.get_vocab()
    ids = [vocabulary[name] for name in ["x", "<0xF0>", "<0x9F>", "x", "<0xC3>", "<0xA9>", "<0xFF>", "x"]]
    alignment = align(ids, sentencepiece)
    assert broken_invariants(alignment, sentencepiece, ids) == []
    assert spans_of(alignment) == [(place, place + 1) for place in range(8)]


def test_a_decoder_that_merges_characters_gets_conservative_ranges():
    class Shouting:
        """Decodes letters, but writes `sz` of neighbours as one `ß`, and a final `!`."""

        all_special_ids: tuple[int, ...] = ()

        def convert_ids_to_tokens(self, ids):
            return ["?" for _ in ids]

        def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
            return "".join(map(chr, ids)).replace("sz", "ß") + "!"

    ids = [ord(character) for character in "abszcd"]
    tokenizer = Shouting()
    alignment = align(ids, tokenizer)
    assert alignment.text == "abßcd!"
    covering = [alignment.overlapping(place, place + 1) for place in range(6)]
    assert all(set(covering[place]) >= {index} for place, index in [(0, 0), (1, 1), (2, 2), (2, 3), (3, 4), (4, 5)])


def test_ids_beyond_the_vocabulary_cover_nothing_and_no_ids_have_no_text(byte_level):
    assert align([], byte_level) == Alignment(text="", starts=(), stops=())
    ids = byte_level("ab", add_special_tokens=False)["input_ids"]
    alignment = align([*ids, len(byte_level) + 5], byte_level)
    assert alignment.text == "ab"
    assert spans_of(alignment)[-1] == (2, 2)


@pytest.mark.parametrize("name", ALL)
def test_long_responses_take_linear_time(name, request):
    tokenizer = request.getfixturevalue(name)
    ids = tokenizer("So $x=\\boxed{12}.$ 😀 Done " * 40, add_special_tokens=False)["input_ids"]

    def seconds(copies):
        start = time.thread_time()  # Other processes of the machine do not count.
        align(ids * copies, tokenizer)
        return time.thread_time() - start

    once, eight = (min(seconds(copies) for _ in range(3)) for copies in (1, 8))
    assert eight < 8 * once * 4 + 0.5  # quadratic would be 64 times


def test_an_added_special_token_of_the_backend_is_left_out(byte_level):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(byte_level.backend_tokenizer.to_str()), eos_token="<|end|>"
    )
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken("<|extra|>", special=True)])
    extra = tokenizer.backend_tokenizer.token_to_id("<|extra|>")
    ids = tokenizer("ab", add_special_tokens=False)["input_ids"]
    alignment = align([extra, *ids], tokenizer)
    assert broken_invariants(alignment, tokenizer, [extra, *ids]) == []
    assert spans_of(alignment)[0] == (0, 0)
