"""Tokens by themselves against the text that they were cut from, and against the tokenizer's own alphabet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from gateway.token_text import TokenText, TokenTexts, byte_level_alphabet
from tests.gateway.test_detokenizer import BYTE_FALLBACK
from tests.tiny import IM_END, VOCAB_SIZE


def joined(tokenizer: Tokenizer, text: str) -> bytes:
    """The bytes of a text's tokens, after a look at their texts."""
    texts = TokenTexts(tokenizer)
    tokens = [texts.of(token_id) for token_id in tokenizer.encode(text, add_special_tokens=False).ids]
    for token in tokens:
        assert token.text == token.raw.decode(errors="replace")
    return b"".join(token.raw for token in tokens)


def test_alphabet_is_the_tokenizers_own() -> None:
    alphabet = byte_level_alphabet()
    assert alphabet.keys() == set(pre_tokenizers.ByteLevel.alphabet())
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for character in map(chr, [*range(0x100), 0x4F60, 0x1F600]):
        ((piece, _),) = pre_tokenizer.pre_tokenize_str(character)
        assert bytes(alphabet[part] for part in piece) == character.encode()


@given(text=st.text(max_size=20))
def test_byte_level(byte_level: Tokenizer, text: str) -> None:
    assert joined(byte_level, text) == text.encode()


@given(text=st.text(alphabet="ab é你😀\ufffd", max_size=20))
def test_byte_fallback(text: str) -> None:
    # Its spaces are kept, the one that it puts before a text included.
    assert joined(BYTE_FALLBACK, text) in (text.encode(), b" " + text.encode())


def test_no_two_tokens_have_the_same_bytes(byte_level: Tokenizer) -> None:
    texts = TokenTexts(byte_level)
    assert len({texts.of(token_id).raw for token_id in range(VOCAB_SIZE)}) == VOCAB_SIZE


@pytest.mark.parametrize(
    ("token_id", "text"), [(IM_END, "<|im_end|>"), (VOCAB_SIZE, ""), (VOCAB_SIZE + 5, "")]
)
def test_special_tokens_have_a_text_and_ids_without_a_token_none(
    byte_level: Tokenizer, token_id: int, text: str
) -> None:
    assert TokenTexts(byte_level).of(token_id) == TokenText(text, text.encode())
