"""Processes that do not fit: refused at Hello over real sockets, both values named by both, and both live on.

One test for each thing that two processes can differ in.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import msgpack
import pytest

from common.codec import PROTOCOL_VERSION, Buffer
from common.messages import Abort, Hello, HelloAck, Role
from common.sockets import FrameSocket
from tests.wire.hellos import DECODE, LAYOUT, PREFILL
from tests.wire.net import Context, Net
from tests.wire.raw import header_of, wire, with_header

OTHER = 7  # a version that is not ours


@pytest.fixture
def net(context: Context, address: str) -> Iterator[Net]:
    with closing(Net(context, address)) as net:
        yield net


def errors(caplog: pytest.LogCaptureFixture, node_id: str, words: str) -> list[str]:
    """What one process said about it."""
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [line for line in said if line.startswith(f"{node_id}: {words}")]


@pytest.mark.parametrize(
    ("stranger", "values"),
    [
        (replace(DECODE, layout=replace(LAYOUT, layers=3)), ("layers", "2", "3")),
        (replace(DECODE, layout=replace(LAYOUT, kv_heads=2)), ("kv_heads", "1", "2")),
        (replace(DECODE, layout=replace(LAYOUT, head_dim=64)), ("head_dim", "8", "64")),
        (replace(DECODE, layout=replace(LAYOUT, dtype="bfloat16")), ("dtype", "float32", "bfloat16")),
        (replace(DECODE, layout=replace(LAYOUT, page_size=16)), ("page_size", "4", "16")),
        (replace(DECODE, model="sha256:b"), ("model", "model-a", "sha256:b")),
        (replace(DECODE, planes=("shm", "nixl")), ("planes", "['frames']", "['shm', 'nixl']")),
        (replace(DECODE, verify_pages=True), ("--verify-pages at decode-1, not at prefill-0",)),
        (replace(DECODE, role=Role.PREFILL), ("a prefill node at prefill-0, a prefill node at decode-1",)),
    ],
    ids=["layers", "kv_heads", "head_dim", "dtype", "page_size", "model", "plane", "checksums", "role"],
)
def test_a_mismatch_is_named_by_both_and_both_live_on(
    net: Net, caplog: pytest.LogCaptureFixture, stranger: Hello, values: tuple[str, ...]
) -> None:
    p, d = net.acceptor(), net.connector()
    net.until_up(p, d)
    other = net.connector(replace(stranger, node_id="decode-1"), epoch=9)
    net.until(lambda: p.counters["links_refused"] == 1 == other.counters["links_refused"])
    for node_id in ("prefill-0", "decode-1"):
        (line,) = errors(caplog, node_id, "link refused")
        assert all(value in line for value in (*values, "prefill-0", "decode-1")), line
    assert net.events[other] == []
    # Who was up stays up, and one that fits is taken.
    net.peer(d).send(Abort(3))
    net.until(lambda: net.messages(p) == [Abort(3)])
    net.until_up(net.connector(replace(DECODE, node_id="decode-1"), epoch=10))


def other_version(message: Hello | HelloAck) -> list[bytes]:
    return with_header(message, header_of(message) | {"version": OTHER})


def versions_named(line: str, theirs: int, ours: int) -> bool:
    return f"protocol version {theirs}; this process speaks {ours}" in line


def test_another_version_is_named_by_who_binds_and_answered_once(
    net: Net, caplog: pytest.LogCaptureFixture
) -> None:
    p = net.acceptor()
    answers: list[list[Buffer]] = []
    with closing(FrameSocket.dealer(net.context, p.address)) as stranger:
        for _ in range(5):
            stranger.send(other_version(DECODE))

        def answered() -> bool:
            while (received := stranger.receive()) is not None:
                answers.append(list(received.frames))
            return p.counters["messages_rejected"] == 5 and bool(answers)

        net.until(answered)
        # It cannot read more than this of the answer: so its log names both versions too.
        assert [msgpack.unpackb(frames[0])["version"] for frames in answers] == [PROTOCOL_VERSION]
        reason = msgpack.unpackb(answers[0][0])["fields"]["reason"]
    assert versions_named(reason, OTHER, PROTOCOL_VERSION)
    assert versions_named(errors(caplog, "prefill-0", "rejected")[0], OTHER, PROTOCOL_VERSION)
    d = net.connector()
    net.until_up(p, d)


def test_another_version_is_named_by_who_connects(
    net: Net, caplog: pytest.LogCaptureFixture, address: str
) -> None:
    with closing(FrameSocket.router(net.context, address)) as stranger:
        d = net.connector()

        def answered() -> bool:
            while (received := stranger.receive()) is not None:
                stranger.send(other_version(HelloAck(PREFILL, False, "")), received.identity)
            return d.counters["messages_rejected"] == 1

        net.until(answered)
    assert versions_named(errors(caplog, "decode-0", "rejected")[0], OTHER, PROTOCOL_VERSION)
    # A process of our version at the address is found.
    p = net.acceptor()

    def up() -> bool:
        net.now += 1.0
        return d.peer is not None

    net.until(up)
    assert p.peers()[0].node_id == "decode-0"


def test_bytes_of_another_version_are_those_of_ours_but_for_the_number() -> None:
    raw = msgpack.unpackb(other_version(DECODE)[0])
    assert raw | {"version": PROTOCOL_VERSION} == msgpack.unpackb(wire(DECODE)[0])
