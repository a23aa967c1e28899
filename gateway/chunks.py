"""Deltas -> the bytes of a stream's events. Pure, but for the function that it hands them to.

Nearly all chunks of a stream differ in their text alone. So the first of them is rendered with a mark in its
text, and cut there; the others are its two parts with their text between. What adds more than text is
rendered as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from json.encoder import encode_basestring  # the C function behind json.dumps

from gateway.answer import Answer, Delta
from gateway.endpoints import Json
from gateway.rendering import Renderer
from gateway.reply import event_of

_MARK = "\N{OBJECT REPLACEMENT CHARACTER}baton\N{OBJECT REPLACEMENT CHARACTER}"
_MARK_JSON = encode_basestring(_MARK).encode()


class ChunkWriter:
    """Writes the events of one call.

    Args:
        answers: of the call.
        write: takes the bytes of one event or several.
        first_written: called with each answer once, behind the write of the first that tells something of it.
    """

    def __init__(
        self,
        renderer: Renderer,
        answers: Sequence[Answer],
        write: Callable[[bytes], None],
        first_written: Callable[[Answer], None],
    ) -> None:
        self._renderer = renderer
        self._answers = answers
        self._write = write
        self._first_written = first_written
        self._untold = {answer.index: answer for answer in answers}  # only their openings were written
        self._cut: dict[int, tuple[bytes, bytes]] = {}  # by the answer's index: before a text, and after it

    def add(self, answer: Answer, delta: Delta) -> None:
        """Write what one event of an answer adds."""
        cut = self._cut.get(answer.index)
        if cut is not None and delta.is_text:
            if delta.text:
                self._write(cut[0] + encode_basestring(delta.text).encode() + cut[1])
            return
        chunks = self._renderer.chunks(answer, delta, self._answers)
        if chunks:
            self._write(b"".join(map(event_of, chunks)))
            if self._untold:
                self._tell_of(chunks)
            is_told = answer.index not in self._untold
            if cut is None and is_told and delta.finish is None and self._renderer.is_plain:
                self._cut[answer.index] = self._cut_of(answer)

    def _tell_of(self, chunks: Sequence[Json]) -> None:
        for chunk in chunks:
            (choice,) = chunk["choices"]
            if "role" in choice.get("delta", ()):
                continue
            if (answer := self._untold.pop(choice["index"], None)) is not None:
                self._first_written(answer)

    def _cut_of(self, answer: Answer) -> tuple[bytes, bytes]:
        (chunk,) = self._renderer.chunks(answer, Delta(_MARK, ()), self._answers)
        head, tail = event_of(chunk).split(_MARK_JSON)
        return head, tail
