"""Each token of a vocabulary by itself, as text and as bytes: what log probabilities are told with.

A token may be a part of a character; then its text is U+FFFD and its bytes say which part. Knows nothing of
answers: their text is the detokenizer's business.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenizers import Tokenizer

from gateway.detokenizer import REPLACEMENT

_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")  # byte fallback


def byte_level_alphabet() -> dict[str, int]:
    """Return the byte behind each character of a byte-level piece.

    GPT-2's: what Latin-1 can print is itself, the other bytes follow in order from U+0100 on.
    """
    printable = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = byte_level_alphabet()


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token by itself. `raw` is exact for a part of a character too."""

    text: str
    raw: bytes


class TokenTexts:
    """The tokens of a tokenizer, each decoded once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # In front of every token: some decoders drop a leading space, but only that of a whole text.
        self._context = tokenizer.encode("a", add_special_tokens=False).ids
        self._shown = len(self._decode(self._context))
        self._known: dict[int, TokenText] = {}  # at most the vocabulary

    def of(self, token_id: int) -> TokenText:
        """Return a token's text; special tokens have theirs, ids without a token have none."""
        known = self._known.get(token_id)
        if known is None:
            text = self._decode([*self._context, token_id])[self._shown :]
            known = self._known[token_id] = TokenText(text, self._raw(token_id, text))
        return known

    def _raw(self, token_id: int, text: str) -> bytes:
        piece = self._tokenizer.id_to_token(token_id)
        if piece is not None and REPLACEMENT in text:
            if match := _BYTE_PIECE.fullmatch(piece):
                return bytes.fromhex(match[1])
            if all(character in _ALPHABET for character in piece):
                return bytes(_ALPHABET[character] for character in piece)
        return text.encode()

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
