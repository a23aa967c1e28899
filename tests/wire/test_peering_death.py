"""Who replaces whom, who is dead, and who is merely silent."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from common.codec import Envelope
from common.host import DeathWatch, open_pidfd, this_process
from common.messages import CODEC, Abort, Hello, HelloAck
from common.peer import PeerDown, PeerMessage, PeerUp
from common.sockets import FrameSocket
from tests.wire.child_node import child_node
from tests.wire.hellos import DECODE, PREFILL, here
from tests.wire.loop import until
from tests.wire.net import D_EPOCH, Context, Net


@pytest.fixture
def net(context: Context, address: str) -> Iterator[Net]:
    with closing(Net(context, address)) as net:
        yield net


# Replaced -------------------------------------------------------------------------------------------------


def greeting(local: Hello, epoch: int, seq: int = 1) -> list[bytes]:
    return [bytes(frame) for frame in CODEC.encode(Envelope(epoch, seq, local))]


def test_a_node_that_started_again_replaces_its_older_link(net: Net) -> None:
    p, d = net.acceptor(), net.connector()
    net.until_up(p, d)
    net.connector(epoch=D_EPOCH + 1)
    net.until_up(p, times=2)
    kinds = [type(event) for event in net.events[p] if not isinstance(event, PeerMessage)]
    assert kinds == [PeerUp, PeerDown, PeerUp]
    assert [peer.epoch for peer in p.peers()] == [D_EPOCH + 1]


def test_a_link_that_was_replaced_by_an_old_greeting_greets_anew(net: Net) -> None:
    """Greetings of a connection that was given up may be read after those of its successor."""
    p, d = net.acceptor(), net.connector()
    net.until_up(p, d)
    with closing(FrameSocket.dealer(net.context, p.address)) as forgotten:
        forgotten.send(greeting(DECODE, D_EPOCH))
        net.until(lambda: len(net.happened(p, PeerUp)) == 2)
        net.now = 1.0  # d sends a Status; p answers that it has no link with it
        net.until_up(d, times=2)
    net.peer(d).send(Abort(9))
    net.until(lambda: Abort(9) in net.messages(p))


def test_a_stranger_is_told_to_greet(net: Net) -> None:
    p = net.acceptor()
    with closing(FrameSocket.dealer(net.context, p.address)) as stranger:
        stranger.send([bytes(f) for f in CODEC.encode(Envelope(5, 1, Abort(1)))])
        answers: list[Any] = []

        def answered() -> bool:
            received = stranger.receive()
            answers.extend([] if received is None else [CODEC.decode(received.frames).message])
            return bool(answers)

        net.until(answered)
    assert isinstance(answers[0], HelloAck)
    assert not answers[0].accepted
    assert p.counters["messages_before_greeting"] == 1
    assert net.messages(p) == []


def other_process(local: Hello) -> Hello:
    return replace(local, host=replace(local.host, pid=local.host.pid + 1))


def test_a_name_that_is_taken_is_refused_while_its_holder_may_be_alive(net: Net) -> None:
    p, d = net.acceptor(), net.connector()
    net.until_up(p, d)
    second = net.connector(other_process(DECODE), epoch=D_EPOCH + 1)
    net.until(lambda: second.counters["links_refused"] == 1)
    net.peer(d).send(Abort(1))
    net.until(lambda: net.messages(p) == [Abort(1)])  # the first did not notice
    net.drop(d)
    net.until_down(p)
    net.now += 20.0
    net.until_up(second)


def test_a_name_is_free_as_soon_as_its_holder_is_known_to_be_dead(net: Net) -> None:
    p = net.acceptor(here(PREFILL))
    with child_node(p.address) as child:
        net.until_up(p)
        child.kill()
        child.wait()
        d = net.connector()
        net.until_up(d)  # at now = 0: it is not refused first
    assert d.counters["links_refused"] == 0


def test_a_stranger_that_does_not_fit_costs_nobody_a_link(net: Net) -> None:
    p, d = net.acceptor(), net.connector()
    net.until_up(p, d)
    net.connector(replace(DECODE, model="model-b"))
    net.until(lambda: p.counters["links_refused"] == 1)
    assert net.happened(p, PeerDown) == []


# Death ----------------------------------------------------------------------------------------------------


def test_a_killed_process_is_noticed_by_its_pidfd(net: Net) -> None:
    p = net.acceptor(here(PREFILL))
    with child_node(p.address) as child:
        net.until_up(p)
        assert net.peer(p).hello.host.pid == child.pid
        child.kill()
        net.until(lambda: bool(net.happened(p, PeerDown)))
    assert net.happened(p, PeerDown)[0].reason == "its process ended"  # at now = 0: no Status, no timeout
    assert p.pidfds() == {}


def test_a_stopped_process_is_not_dead(net: Net) -> None:
    p = net.acceptor(here(PREFILL))
    with child_node(p.address) as child:
        net.until_up(p)
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        for net.now in range(1, 60):
            net.events[p].extend(p.poll(net.now))
        assert net.happened(p, PeerDown) == []
        child.kill()
        net.until(lambda: bool(net.happened(p, PeerDown)))


def test_a_process_is_known_by_pid_and_start_time() -> None:
    me = this_process()
    fd = open_pidfd(this_process(), me)
    assert fd is not None
    os.close(fd)
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    for other in (
        replace(me, boot_id="another boot"),
        replace(me, pid_namespace=me.pid_namespace + 1),
        replace(me, start_time=me.start_time + 1),  # our pid was its pid before
        replace(me, pid=pid),
    ):
        assert open_pidfd(me, other) is None


def test_a_death_is_reported_once_and_no_other_is(net: Net) -> None:
    p = net.acceptor(here(PREFILL))
    watch = DeathWatch(this_process())
    with closing(watch), child_node(p.address) as child:
        net.until_up(p)
        host = net.peer(p).hello.host
        watch.watch(1, host)
        watch.watch(2, this_process())
        watch.watch(3, host)
        assert watch.dead() == []
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        watch.forget(3)
        assert watch.dead() == []
        child.kill()
        until(lambda: watch.dead() == [1], watch.pollables)
        assert watch.dead() == []
        child.wait()
        watch.watch(4, host)  # it ended before anybody looked
        watch.watch(5, replace(this_process(), start_time=1))  # its pid is ours now
        assert watch.dead() == [4, 5]
        assert len(watch.pollables()) == 1
    assert watch.pollables() == []
