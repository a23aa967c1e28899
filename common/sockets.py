"""The only general ZMQ wrapper: non-blocking sockets for multipart messages, and one wait for all of them.

High-water marks are 0: credits and queue limits bound memory, and a ROUTER at its mark would drop in
silence. LINGER is 0: what a dead peer did not read is not our business. MAXMSGSIZE cuts a connection whose
frames are larger than the protocol's. Knows nothing of messages: frames in, frames out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from common.codec import MAX_FRAME_BYTES, MAX_FRAMES, Buffer
from common.errors import ConfigError

HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000
# Below this, copying a frame costs less than tracking a zero-copy one.
ZERO_COPY_BYTES = 64 << 10
MAX_IPC_PATH = 107  # sizeof(sockaddr_un.sun_path) - 1

Pollable = zmq.Socket[bytes] | int
# Called with (identity, first frame); gives the buffers that the payload frames go to, or None.
Placer = Callable[[bytes, bytes], Sequence[memoryview] | None]


@dataclass(frozen=True, slots=True)
class ReceivedFrames:
    """A multipart message. `identity` is the sender's routing id at a ROUTER, empty at a DEALER."""

    identity: bytes
    frames: tuple[Buffer, ...]
    complete: bool  # False: a frame did not fit its buffer, or there were too many


def check_address(address: str) -> str:
    """Return the address.

    Raises:
        ConfigError: it is not one that a node can use.
    """
    scheme, _, rest = address.partition("://")
    if scheme not in ("ipc", "tcp") or not rest:
        raise ConfigError(f"{address!r} is no address: use ipc:///path or tcp://host:port")
    if scheme == "ipc" and len(rest.encode()) > MAX_IPC_PATH:
        raise ConfigError(f"socket path {rest!r} is longer than {MAX_IPC_PATH} bytes: choose a shorter one")
    return address


class FrameSocket:
    """A DEALER that connects or a ROUTER that binds. Close it; it is not thread-safe."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> None:
        check_address(address)
        self._socket = context.socket(kind)
        self._monitor: zmq.Socket[bytes] | None = None
        self._is_router = kind == zmq.ROUTER
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        try:
            if self._is_router:
                self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self._socket.bind(address)
            else:
                self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot use address {address}: {error.strerror}") from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    @classmethod
    def router(cls, context: zmq.Context[zmq.Socket[bytes]], address: str) -> FrameSocket:
        """Bind a ROUTER; `.address` is what was bound (a port may be `*`)."""
        return cls(context, zmq.ROUTER, address)

    @classmethod
    def dealer(cls, context: zmq.Context[zmq.Socket[bytes]], address: str) -> FrameSocket:
        """Connect a DEALER; what is sent before the peer is there waits."""
        return cls(context, zmq.DEALER, address)

    def pollables(self) -> tuple[Pollable, ...]:
        """What to wait for."""
        return (self._socket,) if self._monitor is None else (self._socket, self._monitor)

    def fileno(self) -> int:
        """The descriptor of the socket's mailbox: edge-triggered, so read until None after each event."""
        return int(self._socket.fileno())

    def is_readable(self) -> bool:
        """Say whether there is a message; the descriptor may not say so again (see `fileno`)."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def lost_connection(self) -> bool:
        """Say whether a DEALER's connection broke since the last call; then replace the socket.

        A DEALER would hand what is queued to whichever process comes up at the address.
        """
        lost = False
        while self._monitor is not None and int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            lost = True
        return lost

    def send(self, frames: Sequence[Buffer], identity: bytes = b"") -> bool:
        """Queue a message; False when the peer is gone. A large frame must not be written to afterwards."""
        parts: list[Buffer] = [identity, *frames] if self._is_router else list(frames)
        try:
            for index, part in enumerate(parts):
                more = zmq.SNDMORE if index + 1 < len(parts) else 0
                copy = memoryview(part).nbytes < ZERO_COPY_BYTES
                self._socket.send(part, zmq.NOBLOCK | more, copy=copy)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def receive(self, place: Placer | None = None) -> ReceivedFrames | None:
        """Return the next message, or None. `place` may give buffers for the frames behind the first.

        All frames of a message are there when the first one is. `recv_into` truncates in silence, so the
        size that it returns is compared.
        """
        try:
            first = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        identity = b""
        if self._is_router:
            identity, first = first, b""
            if self._more():
                first = self._socket.recv()
        frames: list[Buffer] = [first]
        complete = True
        buffers = place(identity, first) if place is not None else None
        while self._more():
            index = len(frames) - 1
            if buffers is not None and index < len(buffers):
                size = self._socket.recv_into(buffers[index])
                complete = complete and size == buffers[index].nbytes
                frames.append(buffers[index])
            else:
                frame = self._socket.recv()
                if len(frames) <= MAX_FRAMES:
                    frames.append(frame)
                complete = complete and len(frames) <= MAX_FRAMES and buffers is None
        if buffers is not None:
            complete = complete and len(frames) == len(buffers) + 1
        return ReceivedFrames(identity, tuple(frames), complete)

    def close(self) -> None:
        """Close the socket; what is queued is dropped."""
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _more(self) -> bool:
        return bool(self._socket.getsockopt(zmq.RCVMORE))


def wait(pollables: Iterable[Pollable], timeout_s: float | None) -> None:
    """Block until one of them is readable or the time is over (None: for ever)."""
    poller = zmq.Poller()
    for item in pollables:
        poller.register(item, zmq.POLLIN)
    # Rounded up: a deadline half a millisecond away would otherwise spin.
    poller.poll(None if timeout_s is None else math.ceil(max(0.0, timeout_s) * 1000))
