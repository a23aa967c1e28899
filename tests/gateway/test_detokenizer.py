"""Incremental text against `tokenizer.decode` of everything at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gateway.detokenizer import REPLACEMENT, WindowDetokenizer
from gateway.text import TextPipeline
from tests.tiny import IM_END, VOCAB_SIZE


def _byte_fallback() -> Tokenizer:
    """Like Llama 2: spaces as ▁, a leading one dropped, what is unknown as bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefgh"]
    tokenizer = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


BYTE_FALLBACK = _byte_fallback()


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = WindowDetokenizer(tokenizer, frozenset({0, 1, 2}))
    return [*(detokenizer.add(token_id) for token_id in ids), detokenizer.flush()]


@given(ids=st.lists(st.integers(0, VOCAB_SIZE + 5), max_size=40))
def test_any_tokens_give_the_text_of_all_at_once(byte_level: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces_of(byte_level, ids)) == byte_level.decode(ids, skip_special_tokens=True)


@given(text=st.text(max_size=30))
def test_no_piece_shows_half_a_character(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode_batch([text])[0].ids
    # A special token that is written out is one, and has no text.
    shown = byte_level.decode(ids, skip_special_tokens=True)
    pieces = pieces_of(byte_level, ids)
    assert "".join(pieces) == shown
    assert all(REPLACEMENT not in piece for piece in pieces) or REPLACEMENT in text


@given(text=st.text(alphabet="ab ▁é你😀", max_size=20))
def test_spaces_and_byte_fallback(text: str) -> None:
    ids = BYTE_FALLBACK.encode_batch([text])[0].ids
    pieces = pieces_of(BYTE_FALLBACK, ids)
    assert "".join(pieces) == BYTE_FALLBACK.decode(ids)
    assert all(REPLACEMENT not in piece for piece in pieces)


def test_text_that_the_decoder_takes_back_stays() -> None:
    ids = [BYTE_FALLBACK.token_to_id(piece) for piece in ("<0x41>", "<0xE4>", "b")]
    assert BYTE_FALLBACK.decode(ids) == 2 * REPLACEMENT + "b"
    assert pieces_of(BYTE_FALLBACK, ids) == ["A", "", REPLACEMENT + "b", ""]


def test_unfinished_character_is_shown_at_the_end(byte_level: Tokenizer) -> None:
    ids = byte_level.encode_batch(["x😀"])[0].ids[:-1]
    assert pieces_of(byte_level, ids) == ["x", *[""] * (len(ids) - 1), REPLACEMENT]


def test_special_tokens_have_no_text(text: TextPipeline) -> None:
    detokenizer = text.detokenizer()
    word = text.encode(["fox"], special_tokens=False)[0]
    ids = [IM_END, *word, IM_END, *word, IM_END]
    assert "".join(detokenizer.add(token_id) for token_id in ids) + detokenizer.flush() == "foxfox"
