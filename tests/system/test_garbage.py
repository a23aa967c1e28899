"""Bytes that are no message, at every address where a process listens: logged, counted, survived."""

from __future__ import annotations

import contextlib
import pickle
import random
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from common.codec import MAX_FRAME_BYTES, MAX_FRAMES, Envelope
from common.host import this_process
from common.messages import CODEC, Abort, Hello, Role, StatsRequest, Submit, int32s
from common.request import SamplingParams
from tests.system.client import WAIT_S, Client
from tests.system.oracle import Case
from tests.system.server import Server, poll_until, running

pytestmark = pytest.mark.system

SOCKETS = {"gateway.sock": "baton_gateway_{}_total", "prefill-0.sock": "baton_node_{}_total"}


class Bomb:
    """Runs code in whoever unpickles it."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self._target,)  # type: ignore[return-value]


def rubbish(bomb: Path) -> list[list[bytes]]:
    """Messages that no process of ours would send; each must be rejected."""
    draw = random.Random(3)
    good = [bytes(frame) for frame in CODEC.encode(Envelope(1, 1, Abort(5)))]
    submit = Submit(1, SamplingParams(max_tokens=3), int32s([1, 2, 3]))
    header, *frames = (bytes(frame) for frame in CODEC.encode(Envelope(1, 2, submit)))
    return [
        [b""],
        [b"", b"", b""],
        [b"GET / HTTP/1.1\r\n\r\n"],
        [pickle.dumps(Bomb(bomb))],
        [pickle.dumps({"kind": "Submit"}, protocol=5)],
        *([draw.randbytes(draw.randint(1, 3000))] for _ in range(100)),
        *([good[0][:n]] for n in range(1, len(good[0]), 7)),
        [good[0] + b"x"],
        [*good, b"one frame too many"],
        [header],  # its payload is missing
        [header, frames[0][:-1]],
        [header, bytes(MAX_FRAME_BYTES - 1)],
        [header] * (MAX_FRAMES + 10),
    ]


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with running(model, calm=False) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Client:
    return Client(server.url, server.model)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def connect(context: zmq.Context[zmq.Socket[bytes]], path: Path) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.SNDTIMEO, int(WAIT_S * 1000))
    dealer.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
    dealer.connect(f"ipc://{path}")
    return dealer


@pytest.mark.parametrize("name", SOCKETS)
def test_rubbish_is_logged_counted_and_survived(
    server: Server,
    client: Client,
    context: zmq.Context[zmq.Socket[bytes]],
    name: str,
    cases: list[Case],
    tmp_path: Path,
) -> None:
    pids = server.pids()
    metric = SOCKETS[name].format("messages_rejected")
    before = client.metric(metric)
    messages = rubbish(tmp_path / "bomb")
    dealer = connect(context, server.sockets()[name])
    for frames in messages:
        dealer.send_multipart(frames)

    poll_until(lambda: client.metric(metric) >= before + len(messages), WAIT_S, f"{len(messages)} rejected")

    assert client.metric(metric) == before + len(messages)
    assert "rejected message no. 64" in server.process.log()
    assert not (tmp_path / "bomb").exists()
    for case in cases[:4]:
        case.check(client.ask(case.body()))
    client.assert_ledger_clean()
    assert server.pids() == pids


@pytest.mark.parametrize("name", SOCKETS)
def test_frames_that_are_too_large_cut_the_connection_alone(
    server: Server, client: Client, context: zmq.Context[zmq.Socket[bytes]], name: str, cases: list[Case]
) -> None:
    path = server.sockets()[name]
    dealer = connect(context, path)
    monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    dealer.send(bytes(MAX_FRAME_BYTES + 1))
    assert monitor.poll(int(WAIT_S * 1000))
    # Nor does it help to speak no ZMTP at all.
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f" + b"\xff" * 100):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(WAIT_S)
            raw.connect(str(path))
            raw.sendall(data)
            raw.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while raw.recv(4096):
                    pass
    cases[4].check(client.ask(cases[4].body()))


@pytest.mark.parametrize("name", SOCKETS)
def test_stranger_is_refused_with_both_values_named(
    server: Server, client: Client, context: zmq.Context[zmq.Socket[bytes]], name: str, cases: list[Case]
) -> None:
    refused = SOCKETS[name].format("links_refused")
    before = client.metric(refused)
    hello = Hello("stranger", Role.DECODE, this_process(), model="another")
    dealer = connect(context, server.sockets()[name])
    dealer.send_multipart(CODEC.encode(Envelope(77, 1, hello)))
    answer = CODEC.decode(tuple(dealer.recv_multipart())).message
    assert not answer.accepted
    assert "another at stranger" in answer.reason
    # Under the name of a node it fares no better, and the node keeps its link; nor is it listened to.
    dealer.send_multipart(CODEC.encode(Envelope(77, 2, replace(hello, node_id="decode-0"))))
    assert "another at decode-0" in CODEC.decode(tuple(dealer.recv_multipart())).message.reason
    for seq, message in enumerate((StatsRequest(1), Abort(1)), start=3):
        dealer.send_multipart(CODEC.encode(Envelope(77, seq, message)))
    cases[4].check(client.ask(cases[4].body()))
    assert client.metric(refused) == before + 2
    client.assert_ledger_clean()
