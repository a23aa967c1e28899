"""The look-up of byte-level tokens against `tokenizer.decode` of everything at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from gateway.byte_level import ByteLevelDetokenizer, BytePieces, is_byte_level
from gateway.detokenizer import REPLACEMENT, WindowDetokenizer
from gateway.text import TextPipeline
from tests.gateway.test_detokenizer import BYTE_FALLBACK
from tests.tiny import SPECIAL_TOKENS, VOCAB_SIZE

SILENT = frozenset(range(len(SPECIAL_TOKENS)))
PLAIN, HIDDEN = "<tool_call> é", "<hidden>"  # added later: the one is text, and not of the alphabet


@pytest.fixture(scope="module")
def tokenizer(byte_level: Tokenizer) -> Tokenizer:
    copy = Tokenizer.from_str(byte_level.to_str())
    copy.add_tokens([AddedToken(PLAIN, special=False)])
    copy.add_special_tokens([HIDDEN])
    return copy


@pytest.fixture(scope="module")
def pieces(tokenizer: Tokenizer) -> BytePieces:
    return BytePieces(tokenizer, SILENT | {tokenizer.token_to_id(HIDDEN)})


def texts_of(pieces: BytePieces, ids: list[int]) -> list[str]:
    detokenizer = ByteLevelDetokenizer(pieces)
    return [*(detokenizer.add(token_id) for token_id in ids), detokenizer.flush()]


@given(ids=st.lists(st.integers(0, VOCAB_SIZE + 5), max_size=60))
def test_any_tokens_give_the_text_of_all_at_once(
    tokenizer: Tokenizer, pieces: BytePieces, ids: list[int]
) -> None:
    assert "".join(texts_of(pieces, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@given(raw=st.binary(max_size=40))
def test_any_bytes_give_the_text_of_all_at_once(tokenizer: Tokenizer, pieces: BytePieces, raw: bytes) -> None:
    by_byte = {pieces.of(i): i for i in range(VOCAB_SIZE) if len(pieces.of(i)) == 1}
    ids = [by_byte[bytes([byte])] for byte in raw]
    assert "".join(texts_of(pieces, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@given(text=st.text(max_size=30))
def test_no_piece_shows_half_a_character(tokenizer: Tokenizer, pieces: BytePieces, text: str) -> None:
    texts = texts_of(pieces, tokenizer.encode_batch([text])[0].ids)
    assert all(REPLACEMENT not in piece for piece in texts) or REPLACEMENT in text


def test_an_unfinished_character_is_shown_at_the_end(tokenizer: Tokenizer, pieces: BytePieces) -> None:
    ids = tokenizer.encode_batch(["x😀"])[0].ids[:-1]
    assert texts_of(pieces, ids) == ["x", *[""] * (len(ids) - 1), REPLACEMENT]


def test_added_tokens(tokenizer: Tokenizer, pieces: BytePieces) -> None:
    ids = [tokenizer.token_to_id(PLAIN), tokenizer.token_to_id(HIDDEN)]
    assert texts_of(pieces, ids) == [PLAIN, "", ""]


def test_each_tokenizer_has_the_detokenizer_that_fits(text: TextPipeline, byte_level: Tokenizer) -> None:
    assert (is_byte_level(byte_level), is_byte_level(BYTE_FALLBACK)) == (True, False)
    assert isinstance(text.detokenizer(), ByteLevelDetokenizer)
    assert isinstance(TextPipeline(None).detokenizer(), WindowDetokenizer)
