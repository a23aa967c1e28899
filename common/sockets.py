"""The only general ZMQ wrapper: non-blocking sockets for multipart messages, and one wait for all of them.

High-water marks are 0: credits and queue limits bound memory, and a ROUTER at its mark would drop in
silence. LINGER is 0: what a dead peer did not read is not our business. MAXMSGSIZE cuts a connection whose
frames are larger than the protocol's. Where the context has keys, every socket has them (CURVE), and says
who was refused. Knows nothing of messages: frames in, frames out.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from common.addresses import check_reach
from common.codec import MAX_FRAME_BYTES, MAX_FRAMES, Buffer
from common.context import keys_of, secure
from common.errors import ConfigError

HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000
# Below this, copying a frame costs less than tracking a zero-copy one.
ZERO_COPY_BYTES = 64 << 10
CONNECT_TIMEOUT_MS = 5_000  # the system's own takes minutes, while a cut link may be mended
# What a handshake fails with when the two ends have different keys, or one of them none.
KEY_FAILURES = (zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC, zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

Pollable = zmq.Socket[bytes] | int
# Called with (identity, first frame); gives the buffers that the payload frames go to, or None.
Placer = Callable[[bytes, bytes], Sequence[memoryview] | None]


@dataclass(frozen=True, slots=True)
class ReceivedFrames:
    """A multipart message. `identity` is the sender's routing id at a ROUTER, empty at a DEALER."""

    identity: bytes
    frames: tuple[Buffer, ...]
    complete: bool  # False: a frame did not fit its buffer, or there were too many


class FrameSocket:
    """A DEALER that connects or a ROUTER that binds. Close it; it is not thread-safe.

    Raises:
        ConfigError: the address cannot be used, or is not to be (`addresses.py`).
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> None:
        keys = keys_of(context)
        check_reach(address, keys)
        self._has_keys = keys is not None
        self._is_lost = self._is_refused = False
        self._socket = context.socket(kind)
        self._is_router = kind == zmq.ROUTER
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        if keys is not None:
            secure(self._socket, keys, binds=self._is_router)
        monitor = f"inproc://monitor-{self._socket.fileno()}"
        self._socket.monitor(monitor, HANDSHAKE_FAILED | (0 if self._is_router else zmq.EVENT_DISCONNECTED))
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # at its mark it would hold the I/O thread up
        self._monitor.connect(monitor)
        try:
            if self._is_router:
                self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self._socket.bind(address)
            else:
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
        return (self._socket, self._monitor)

    def filenos(self) -> tuple[int, int]:
        """The descriptors of the two: edge-triggered, so read until None, and `refused`, after each event."""
        return int(self._socket.fileno()), int(self._monitor.fileno())

    def is_readable(self) -> bool:
        """Say whether there is a message; the descriptor may not say so again (see `filenos`)."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def lost_connection(self) -> bool:
        """Say whether a DEALER's connection broke since the last call; then replace the socket.

        A DEALER would hand what is queued to whichever process comes up at the address.
        """
        self._read_monitor()
        lost, self._is_lost = self._is_lost, False
        return lost

    def refused(self) -> str | None:
        """Say why a handshake failed since the last call, if one did, as it does for want of the same keys.

        A DEALER makes no new attempt then: replace the socket. Its peer may also have died just then.
        """
        self._read_monitor()
        if not self._is_refused:
            return None
        self._is_refused = False
        ours = "other keys than this process, or none" if self._has_keys else "keys, and this process none"
        whom = f"a peer at {self.address}" if self._is_router else self.address
        if not self._is_router:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.disconnect(self.address)
        return f"{whom} has {ours}: start both with the same --keys"

    def _read_monitor(self) -> None:
        while int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            match event["event"]:
                case zmq.EVENT_DISCONNECTED:
                    self._is_lost = True
                case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                    self._is_refused |= event["value"] in KEY_FAILURES
                case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    self._is_refused = True
                case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                    # The peer hung up, as it does when it is the first to see that the keys differ. Without
                    # keys whoever connects is on this host, and says so itself; if it died, that is no news.
                    self._is_refused |= self._has_keys or not self._is_router

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
        if not self._socket.closed:
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
