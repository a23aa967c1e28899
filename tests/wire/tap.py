"""A tap in the line between one D and one P: shows each message, loses, doubles or changes it, cuts the line.

Both ends speak through real sockets and know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import zmq

from common.codec import Buffer, Envelope
from common.messages import CODEC
from common.sockets import FrameSocket, Pollable

# What to pass on in the place of a message: nothing, itself, itself twice, another.
Hook = Callable[[Any], Sequence[Any]]


def unchanged(message: Any) -> Sequence[Any]:
    """Pass it on."""
    return (message,)


class Tap:
    """Listens at `front` for D, and connects to P at `back`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], front: str, back: str) -> None:
        self._context = context
        self._front_address, self._back_address = front, back
        self._front: FrameSocket | None = FrameSocket.router(context, front)
        self._back: FrameSocket | None = None
        self._identity = b""
        self.to_p: Hook = unchanged
        self.to_d: Hook = unchanged

    def pollables(self) -> list[Pollable]:
        """What to wait for."""
        return [item for end in (self._front, self._back) if end is not None for item in end.pollables()]

    def poll(self) -> None:
        """Pass on what is there."""
        while self._front is not None and (received := self._front.receive()) is not None:
            if received.identity != self._identity or self._back is None:  # D connected anew
                self._connect(received.identity)
            assert self._back is not None
            for frames in _through(self.to_p, received.frames):
                self._back.send(frames)
        while self._back is not None and (received := self._back.receive()) is not None:
            for frames in _through(self.to_d, received.frames):
                if self._front is not None:
                    self._front.send(frames, self._identity)

    def cut(self) -> None:
        """Break both connections; nobody can reach anybody until `mend`."""
        for end in (self._front, self._back):
            if end is not None:
                end.close()
        self._front = self._back = None

    def mend(self) -> None:
        """Let D connect again."""
        self._front = FrameSocket.router(self._context, self._front_address)

    def close(self) -> None:
        """Close everything."""
        self.cut()

    def _connect(self, identity: bytes) -> None:
        if self._back is not None:
            self._back.close()
        self._back = FrameSocket.dealer(self._context, self._back_address)
        self._identity = identity


def _through(hook: Hook, frames: Sequence[Buffer]) -> list[list[Buffer]]:
    envelope = CODEC.decode(frames)
    messages: list[Envelope] = [replace(envelope, message=m) for m in hook(envelope.message)]
    return [CODEC.encode(message) for message in messages]
