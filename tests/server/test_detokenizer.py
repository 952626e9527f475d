import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import byte_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from cb_rollout.server.detokenizer import (
    INCOMPLETE,
    MAX_OPEN_TOKENS,
    IncrementalDetokenizer,
    TokenTable,
    _bytes_of,
    first_stop,
    num_partial_match,
)

BYTES = byte_tokenizer()
FIRST_BYTE = 3


def byte_fallback_tokenizer():
    """Letters, and single bytes for all else, as sentencepiece vocabularies have."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"abc "]
    backend = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


FALLBACK = byte_fallback_tokenizer()


def sentencepiece_tokenizer():
    """Words with the space before them, as SentencePiece writes them, and an end token."""
    words = ["<unk>", "</s>", "\u2581a", "\u2581b", "c", "\u2581"]
    backend = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, []))
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


SENTENCEPIECE = sentencepiece_tokenizer()


def decoder(tokenizer):
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)


def streamed(stream, tokens, is_stopped=False):
    parts = [stream.push([token]) for token in tokens]
    return [*parts, stream.finish(is_stopped=is_stopped)]


def ids_of(data):
    """Token ids of raw bytes."""
    table = TokenTable(BYTES)
    byte_of = {table._look_up(i)[1][0]: i for i in range(FIRST_BYTE, len(BYTES))}
    return [byte_of[byte] for byte in data]


IDS_OF_BYTES = ids_of(range(256))


@given(st.text(max_size=40))
def test_streamed_parts_add_up_to_the_text_and_none_ends_inside_a_character(text):
    tokens = BYTES(text)["input_ids"]
    parts = streamed(IncrementalDetokenizer(decoder(BYTES)), tokens)
    assert "".join(parts) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in part for part in parts) or "\ufffd" in text


@given(st.binary(max_size=40))
def test_streamed_parts_of_invalid_utf8_add_up_to_its_decoded_text(data):
    tokens = [IDS_OF_BYTES[byte] for byte in data]
    parts = streamed(IncrementalDetokenizer(decoder(BYTES)), tokens)
    assert "".join(parts) == data.decode(errors="replace") == BYTES.decode(tokens)


@given(st.text(alphabet="abc \u00e9\u4e2d\U0001f600", max_size=30))
def test_characters_of_byte_tokens_come_whole(text):
    tokens = FALLBACK(text, add_special_tokens=False)["input_ids"]
    assert "".join(streamed(IncrementalDetokenizer(decoder(FALLBACK)), tokens)) == text


@given(st.lists(st.integers(1, len(SENTENCEPIECE) - 1), max_size=30))
def test_the_space_before_a_word_is_kept_around_skipped_tokens(tokens):
    decode = decoder(SENTENCEPIECE)
    assert "".join(streamed(IncrementalDetokenizer(decode), tokens)) == decode(tokens)


@given(st.lists(st.sampled_from(["<0xC3>", "<0xA9>", "<0xFF>", "a"]), max_size=40))
def test_bytes_that_are_no_utf8_never_make_a_stream_fail_or_lose_a_letter(words):
    tokens = FALLBACK.convert_tokens_to_ids(words)
    parts = streamed(IncrementalDetokenizer(decoder(FALLBACK)), tokens)
    assert "".join(parts).count("a") == decoder(FALLBACK)(tokens).count("a")


def test_a_long_run_of_bytes_that_are_no_utf8_is_streamed_in_pieces():
    parts = streamed(IncrementalDetokenizer(decoder(BYTES)), [IDS_OF_BYTES[0x80]] * 1000)
    assert "".join(parts) == "\N{REPLACEMENT CHARACTER}" * 1000
    assert max(map(len, parts)) <= MAX_OPEN_TOKENS


@given(
    st.text(alphabet="ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)
)
def test_no_part_of_a_stop_string_is_streamed(text, stops):
    ends = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    num_tokens = min((end for end, _ in ends), default=len(text))
    is_stopped = bool(ends)
    tokens = BYTES(text[:num_tokens])["input_ids"]
    expected = text[:num_tokens]
    if is_stopped:
        expected = expected[: min(expected.find(stop) for stop in stops if stop in expected)]
    stream = IncrementalDetokenizer(decoder(BYTES), stops)
    parts = streamed(stream, tokens, is_stopped)
    assert "".join(parts) == expected
    at_once = IncrementalDetokenizer(decoder(BYTES), stops)
    assert at_once.push(tokens) + at_once.finish(is_stopped=is_stopped) == expected
    # No part has to be taken back.
    assert all(expected.startswith("".join(parts[:n])) for n in range(len(parts)))


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=6), max_size=3))
def test_the_end_of_a_text_that_begins_a_string_is_found_whole(text, strings):
    begun = [
        size
        for string in strings
        for size in range(1, min(len(string), len(text) + 1))
        if text.endswith(string[:size])
    ]
    assert num_partial_match(text, strings) == max(begun, default=0)


def test_text_that_cannot_be_a_stop_string_is_not_held_back():
    stream = IncrementalDetokenizer(decoder(BYTES), ["STOP"])
    tokens = BYTES("a STO b S")["input_ids"]
    parts = [stream.push([token]) for token in tokens]
    assert parts == ["a", " ", "", "", "", "STO ", "b", " ", ""]
    assert stream.finish(is_stopped=False) == "S"


def test_a_stop_string_that_did_not_end_the_sequence_is_text():
    # As with min_tokens: it came too early, and an end-of-sequence token came later.
    stream = IncrementalDetokenizer(decoder(BYTES), ["xx"])
    tokens = [*BYTES("axxb")["input_ids"], BYTES.eos_token_id]
    assert "".join(streamed(stream, tokens, is_stopped=True)) == "axxb"
    assert first_stop("axxbxx", 5, ["xx"]) == 4


@pytest.mark.parametrize(
    ("tokenizer", "token", "expected"),
    [
        (BYTES, IDS_OF_BYTES[0xE4], [0xE4]),
        (BYTES, IDS_OF_BYTES[0x20], [0x20]),
        (FALLBACK, FALLBACK.convert_tokens_to_ids("<0xE4>"), [0xE4]),
        (FALLBACK, FALLBACK.convert_tokens_to_ids("a"), [0x61]),
    ],
)
def test_a_token_that_is_no_whole_character_has_its_bytes(tokenizer, token, expected):
    assert TokenTable(tokenizer)._look_up(token)[1] == expected


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("<0x+5>", b"<0x+5>"),
        ("<0x 5>", INCOMPLETE.encode()),
        ("<0x\ufffd\ufffd>", INCOMPLETE.encode()),
        ("<0x\u0665\u0665>", INCOMPLETE.encode()),
    ],
)
def test_a_token_that_looks_like_a_byte_and_is_none_is_no_byte(token, expected):
    assert _bytes_of(token, INCOMPLETE) == list(expected)
