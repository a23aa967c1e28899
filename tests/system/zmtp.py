"""What a stranger can write to an open port: bytes of ZMTP 3.1 (RFC 23 and 37), good as far as they go."""

from __future__ import annotations

import struct

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
MORE, LONG, COMMAND = 1, 2, 4


def greeting(mechanism: bytes = b"NULL", version: bytes = b"\x03\x01") -> bytes:
    """The 64 bytes that open a connection."""
    return SIGNATURE + version + mechanism.ljust(20, b"\0") + b"\0" + bytes(31)


def frame(body: bytes, flags: int = 0, size: int | None = None) -> bytes:
    """A frame; `size` is what it claims to have, if that is a lie."""
    return bytes((flags | LONG,)) + struct.pack(">Q", len(body) if size is None else size) + body


def ready(kind: bytes = b"DEALER") -> bytes:
    """The command that ends a handshake without keys."""
    return frame(b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind, COMMAND)


def hand_shaken() -> bytes:
    """All that a dealer says before its first message."""
    return greeting() + ready()
