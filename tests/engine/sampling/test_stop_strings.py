import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import char_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.generation.stopping_criteria import StopStringCriteria

from cb_rollout.engine.sampling.stop_strings import StopStrings


def tokenizer_of(words, decoder):
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=words[0])


def byte_level_tokenizer():
    """Every byte, and some longer tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    longer = ["\u0120st", "stop", "opera", "pper", "EN", "D.", "END", "\u010a\u010a", "ab", "ba"]
    return tokenizer_of(["<unk>", *alphabet, *longer], decoders.ByteLevel())


def sentencepiece_like_tokenizer():
    words = [
        "<unk>",
        *"abcdefghijklmnopqrstuvwxyzEND.",
        "\u2581",
        "\u2581a",
        "\u2581the",
        "\u2581EN",
    ]
    steps = [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return tokenizer_of(words, decoders.Sequence(steps))


TOKENIZERS = {
    "characters": char_tokenizer,
    "byte_level": byte_level_tokenizer,
    "sentencepiece": sentencepiece_like_tokenizer,
}


def decode_of(tokenizer):
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def first_found(strings, tokenizer, ids):
    stops = StopStrings(strings, decode_of(tokenizer))
    return next((i for i, token in enumerate(ids) if stops.found_with(token)), None)


@pytest.mark.fast_cases("sentencepiece")
@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_a_sequence_stops_where_its_text_first_holds_a_string(kind, data):
    tokenizer = TOKENIZERS[kind]()
    ids = data.draw(st.lists(st.integers(1, len(tokenizer) - 1), min_size=1, max_size=30))
    text = tokenizer.decode(ids)
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    strings = [s for s in (text[start : start + data.draw(st.integers(1, 6))],) if s]
    if not strings or "\N{REPLACEMENT CHARACTER}" in text or text != text.lstrip():
        return
    whole = next(i for i in range(len(ids)) if strings[0] in tokenizer.decode(ids[: i + 1]))
    assert first_found(strings, tokenizer, ids) == whole


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["st", "op"], 1),
        (["stop"], 0),
        (["st", "opera"], 1),
        (["sto", "pper"], 1),
        (["las", "topper"], 1),
        (["s", "to", "pped"], 2),
        (["st", "ap"], None),
    ],
)
def test_the_examples_of_transformers_own_criterion(tokens, expected):
    words = ["<unk>", *dict.fromkeys(tokens)]
    tokenizer = tokenizer_of(words, decoders.Fuse())
    assert first_found(["stop"], tokenizer, [words.index(token) for token in tokens]) == expected


@pytest.mark.fast_cases("strings2")
@pytest.mark.parametrize("strings", [["END"], ["a"], ["ab", "ba.", "\n\n"], ["stopper"]])
@given(ids=st.lists(st.integers(1, 266), min_size=1, max_size=40))
def test_byte_level_text_stops_where_transformers_criterion_stops(strings, ids):
    tokenizer = BYTE_LEVEL
    criterion = StopStringCriteria(tokenizer, strings)
    stops = StopStrings(strings, decode_of(tokenizer))
    for end in range(1, len(ids) + 1):
        expected = bool(criterion(torch.tensor([ids[:end]]), None))
        assert stops.found_with(ids[end - 1]) == expected


BYTE_LEVEL = byte_level_tokenizer()


def test_a_character_of_several_tokens_is_seen_when_it_is_whole():
    # The three bytes of a euro sign, as byte-level tokenizers spell them.
    ids = BYTE_LEVEL.convert_tokens_to_ids(["x", "\u00e2", "\u0124", "\u00ac", "y"])
    assert BYTE_LEVEL.decode(ids) == "x\u20acy"
    assert first_found(["\u20ac"], BYTE_LEVEL, ids) == 3
    assert first_found(["y"], BYTE_LEVEL, ids) == 4


def test_a_string_is_found_once_and_not_again_while_it_is_near():
    tokenizer = char_tokenizer()
    stops = StopStrings(["ab", "0123456789"], decode_of(tokenizer))
    found = [stops.found_with(token) for token in tokenizer("xabcdab")["input_ids"]]
    assert [i for i, is_found in enumerate(found) if is_found] == [2, 6]


def test_the_text_looked_at_does_not_grow_with_the_sequence():
    tokenizer, lengths = char_tokenizer(), []

    def decode(ids):
        lengths.append(len(ids))
        return tokenizer.decode(ids)

    stops = StopStrings(["never to be found"], decode)
    for token in tokenizer("lorem ipsum " * 50)["input_ids"]:
        stops.found_with(token)
    assert max(lengths) == 2


def test_bytes_that_never_make_a_character_do_not_pile_up():
    lengths = []

    def decode(ids):
        lengths.append(len(ids))
        return BYTE_LEVEL.decode(ids)

    (half_a_character,) = BYTE_LEVEL.convert_tokens_to_ids(["\u00e2"])
    stops = StopStrings(["END"], decode)
    for _ in range(100):
        stops.found_with(half_a_character)
    assert max(lengths) <= 8


def test_a_string_beside_half_a_character_is_found_once():
    pieces = [b"x", b"b\xe2", b"\x82\xac", b"b"]
    stops = StopStrings(
        ["b"], lambda ids: b"".join(pieces[i] for i in ids).decode(errors="replace")
    )
    assert [stops.found_with(token) for token in range(4)] == [False, True, False, True]


def byte_characters():
    """The characters that byte-level tokenizers write for the bytes from 0 to 255."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(others)) for byte in range(256)]


def ids_of_bytes(tokenizer, content):
    """One token for each byte."""
    characters = byte_characters()
    return [tokenizer.convert_tokens_to_ids(characters[byte]) for byte in content]


# Whole characters of one to four bytes, and bytes that begin or continue one.
PIECES = [b"a", "\u00e9".encode(), "\u2603".encode(), "\U0001f600".encode()]
PIECES += [b"\xff", b"\x98", b"\xe2", b"\xe2\x98", b"\xf0\x9f", b"\xc3"]


@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=12))
def test_a_string_is_found_after_bytes_that_are_no_text(pieces):
    tokenizer = byte_level_tokenizer()
    ids = ids_of_bytes(tokenizer, b"".join(pieces))
    decode = decode_of(tokenizer)
    for string in ("\u2603", "\U0001f600", "a\u00e9", "\u2603a"):
        holds = [string in decode(ids[: number + 1]) for number in range(len(ids))]
        expected = holds.index(True) if True in holds else None
        assert first_found([string], tokenizer, ids) == expected


def test_a_string_is_found_after_four_bytes_that_are_no_text():
    tokenizer = byte_level_tokenizer()
    ids = ids_of_bytes(tokenizer, b"\xff\x98\xe2\x98\x83")
    assert first_found(["\u2603"], tokenizer, ids) == 4
