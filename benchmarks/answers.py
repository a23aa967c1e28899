"""The bytes of a streamed completion, read afterwards: when each chunk came, how many tokens it had.

Counts by the ids of the tokens where the server sends them, else by the usage that it sends with each chunk,
else one token a chunk with text. Measures nothing itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httptools

from benchmarks.token_streams import TokenStream

_DONE = b"[DONE]"
_OK = 200
_MOST_ERROR_CHARS = 200


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one request; times are those of its stream, in seconds."""

    begun_s: float
    chunks: Sequence[tuple[float, int]]  # those with tokens: when it was whole, how many tokens
    prompt_tokens: int | None  # as the server counts
    num_tokens: int
    error: str  # empty when the answer is whole

    @property
    def ttft_s(self) -> float:
        """Time to the first token; there must be one."""
        return self.chunks[0][0] - self.begun_s

    @property
    def ended_s(self) -> float:
        """When its last token came; there must be one."""
        return self.chunks[-1][0]

    def gaps(self) -> list[tuple[float, float]]:
        """Return when each chunk but the first came, and the seconds since the one before."""
        return [(after, after - before) for (before, _), (after, _) in pairwise(self.chunks)]


@dataclass(slots=True)
class _Events:
    """Callbacks of the HTTP parser: collects server-sent events with the time of their last byte."""

    at_s: float = 0.0
    rest: bytes = b""
    events: list[tuple[float, bytes]] = field(default_factory=list)

    def on_body(self, data: bytes) -> None:
        *whole, self.rest = (self.rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            _, is_event, content = event.partition(b"data:")
            if is_event:
                self.events.append((self.at_s, content.strip()))


def read_answer(stream: TokenStream) -> Answer:
    """Read what came of a request; whatever is wrong with it is the answer's error."""
    body = _Events()
    parser = httptools.HttpResponseParser(body)
    error = stream.failure
    status = 0
    try:
        for body.at_s, data in stream.pieces:
            parser.feed_data(data)
        if stream.pieces:
            status = parser.get_status_code()
    except httptools.HttpParserError as parse_error:
        error = error or f"no HTTP: {parse_error}"
    if status != _OK:
        said = body.rest.decode(errors="replace")[:_MOST_ERROR_CHARS]
        error = error or (f"{status}: {said}" if status else "the connection was closed")
    return _count(stream.begun_s, body.events, error)


def _count(begun_s: float, events: Sequence[tuple[float, bytes]], error: str) -> Answer:
    chunks: list[tuple[float, int]] = []
    counted, usage, is_whole = 0, None, False
    for at_s, content in events:
        if content == _DONE:
            is_whole = True
            continue
        chunk = json.loads(content)
        if chunk.get("error"):
            error = error or str(chunk["error"])[:_MOST_ERROR_CHARS]
        usage = chunk.get("usage") or usage
        added = _tokens(chunk, counted)
        if added:
            chunks.append((at_s, added))
            counted += added
    return Answer(
        begun_s,
        chunks,
        usage["prompt_tokens"] if usage else None,
        usage["completion_tokens"] if usage else counted,
        error or ("" if is_whole and chunks else "it ended early"),
    )


def _tokens(chunk: dict[str, Any], counted: int) -> int:
    """Return how many tokens a chunk has, after so many before it."""
    if not chunk.get("choices"):
        return 0
    choice = chunk["choices"][0]
    if choice.get("token_ids") is not None:
        return len(choice["token_ids"])
    if chunk.get("usage"):
        return int(chunk["usage"]["completion_tokens"]) - counted
    return 1 if choice.get("text") else 0
