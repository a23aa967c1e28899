"""Stop strings in a text that comes in pieces: cut before the first one, give out nothing of it.

Knows no tokens. Held back is never more than the longest stop string less one character.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The visible part of a text that ends before the first of `stops`.

    A match counts when its last character comes in a piece that is fed while armed; among those the one that
    starts first wins.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""  # the longest tail of the text that begins a stop string
        self.matched = False

    def feed(self, piece: str, *, armed: bool) -> str:
        """Take the next piece of text; return what is certain to be visible. Not called after a match."""
        text = self._held + piece
        if armed:
            found = [at for stop in self._stops if (at := self._find(text, stop)) >= 0]
            if found:
                self.matched = True
                self._held = ""
                return text[: min(found)]
        keep = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def release(self) -> str:
        """Return what was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, stop: str) -> int:
        # Not a match that ends within what is held: it came while not armed.
        return text.find(stop, max(0, len(self._held) - len(stop) + 1))

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Return the length of the longest end of `text` that is a beginning of `stop`, and not all of it."""
        for size in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:size]):
                return size
        return 0
