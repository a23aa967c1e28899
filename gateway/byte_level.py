"""Token ids -> text where the tokenizer is byte-level (GPT-2, Llama 3, Qwen, SmolLM2): a look-up a token.

There a token is the same bytes wherever it stands, so the text of many is the text of their bytes, joined.
Most tokens are whole characters, and their text is known after the first time. `tokenizers` would decode each
step anew, one sequence after the other: `decode_batch` costs as much for each as `decode`.
"""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Container

from tokenizers import Tokenizer, decoders

from gateway.token_text import byte_level_alphabet

_ALPHABET = byte_level_alphabet()


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Say whether the text of tokens is that of their bytes."""
    return type(tokenizer.decoder) is decoders.ByteLevel


class BytePieces:
    """The vocabulary, each token looked up once; shared by all answers.

    Args:
        silent_ids: ids that have no text (special tokens).
    """

    def __init__(self, tokenizer: Tokenizer, silent_ids: Container[int]) -> None:
        self._tokenizer = tokenizer
        self._silent_ids = silent_ids
        self._raw: dict[int, bytes] = {}  # at most the vocabulary
        self.whole: dict[int, str] = {}  # of those that were asked for and are whole characters

    def of(self, token_id: int) -> bytes:
        """Return a token's bytes: none of a silent one, or where there is no such token."""
        raw = self._raw.get(token_id)
        if raw is None:
            piece = None if token_id in self._silent_ids else self._tokenizer.id_to_token(token_id)
            raw = self._raw[token_id] = b"" if piece is None else _bytes_of(piece)
            with contextlib.suppress(UnicodeDecodeError):  # a part of a character
                self.whole[token_id] = raw.decode()
        return raw


def _bytes_of(piece: str) -> bytes:
    # A token that was added to the vocabulary may be plain text; then it is not in the alphabet as a whole.
    try:
        return bytes(_ALPHABET[character] for character in piece)
    except KeyError:
        return piece.encode()


class ByteLevelDetokenizer:
    """See `Detokenizer`."""

    def __init__(self, pieces: BytePieces) -> None:
        self._pieces = pieces
        self._whole = pieces.whole
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._holds = False  # the begin of a character

    def add(self, token_id: int) -> str:
        """Take a token; return the text that is certain now, which may be empty."""
        if not self._holds and (text := self._whole.get(token_id)) is not None:
            return text
        text = self._decoder.decode(self._pieces.of(token_id))
        self._holds = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """Return what was held back: an unfinished character, as U+FFFD. Ends the text."""
        self._holds = False
        return self._decoder.decode(b"", final=True)
