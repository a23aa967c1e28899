"""Messages as bytes, taken apart and put together wrongly."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from common.codec import MAX_STR, Envelope
from common.errors import RemoteProtocolError
from common.messages import CODEC
from tests.wire.schema import conforms

# One of every kind that msgpack knows, and the edges of numbers.
ANYTHING: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.0, 0.5, -0.5, 1e13,
    float("nan"), float("inf"), "", "stop", "x" * (MAX_STR + 1), b"", b"\x00", [], [1], [True], [[]], [None],
    {}, {"a": 1}, {"a": True}, msgpack.Timestamp(1, 2), msgpack.ExtType(5, b"x"),
)  # fmt: skip


def wire(message: Any) -> list[bytes]:
    """The frames of a message."""
    return [bytes(frame) for frame in CODEC.encode(Envelope(3, 4, message))]


def header_of(message: Any) -> dict[str, Any]:
    """The header of a message, to be tampered with."""
    raw = msgpack.unpackb(wire(message)[0])
    assert isinstance(raw, dict)
    return raw


def with_header(message: Any, raw: Any) -> list[bytes]:
    """The frames of a message behind another header."""
    return [msgpack.packb(raw), *wire(message)[1:]]


def refuses(frames: list[bytes], match: str | None = None) -> None:
    """The frames are no message; the error says so."""
    with pytest.raises(RemoteProtocolError, match=match):
        CODEC.decode(frames)


def decodes_or_refuses(frames: list[bytes]) -> None:
    """Whatever the bytes are: a message whose fields are what their annotations say, or the one error."""
    try:
        envelope = CODEC.decode(frames)
    except RemoteProtocolError:
        return
    assert conforms(int, envelope.epoch)
    assert conforms(int, envelope.seq)
    assert conforms(type(envelope.message), envelope.message)
