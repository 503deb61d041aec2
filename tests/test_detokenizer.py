"""The detokenizer: whole characters, no part of a stop string, nothing lost."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from localpaged.engine.detokenizer import REPLACEMENT, Detokenizer


def decode_bytes(token_ids: list[int]) -> str:
    """Each token is one byte: the hardest case for whole characters."""
    return bytes(token_ids).decode("utf-8", errors="replace")


def run(text: bytes, stop: tuple[str, ...] = (), include: bool = False) -> tuple[list[str], str | None]:
    detokenizer = Detokenizer(decode_bytes, stop, include)
    pieces = []
    for byte in text:
        pieces.append(detokenizer.push(byte))
        if detokenizer.matched_stop is not None:
            break
    pieces.append(detokenizer.finish())
    return pieces, detokenizer.matched_stop


def test_an_answer_that_goes_on_reads_as_after_the_tokens_before_it() -> None:
    # As SentencePiece decodes: a space at the very beginning is dropped.
    def decode(token_ids: list[int]) -> str:
        return "".join(["", " one", " two", " three"][token_id] for token_id in token_ids).removeprefix(" ")

    assert Detokenizer(decode).push(2) == "two"
    assert Detokenizer(decode, before=[1]).push(2) == " two"
    assert Detokenizer(decode, before=[1]).finish() == ""


def test_characters_come_whole() -> None:
    pieces, _ = run("aé猫🐈".encode())
    assert [piece for piece in pieces if piece] == ["a", "é", "猫", "🐈"]


def test_an_answer_cut_inside_a_character_leaves_it_out() -> None:
    pieces, _ = run("ab🐈".encode()[:-1])
    assert "".join(pieces) == "ab"


def test_bytes_that_are_no_character_do_not_hold_the_rest_back() -> None:
    pieces, _ = run(b"a\xff\xff\xff\xff\xffb")
    assert "".join(pieces) == "a" + REPLACEMENT * 5 + "b"


def test_a_stop_string_is_never_shown_in_part() -> None:
    pieces, matched = run(b"one END two", ("END",))
    assert "".join(pieces) == "one "
    assert matched == "END"
    assert not any("E" in piece for piece in pieces)


def test_what_only_began_like_a_stop_string_is_shown() -> None:
    pieces, matched = run(b"one ENamel", ("END",))
    assert ("".join(pieces), matched) == ("one ENamel", None)


def test_the_beginning_of_a_stop_string_at_the_end_is_shown() -> None:
    assert "".join(run(b"one EN", ("END",))[0]) == "one EN"


def test_a_stop_string_can_be_included() -> None:
    assert "".join(run(b"one END two", ("END",), include=True)[0]) == "one END"


def test_the_earliest_of_several_stop_strings_ends_the_answer() -> None:
    pieces, matched = run(b"abcdef", ("def", "bcd"))
    assert ("".join(pieces), matched) == ("a", "bcd")


def test_stop_strings_are_not_looked_for_before_they_may_be() -> None:
    detokenizer = Detokenizer(decode_bytes, ("b",))
    text = detokenizer.push(ord("a"), check_stop=False) + detokenizer.push(ord("b"), check_stop=False)
    assert text == "ab"
    detokenizer.push(ord("b"))
    assert detokenizer.matched_stop == "b"


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_give_what_decoding_at_once_gives(text: bytes) -> None:
    expected = decode_bytes(list(text)).rstrip(REPLACEMENT)
    assert "".join(run(text)[0]).rstrip(REPLACEMENT) == expected


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="abé", max_size=30), st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3))
def test_stop_strings_cut_where_the_first_of_them_ends_first(text: str, stop: list[str]) -> None:
    pieces, matched = run(text.encode(), tuple(stop))
    ends = [text.find(s) + len(s) for s in stop if s in text]
    if not ends:
        assert ("".join(pieces), matched) == (text, None)
    else:
        # Tokens are bytes here, so the answer ends with the first byte that completes a stop string.
        assert matched is not None
        assert "".join(pieces) + matched == text[: min(ends)]


@pytest.fixture(scope="module")
def metaspace() -> Tokenizer:
    """Pieces that mark a space at their beginning, and bytes, as in Llama 2."""
    pieces = ["<unk>", "▁Hello", "▁wor", "ld", "▁", "!", *(f"<0x{b:02X}>" for b in "猫".encode())]
    tokenizer = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def test_pieces_that_carry_spaces_join_as_they_decode(metaspace: Tokenizer) -> None:
    ids = [1, 2, 3, 4, 6, 7, 8, 5]
    detokenizer = Detokenizer(lambda part: metaspace.decode(part, skip_special_tokens=True))
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(pieces) + detokenizer.finish() == metaspace.decode(ids) == "Hello world 猫!"


def test_real_text_round_trips_through_the_default_model(default_model_path: Path) -> None:
    from localpaged.models.chat_tokenizer import load_tokenizer

    tokenizer = load_tokenizer(default_model_path)
    text = "Prices: $3.50 – naïve café, 猫と🐈‍⬛, العربية\n\n```py\n\tx = 1\n```\n" * 3
    detokenizer = Detokenizer(lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
    assert "".join(detokenizer.push(i) for i in tokenizer.encode(text)) + detokenizer.finish() == text
