"""Links over real sockets: up, down, refused, replaced, and whatever else strangers send."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from common.messages import Abort, Quiesced
from common.peer import PeerDown, PeerMessage
from common.sockets import FrameSocket
from tests.wire.hellos import DECODE, PREFILL
from tests.wire.net import D_EPOCH, P_EPOCH, Context, Net


@pytest.fixture
def net(context: Context, address: str) -> Iterator[Net]:
    with closing(Net(context, address)) as net:
        yield net


# Up and down ----------------------------------------------------------------------------------------------


def test_both_ends_come_up_and_know_each_other(net: Net) -> None:
    p, d = net.acceptor(), net.connector()
    net.until_up(p, d)
    assert (net.peer(p).hello, net.peer(p).epoch, net.peer(p).plane) == (DECODE, D_EPOCH, "frames")
    assert (net.peer(d).hello, net.peer(d).epoch, net.peer(d).plane) == (PREFILL, P_EPOCH, "frames")
    assert d.peer is net.peer(d)
    assert p.peers() == [net.peer(p)]


def test_messages_go_both_ways_in_order(net: Net) -> None:
    p, d = net.acceptor(), net.connector()
    net.until_up(p, d)
    for id_ in range(1, 101):
        net.peer(d).send(Abort(id_))
        net.peer(p).send(Quiesced(id_))
    net.until(lambda: len(net.messages(p)) == 100 == len(net.messages(d)))
    assert net.messages(p) == [Abort(id_) for id_ in range(1, 101)]
    assert net.messages(d) == [Quiesced(id_) for id_ in range(1, 101)]
    assert not any(p.counters.values())
    assert not any(d.counters.values())


def test_status_flows_each_second_of_the_owners_clock(net: Net) -> None:
    p, d = net.acceptor(), net.connector()
    net.until_up(p, d)
    for seconds in (1, 2, 3):
        net.now = seconds
        assert d.deadline() is not None
        net.until(
            lambda seconds=seconds: all(len(net.happened(e, PeerMessage)) == seconds + 1 for e in (p, d))  # type: ignore[misc]
        )


def test_a_node_that_is_there_first_waits_for_the_other(net: Net) -> None:
    d = net.connector()
    for net.now in (0.0, 1.0, 2.0):
        assert d.poll(net.now) == []
    p = net.acceptor()
    net.until_up(p, d)
    net.peer(d).send(Abort(1))
    net.until(lambda: net.messages(p) == [Abort(1)])
    assert p.counters["messages_lost"] == 0  # repeated greetings are not lost messages


def test_a_closed_acceptor_is_noticed_and_its_successor_found(net: Net) -> None:
    p, d = net.acceptor(), net.connector()
    net.until_up(p, d)
    old = net.peer(d)
    net.drop(p)
    old.send(Abort(1))  # to a process that is gone, while that is not known yet
    net.until(lambda: len(net.happened(d, PeerDown)) == 1)
    assert d.peer is None
    assert old.send(Abort(2)) == 0
    p2 = net.acceptor(epoch=P_EPOCH + 1)
    net.now = 1.0
    net.until_up(d, times=2)
    assert net.peer(d).epoch == P_EPOCH + 1
    net.peer(d).send(Abort(3))
    net.until(lambda: net.messages(p2) != [])
    assert net.messages(p2) == [Abort(3)]  # nothing that was meant for the old one


def test_a_closed_connector_is_noticed_at_the_next_status(net: Net) -> None:
    p, d = net.acceptor(), net.connector()
    net.until_up(p, d)
    net.drop(d)
    net.until_down(p)
    assert p.peers() == []
    assert p.deadline() is None


def test_many_connectors_have_links_of_their_own(net: Net) -> None:
    p = net.acceptor()
    ds = [net.connector(replace(DECODE, node_id=f"decode-{i}"), epoch=i + 1) for i in range(4)]
    net.until_up(*ds)
    for i, d in enumerate(ds):
        net.peer(d).send(Abort(i + 1))
    net.until(lambda: len(net.messages(p)) == 4)
    got = {
        event.peer.node_id: event.message.id
        for event in net.happened(p, PeerMessage)
        if event.message in net.messages(p)
    }
    assert got == {f"decode-{i}": i + 1 for i in range(4)}


def test_a_mismatch_is_counted_and_said_once_at_both_ends(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    p = net.acceptor()
    d = net.connector(replace(DECODE, model="model-b"))
    net.until(lambda: p.counters["links_refused"] == 1 == d.counters["links_refused"])
    net.now = 10.0
    net.until(lambda: p.counters["links_refused"] == 2 == d.counters["links_refused"])
    assert net.events == {p: [], d: []}
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(said) == 2
    assert all("model-a" in line and "model-b" in line for line in said)
    other = net.connector(replace(DECODE, node_id="decode-1"))
    net.until_up(other)


# Bytes that are no message --------------------------------------------------------------------------------


def test_bytes_that_are_no_message_are_counted_and_survived(
    net: Net, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = net.acceptor(), net.connector()
    net.until_up(p, d)
    garbage = [
        [b""],
        [b"garbage", b"x" * 1000],
        [pickle.dumps(Abort(1))],
        [b"\x93"] * 100,
        [os.urandom(5000)],
    ]
    with closing(FrameSocket.dealer(net.context, p.address)) as stranger:
        for frames in garbage * 20:
            stranger.send(frames)
        net.until(lambda: p.counters["messages_rejected"] == 100)
    said = [record for record in caplog.records if "rejected message" in record.getMessage()]
    assert len(said) == 7  # no. 1, 2, 4, ... 64: a flood must not fill the disk
    net.peer(d).send(Abort(3))
    net.until(lambda: net.messages(p) == [Abort(3)])
