"""M: who must not be trusted: bytes that are no message, and nodes that are none."""

from __future__ import annotations

import pickle
import random
import socket
import stat
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import zmq

from common.codec import MAX_FRAME_BYTES, Envelope
from common.host import this_process
from common.messages import CODEC, Abort, Hello, Role, Submit, int32s
from common.model.spec import load_spec
from common.request import SamplingParams
from conformance.raw_socket import raw_socket
from conformance.recipes import check_all, socket_path
from conformance.rows import Proof, row
from conformance.setup import Setup


class Bomb:
    """Runs code in whoever unpickles it."""

    def __init__(self, target: Path) -> None:
        self._target = str(target)

    def __reduce__(self) -> Any:
        return open, (self._target, "w")


def rubbish(bomb: Path) -> list[list[bytes]]:
    """Return messages that no process of ours would send; each must be counted."""
    draw = random.Random(3)
    good = [bytes(frame) for frame in CODEC.encode(Envelope(1, 1, Abort(5)))]
    submit = Submit(1, SamplingParams(max_tokens=3), int32s([1, 2, 3]))
    header, *frames = (bytes(frame) for frame in CODEC.encode(Envelope(1, 2, submit)))
    return [
        [pickle.dumps(Bomb(bomb))],
        [header, pickle.dumps(Bomb(bomb))],
        [b""],
        [b"", b"", b""],
        *([draw.randbytes(draw.randint(1, 3000))] for _ in range(100)),
        *([good[0][:n]] for n in range(1, len(good[0]), 7)),
        [*good, b"one frame too many"],
        [header, frames[0][:-1]],
        [header, bytes(MAX_FRAME_BYTES - 1)],
    ]


def has_counted(s: Setup, metric: str, count: float) -> bool:
    """Say whether a metric is there."""
    return s.client.metric(metric) >= count


@row(
    "M1",
    "pickles, random bytes and huge frames to every port run no code and end nothing",
    proof=Proof(
        "what looks like a pickle is one",
        patch="import contextlib, pickle, common.codec as c\n"
        "real = c.Codec.decode\n"
        "def decode(self, frames):\n"
        "    for frame in frames:\n"
        "        with contextlib.suppress(Exception):\n"
        "            pickle.loads(bytes(frame))\n"
        "    return real(self, frames)\n"
        "c.Codec.decode = decode\n",
    ),
)
def m1(s: Setup) -> None:
    bomb = s.server.folder / "bomb"
    messages = rubbish(bomb)
    for name, counter in (("gateway", "baton_gateway_{}_total"), ("prefill-0", "baton_node_{}_total")):
        path, metric = socket_path(s, name), counter.format("messages_rejected")
        before = s.client.metric(metric)
        with raw_socket(path, s.client.wait_s) as dealer:
            for frames in messages:
                dealer.send_multipart(frames)
            counted = partial(has_counted, s, metric, before + len(messages))
            s.client.until(counted, f"{name} has counted all of them")
        with raw_socket(path, s.client.wait_s) as dealer:
            monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            dealer.send(bytes(MAX_FRAME_BYTES + 1))
            assert monitor.poll(int(s.client.wait_s * 1000)), "a frame that is too large is taken"
    url = httpx.URL(s.client.url)
    for data in (pickle.dumps(Bomb(bomb)), random.Random(4).randbytes(4096), b"\x16\x03\x01" * 100):
        for head in (
            b"",
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data),
        ):
            with socket.create_connection((url.host, url.port), s.client.wait_s) as raw:
                raw.sendall(head + data)
                raw.shutdown(socket.SHUT_WR)
                answer = raw.recv(4096)
                assert not answer or answer.startswith(b"HTTP/1.1 4"), answer
    assert not bomb.exists(), "it was unpickled"
    check_all(s)


@row(
    "M2",
    "who registers as a node and is none is refused",
    proof=Proof(
        "anybody is welcome",
        patch="import common.acceptor as a\na.Acceptor._refusal = lambda *_: None\n",
    ),
)
def m2(s: Setup) -> None:
    path = socket_path(s, "gateway")
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700, "others can get at the sockets"
    spec = load_spec(s.models.tiny)
    fake = Hello("prefill-0", Role.PREFILL, this_process(), model=spec.fingerprint, listen="ipc:///nowhere")
    strangers = ((fake, "node id prefill-0 is taken"), (replace(fake, node_id="x", model="y"), "y at x"))
    with raw_socket(path, s.client.wait_s) as dealer:
        for epoch, (hello, words) in enumerate(strangers, 70):
            dealer.send_multipart(CODEC.encode(Envelope(epoch, 1, hello)))
            answer = CODEC.decode(tuple(dealer.recv_multipart())).message
            assert not answer.accepted, f"{hello.node_id} was accepted"
            assert words in answer.reason, answer.reason
    check_all(s)
