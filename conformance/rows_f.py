"""F: no request waits for ever, and overload is answered."""

from __future__ import annotations

import itertools
import time

import msgpack

from common.codec import PROTOCOL_VERSION, Envelope
from common.host import this_process
from common.messages import CODEC, Hello, Role
from conformance.client import greedy
from conformance.raw_socket import raw_socket
from conformance.recipes import (
    PROMPTS,
    check_all,
    socket_path,
    stopped,
)
from conformance.rows import Proof, row
from conformance.setup import Setup, prompt

SMALL = ("--kv-pages", "60")  # of 16 tokens: three of the answers that grow begin, two end
PROGRESS_S = 5.0
IN_TIME_S = 5.0  # for a deadline of 1 s, on a busy machine
PAUSE_S = 3.0
GROWING_TOKENS = 320  # more than is kept free for each at admission
RETRACTED, STARTED = "baton_node_requests_retracted_total", "baton_node_transfers_started_total"


@row(
    "F6",
    "one lost completion is found, and the hand-over done again",
    proof=Proof("Status of P is lost, too", faults="prefill/drop:Status*"),
)
def f6(s: Setup) -> None:
    with s.faults("prefill/drop:Commit"):
        s.ask_right(prompt(1, 100), 8)
        s.await_fired("Commit")
    s.check_next()


def growing() -> list[list[int]]:
    """Eight prompts whose answers are longer together than the small pool."""
    return [prompt(i % 3, 20) for i in range(8)]


@row(
    "F2",
    "answers that outgrow the pool never stand still for 5 s",
    options=SMALL,
    proof=Proof(
        "nobody gives up its pages",
        patch="import decode_node.running as r\nr.RunningBatch.youngest = lambda self: None\n",
    ),
)
def f2(s: Setup) -> None:
    retracted = s.client.metric(RETRACTED)
    times_s, prompts = [time.monotonic()], growing() * 2
    pending = [s.client.begin(greedy(ids, GROWING_TOKENS, stream=True)) for ids in prompts]
    num_seen = 0
    while not all(each.ended for each in pending):
        num_tokens = sum(len(each.outcome.token_ids) for each in pending)
        if num_tokens != num_seen:
            num_seen = num_tokens
            times_s.append(time.monotonic())
        assert time.monotonic() - times_s[-1] < PROGRESS_S, f"no token for {PROGRESS_S:g} s"
        time.sleep(0.01)
    for ids, each in zip(prompts, pending, strict=True):
        s.check(ids, each.wait(), GROWING_TOKENS)
    assert max(b - a for a, b in itertools.pairwise(times_s)) < PROGRESS_S
    assert s.client.metric(RETRACTED) > retracted, "nobody outgrew the pool"


@row(
    "F7",
    "a failed write is told to D, and the hand-over done again",
    proof=Proof("it is only logged", faults="prefill/drop:Failed*; prefill/drop:Status*"),
)
def f7(s: Setup) -> None:
    with s.faults("prefill/fail:plane@2"):
        start = time.monotonic()
        s.ask_right(PROMPTS[-1])
        s.await_fired("plane")
        assert time.monotonic() - start < IN_TIME_S
    with s.faults("prefill/fail:plane*"):  # again and again: an error, and no token
        outcome = s.client.ask(greedy(PROMPTS[-1], 4))
        assert outcome.status == 503, outcome
        assert outcome.error is not None
        assert outcome.token_ids == []
    s.check_next()


@row(
    "F8",
    "while D stands still, P holds what it has and lives",
    proof=Proof(
        "P's queue to D has an end, and so has P",
        patch="import os, prefill_node.node as n\n"
        "real = n.PrefillNode.turn\n"
        "def turn(self, now):\n"
        "    for session in self._endpoint._acceptor._sessions.values():\n"
        "        seen = session.link._last_seq_seen\n"
        "        if getattr(session, 'seen', (None,))[0] != seen:\n"
        "            session.seen = (seen, now)\n"
        "        elif now - session.seen[1] > 2:\n"
        "            os._exit(3)\n"
        "    return real(self, now)\n"
        "n.PrefillNode.turn = turn\n",
    ),
)
def f8(s: Setup) -> None:
    with stopped(s, "decode-0"):
        pending = [s.client.begin(greedy(ids, 16)) for ids in PROMPTS * 2]
        time.sleep(PAUSE_S)
        assert s.client.get("/health").status_code == 200
    for ids, each in zip(PROMPTS * 2, pending, strict=True):
        s.check(ids, each.wait(), 16)


@row(
    "F10",
    "room for one prompt, and failed allocations: twenty are served, none twice",
    options=("--kv-pages", "24", "--transfer", "frames", "--transfer-window", "1"),
    proof=Proof("allocation fails for ever", faults="refuse:allocation*"),
)
def f10(s: Setup) -> None:
    started = s.client.metric(STARTED, role="decode")
    with s.faults("refuse:allocation*5"):
        check_all(s, [PROMPTS[-1], PROMPTS[-2]] * 10, 8)
        s.await_fired("allocation")
    assert s.client.metric(STARTED, role="decode") - started == 20


def newer_greeting() -> list[bytes]:
    """Return the greeting of a decode node of the next version of the protocol."""
    hello = Hello("newer", Role.DECODE, this_process(), model="any")
    header, *frames = (bytes(frame) for frame in CODEC.encode(Envelope(7, 1, hello)))
    return [msgpack.packb(msgpack.unpackb(header) | {"version": PROTOCOL_VERSION + 1}), *frames]


def meet_newer(s: Setup, name: str) -> None:
    """Greet a process as one of another version: it says so, with both numbers."""
    with raw_socket(socket_path(s, name), s.client.wait_s) as dealer:
        dealer.send_multipart(newer_greeting())
        answer = CODEC.decode(tuple(dealer.recv_multipart())).message
    assert not answer.accepted
    assert f"protocol version {PROTOCOL_VERSION + 1}" in answer.reason, answer.reason
    assert f"speaks {PROTOCOL_VERSION}" in answer.reason, answer.reason


@row(
    "F11",
    "a node of another version is refused, and both versions are named",
    proof=Proof("it gets no answer", faults="drop:HelloAck*"),
)
def f11(s: Setup) -> None:
    rejected = s.client.metric("baton_gateway_messages_rejected_total")
    meet_newer(s, "gateway")
    assert s.client.metric("baton_gateway_messages_rejected_total") == rejected + 1
    meet_newer(s, "prefill-0")
    check_all(s)
