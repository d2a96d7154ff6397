import itertools
import json
import random
import time
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from grail_lightning.answers.find import find_boxes
from grail_lightning.answers.spans import align, token_span

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


END, EXTRA = "<|end|>", "<|extra|>"  # Special tokens; only the backend knows the second one.


def merging(*merges):
    """A byte-level tokenizer with these merges alone."""
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def trained(model, pre_tokenizer, decoder, trainer, added=(), **special):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([*added])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@pytest.fixture(scope="module")
def byte_level():
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made = trained(
        models.BPE(),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
        trainers.BpeTrainer(vocab_size=380, initial_alphabet=alphabet, special_tokens=[END], show_progress=False),
        added=["<think>", "→☃"],
        eos_token=END,
    )
    made.backend_tokenizer.add_special_tokens([AddedToken(EXTRA, special=True)])
    return made


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
    special = {"special_tokens": ["<unk>", "</s>"], "unk_token": "<unk>"}
    trainer = trainers.UnigramTrainer(vocab_size=150, show_progress=False, **special)
    pre_tokenizer, decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return trained(models.Unigram(), pre_tokenizer, decoder, trainer, eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def word_pieces():
    """Neither byte-level nor SentencePiece: spaces are put in by the decoder."""
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    pre_tokenizer, decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    model = models.WordPiece(unk_token="[UNK]")
    return trained(model, pre_tokenizer, decoder, trainer, sep_token="[SEP]", unk_token="[UNK]")


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


def byte_ids(tokenizer, data):
    """Ids of single bytes in a byte-level vocabulary: printable Latin-1 is itself, the rest U+0100 and on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[chr(byte) if byte in printable else chr(256 + rest.index(byte))] for byte in data]


@pytest.mark.parametrize(
    ("parts", "text", "expected"),
    [
        # A special token has an empty range, also between the bytes of a character.
        ([b"a", END, b"b", END], "ab", [(0, 1), (1, 1), (1, 2), (2, 2)]),
        (["é".encode()[:1], END, "é".encode()[1:]], "é", [(0, 1), (0, 0), (0, 1)]),
        # Added tokens that are not special stay in the text.
        ([b"a", "<think>", b"b", "→☃", b"c"], "a<think>b→☃c", [(0, 1), (1, 8), (8, 9), (9, 11), (11, 12)]),
        # Broken bytes are replacement characters with tokens of their own.
        ([b"a\xffb"], "a\ufffdb", [(0, 1), (1, 2), (2, 3)]),
        # A truncated four-byte sequence is one replacement character, the lone continuation after `x` another.
        ([b"\xf0\x9f\x98x\x80"], "\ufffdx\ufffd", [(0, 1), (0, 1), (0, 1), (1, 2), (2, 3)]),
        # The encoded replacement character itself: three bytes, one character.
        ([b"\xef\xbf\xbd!"], "\ufffd!", [(0, 1), (0, 1), (0, 1), (1, 2)]),
        # C0 never begins a character, so each byte stands alone; E2 28 breaks after one byte.
        ([b"\xc0\x80\xe2("], "\ufffd\ufffd\ufffd(", [(0, 1), (1, 2), (2, 3), (3, 4)]),
        # Ids that no encoder would choose are aligned as they were sampled: the vocabulary has merges for these.
        ([b"is x"], "is x", [(0, 1), (1, 2), (2, 3), (3, 4)]),
        ([EXTRA, b"a"], "a", [(0, 0), (0, 1)]),
        # In no training text, so that the vocabulary has no merge for its four bytes.
        (["x𝄞y".encode()], "x𝄞y", [(0, 1), *[(1, 2)] * 4, (2, 3)]),
        ([], "", []),
    ],
)
def test_ranges_of_bytes_and_added_tokens(byte_level, parts, text, expected):
    ids = []
    for part in parts:
        ids += byte_ids(byte_level, part) if isinstance(part, bytes) else [byte_level.convert_tokens_to_ids(part)]
    alignment = align(ids, byte_level)
    assert alignment.text == text == decoded(byte_level, ids)
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


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("x <0xF0> <0x9D> <0x84> <0x9E> x", [(0, 1), *[(1, 2)] * 4, (2, 3)]),
        ("▁ x ▁ x", [(0, 0), (0, 1), (1, 2), (2, 3)]),  # The prefix space covers nothing.
        # Broken bytes are one replacement character each.
        ("x <0xF0> <0x9F> x <0xC3> <0xA9> <0xFF> x", [(place, place + 1) for place in range(8)]),
    ],
)
def test_ranges_of_the_prefix_space_and_of_bytes_of_sentencepiece(sentencepiece, names, expected):
    ids = sentencepiece.convert_tokens_to_ids(names.split())
    alignment = align(ids, sentencepiece)
    assert broken_invariants(alignment, sentencepiece, ids) == []
    assert spans_of(alignment) == expected


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


def test_ids_beyond_the_vocabulary_cover_nothing(byte_level):
    ids = byte_ids(byte_level, b"ab")
    alignment = align([*ids, len(byte_level) + 5], byte_level)
    assert (alignment.text, spans_of(alignment)[-1]) == ("ab", (2, 2))


@pytest.mark.parametrize("name", ALL)
def test_long_responses_take_linear_time(name, request):
    tokenizer = request.getfixturevalue(name)
    ids = tokenizer("So $x=\\boxed{12}.$ 😀 Done " * 40, add_special_tokens=False)["input_ids"]

    def seconds(copies):
        start = time.thread_time()  # Other processes of the machine do not count.
        align(ids * copies, tokenizer)
        return time.thread_time() - start

    once, eight = (min(seconds(copies) for _ in range(2)) for copies in (1, 8))
    assert eight < 8 * once * 4 + 0.5  # quadratic would be 64 times
