"""Deltas -> the bytes of a stream's events. Pure, but for the function that it hands them to.

Nearly all chunks of a stream differ in their text alone. So the first of them is rendered with a mark in its
text, and cut there; the others are its two parts with their text between. What adds more than text is
rendered as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from json.encoder import encode_basestring  # the C function behind json.dumps

from gateway.answer import Answer, Delta
from gateway.rendering import Renderer
from gateway.reply import event_of

_MARK = "\N{OBJECT REPLACEMENT CHARACTER}baton\N{OBJECT REPLACEMENT CHARACTER}"
_MARK_JSON = encode_basestring(_MARK).encode()


class ChunkWriter:
    """Writes the events of one call.

    Args:
        answers: of the call.
        write: takes the bytes of one event or several.
    """

    def __init__(self, renderer: Renderer, answers: Sequence[Answer], write: Callable[[bytes], None]) -> None:
        self._renderer = renderer
        self._answers = answers
        self._write = write
        self._cut: dict[int, tuple[bytes, bytes]] = {}  # by the answer's index: before a text, and after it

    def add(self, answer: Answer, delta: Delta) -> None:
        """Write what one event of an answer adds."""
        cut = self._cut.get(answer.index)
        if cut is not None and delta.is_text:
            if delta.text:
                self._write(cut[0] + encode_basestring(delta.text).encode() + cut[1])
            return
        events = [event_of(chunk) for chunk in self._renderer.chunks(answer, delta, self._answers)]
        if events:
            self._write(b"".join(events))
            if cut is None and delta.finish is None and self._renderer.is_plain:
                self._cut[answer.index] = self._cut_of(answer)

    def _cut_of(self, answer: Answer) -> tuple[bytes, bytes]:
        (chunk,) = self._renderer.chunks(answer, Delta(_MARK, ()), self._answers)
        head, tail = event_of(chunk).split(_MARK_JSON)
        return head, tail
