"""Frames from anywhere: a message that is what its annotations say, or RemoteProtocolError; nothing else.

What was decoded is encoded again and decoded again: both times the same.
"""

from __future__ import annotations

import random
import re
from typing import Any

import msgpack

from common.codec import Envelope
from common.errors import RemoteProtocolError
from common.messages import CODEC
from fuzz.mutation import changed_bytes, changed_tree
from tests.wire.golden import INSTANCES
from tests.wire.raw import wire
from tests.wire.schema import conforms

# Between two frames. msgpack never uses the byte 0xc1.
SEPARATOR = b"\xc1\xc1"
MAX_BYTES = 4096
# What differs from input to input in an error.
_VALUES = re.compile(r"(?<=version ).*|(?<=kind ).*|(?<=field ).*|(?<=counters\.).*|'.*'|\d+")


def join(frames: list[bytes]) -> bytes:
    """Frames as one input."""
    return SEPARATOR.join(frames)


def split(data: bytes) -> list[bytes]:
    """An input as frames."""
    return data.split(SEPARATOR)


def seeds() -> list[bytes]:
    """One of every message."""
    return [join(wire(message)) for message in INSTANCES]


def run(data: bytes) -> str:
    """Decode the frames, once as bytes and once as views of them; return the kind, or why it is none."""
    frames = split(data)
    try:
        envelope = CODEC.decode(frames)
    except RemoteProtocolError as error:
        return _VALUES.sub("_", str(error))[:80]
    assert conforms(int, envelope.epoch)
    assert conforms(int, envelope.seq)
    assert conforms(type(envelope.message), envelope.message), envelope
    again = _encoded(envelope)
    assert CODEC.decode([memoryview(frame) for frame in again]) == envelope
    assert _encoded(CODEC.decode(again)) == again
    return type(envelope.message).__name__


def _encoded(envelope: Envelope) -> list[bytes]:
    return [bytes(frame) for frame in CODEC.encode(envelope)]


def mutate(data: bytes, draw: random.Random) -> bytes:
    """Change a value of the header, or some bytes, or the frames."""
    frames = split(data)
    match draw.randrange(8):
        case 0 | 1 | 2 | 3 | 4:
            try:
                header: Any = msgpack.unpackb(frames[0], strict_map_key=False)
                frames[0] = msgpack.packb(changed_tree(header, draw))
            except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
                frames[0] = changed_bytes(frames[0], draw)
        case 5:
            at = draw.randrange(len(frames))
            frames[at] = changed_bytes(frames[at], draw)
        case 6:
            at = draw.randrange(len(frames))
            frames[at : at + 1] = draw.choice(([], [frames[at]] * 2, [frames[at], b""], frames[::-1]))
        case _:
            frames[1:] = [draw.randbytes(draw.choice((0, 1, 4, 8, 16))) for _ in range(draw.randrange(4))]
    return join(frames)
