"""Multipart messages over real sockets: whole, in order, none dropped, sizes checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import pytest
import zmq

from common.addresses import MAX_IPC_PATH, check_address
from common.codec import MAX_FRAME_BYTES, MAX_FRAMES
from common.errors import ConfigError
from common.sockets import FrameSocket, Placer, ReceivedFrames, wait
from tests.wire.loop import until

Context = zmq.Context[zmq.Socket[bytes]]


class Sockets:
    """A ROUTER and a DEALER that is connected to it."""

    def __init__(self, context: Context, address: str) -> None:
        self.router = FrameSocket.router(context, address)
        self.dealer = FrameSocket.dealer(context, self.router.address)

    def close(self) -> None:
        self.dealer.close()
        self.router.close()

    def one(self, socket: FrameSocket, place: Placer | None = None) -> ReceivedFrames:
        received: list[ReceivedFrames] = []

        def arrived() -> bool:
            message = socket.receive(place)
            received.extend([] if message is None else [message])
            return bool(received)

        until(arrived, socket.pollables)
        return received[0]


@pytest.fixture
def sockets(context: Context, address: str) -> Iterator[Sockets]:
    with closing(Sockets(context, address)) as pair:
        yield pair


def into(*buffers: bytearray) -> Callable[[bytes, bytes], Sequence[memoryview]]:
    return lambda identity, first: [memoryview(buffer) for buffer in buffers]


# Addresses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["", "7000", "localhost:7000", "tcp://", "inproc://x", "http://x:1"])
def test_what_is_no_address_is_one_clear_line(address: str) -> None:
    with pytest.raises(ConfigError, match="use ipc:///path or tcp://host:port"):
        check_address(address)


def test_a_path_that_a_socket_cannot_have_is_refused() -> None:
    longest = "/tmp/" + "x" * (MAX_IPC_PATH - 5)
    assert check_address(f"ipc://{longest}")
    with pytest.raises(ConfigError, match="longer than 107 bytes"):
        check_address(f"ipc://{longest}x")


def test_a_taken_port_is_one_clear_line(context: Context) -> None:
    with closing(FrameSocket.router(context, "tcp://127.0.0.1:*")) as first:
        assert first.address.startswith("tcp://127.0.0.1:")
        with pytest.raises(ConfigError, match=f"cannot use address {first.address}"):
            FrameSocket.router(context, first.address)


# Messages -------------------------------------------------------------------------------------------------


def test_messages_go_both_ways_whole(sockets: Sockets) -> None:
    large = os.urandom(MAX_FRAME_BYTES)  # is not copied on the way out
    assert sockets.dealer.send([b"header", b"", large, bytearray(b"tail")])
    received = sockets.one(sockets.router)
    assert received.complete
    assert received.frames == (b"header", b"", large, b"tail")
    assert sockets.router.send([b"answer", large], received.identity)
    answer = sockets.one(sockets.dealer)
    assert (answer.identity, answer.frames, answer.complete) == (b"", (b"answer", large), True)


def test_nothing_is_dropped_while_nobody_reads(sockets: Sockets) -> None:
    for number in range(5000):
        assert sockets.dealer.send([b"%d" % number, b"x" * 100])
    assert [sockets.one(sockets.router).frames[0] for _ in range(5000)] == [b"%d" % n for n in range(5000)]
    identity = (sockets.dealer.send([b"last"]), sockets.one(sockets.router).identity)[1]
    for number in range(5000):
        assert sockets.router.send([b"%d" % number], identity)
    assert [sockets.one(sockets.dealer).frames[0] for _ in range(5000)] == [b"%d" % n for n in range(5000)]


def test_what_was_sent_before_the_peer_is_there_waits(context: Context, address: str) -> None:
    pair = Sockets.__new__(Sockets)
    pair.dealer = FrameSocket.dealer(context, address)
    assert pair.dealer.send([b"early"])
    pair.router = FrameSocket.router(context, address)
    with closing(pair):
        assert pair.one(pair.router).frames == (b"early",)


def test_receive_is_none_when_there_is_nothing(sockets: Sockets) -> None:
    assert sockets.router.receive() is None
    assert sockets.dealer.receive() is None


def test_a_message_to_nobody_is_not_sent(sockets: Sockets) -> None:
    assert not sockets.router.send([b"hello"], b"nobody")


def test_more_frames_than_the_protocol_has_are_incomplete(sockets: Sockets) -> None:
    sockets.dealer.send([b"x"] * (MAX_FRAMES + 5))
    received = sockets.one(sockets.router)
    assert (received.complete, len(received.frames)) == (False, MAX_FRAMES + 1)
    sockets.dealer.send([b"next"])
    assert sockets.one(sockets.router).frames == (b"next",)


# Frames into given buffers --------------------------------------------------------------------------------


def test_payload_goes_into_the_buffers_that_are_given(sockets: Sockets) -> None:
    a, b = bytearray(3), bytearray(5)
    sockets.dealer.send([b"header", b"abc", b"defgh"])
    received = sockets.one(sockets.router, into(a, b))
    assert received.complete
    assert (bytes(a), bytes(b)) == (b"abc", b"defgh")
    first = received.frames[1]
    assert isinstance(first, memoryview)
    assert first.obj is a


@pytest.mark.parametrize(
    "payload",
    [
        [b"abc"],  # one missing
        [b"abc", b"defgh", b"i"],  # one too many
        [b"abcd", b"defgh"],  # does not fit: would be cut in silence
        [b"ab", b"defgh"],  # leaves the end as it was
        [],
    ],
)
def test_payload_that_does_not_fit_the_buffers_is_incomplete(sockets: Sockets, payload: list[bytes]) -> None:
    sockets.dealer.send([b"header", *payload])
    sockets.dealer.send([b"next", b"whole"])
    assert not sockets.one(sockets.router, into(bytearray(3), bytearray(5))).complete
    assert sockets.one(sockets.router).frames == (b"next", b"whole")


# Broken connections ---------------------------------------------------------------------------------------


def test_a_dealer_notices_that_its_connection_broke(sockets: Sockets) -> None:
    sockets.dealer.send([b"hello"])
    sockets.one(sockets.router)
    assert not sockets.dealer.lost_connection()
    sockets.router.close()
    until(sockets.dealer.lost_connection, sockets.dealer.pollables)


def test_a_frame_beyond_the_limit_costs_the_connection_and_nothing_else(
    sockets: Sockets, context: Context
) -> None:
    sockets.dealer.send([b"hello"])
    sockets.one(sockets.router)
    sockets.dealer.send([bytes(MAX_FRAME_BYTES + 1)])
    until(sockets.dealer.lost_connection, sockets.dealer.pollables)
    with closing(FrameSocket.dealer(context, sockets.router.address)) as other:
        other.send([b"still here?"])
        assert sockets.one(sockets.router).frames == (b"still here?",)


def test_wait_returns_when_something_is_readable_or_the_time_is_over(sockets: Sockets) -> None:
    wait(sockets.router.pollables(), 0.0)
    reader, writer = os.pipe()
    os.write(writer, b"x")
    wait([*sockets.router.pollables(), reader], None)  # returns at all
    os.close(reader)
    os.close(writer)
