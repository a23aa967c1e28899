"""Token ids -> text, a token at a time, never showing half a character.

A character may span several tokens; until its last byte is there a decoder shows U+FFFD. And the text of a
token may depend on the one before it (a leading space). So a window of ids is decoded: the tokens shown last,
for context, and those not shown yet; what goes beyond the text of the former is new. `DecodeStream` of
`tokenizers` does the same, but cannot flush an unfinished character at the end, and raises where a decoder
takes back what it showed (byte-fallback runs).

Knows nothing of stop strings.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """The growing text of one answer: joined, the pieces are `decode(ids, skip_special_tokens=True)`.

    Only a decoder that takes back what it showed (a run of byte-fallback tokens that turns out to be no
    UTF-8) makes them differ: what was shown stays.
    """

    def add(self, token_id: int) -> str:
        """Take a token; return the text that is certain now, which may be empty."""
        ...

    def flush(self) -> str:
        """Return what was held back: an unfinished character, as the decoder shows it. Ends the text."""
        ...


class WindowDetokenizer:
    """See `Detokenizer`; for any tokenizer. `byte_level.py` has a faster one for most.

    Args:
        silent_ids: ids that have no text (special tokens); left out, so that a run of them costs nothing.
    """

    def __init__(self, tokenizer: Tokenizer, silent_ids: Container[int]) -> None:
        self._tokenizer = tokenizer
        self._silent_ids = silent_ids
        self._window: list[int] = []
        self._num_shown = 0  # ids at the head of the window whose text was given out
        self._shown = ""  # their text

    def add(self, token_id: int) -> str:
        """Take a token; return the text that is certain now, which may be empty."""
        if token_id in self._silent_ids:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        # Not longer: a token without a text of its own, kept because it may shape the next one's.
        if text.endswith(REPLACEMENT) or len(text) <= len(self._shown):
            return ""
        new = text[len(self._shown) :]
        self._window = self._window[self._num_shown :]
        self._num_shown = len(self._window)
        self._shown = self._decode(self._window)
        return new

    def flush(self) -> str:
        """Return what was held back: an unfinished character, as the decoder shows it. Ends the text."""
        text = self._decode(self._window)
        new = text[len(self._shown) :]
        self._window = []
        self._num_shown = 0
        self._shown = ""
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)  # `add` leaves out the silent ones
