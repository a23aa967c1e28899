"""Each kind of failure, provoked: it counts once, where it should, and no other kind does.

A kind that is new has no recipe here, and fails a test. Kinds of processes and of what travels are provoked
in a world of real nodes; those of clients over HTTP, before fake nodes.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.acceptor import Acceptor
from common.codec import Envelope
from common.config import GatewayConfig
from common.errors import RequestRejected
from common.messages import (
    CODEC,
    Chunk,
    Commit,
    Credit,
    Failed,
    Hello,
    PeerInfo,
    Peers,
    Quiesced,
    Role,
    SharedPool,
    StatsRequest,
)
from common.request import SamplingParams
from conformance.waiting import poll_until
from gateway.connections import ConnectionLimits
from gateway.failures import FAILURES, Failure
from gateway.fake import Script
from gateway.text import TextPipeline
from tests.faults.failure_counts import Counts, Watched, failures_in
from tests.faults.world import D, G, P, World, world
from tests.faults.world_cases import prompt
from tests.faults.world_line import CountedSocket, Fault, Rule
from tests.faults.world_states import LONG, between_chunks_of
from tests.gateway.conftest import MODEL, WAIT_S, LiveServer
from tests.gateway.live import live_gateway
from tests.wire.hellos import DECODE

AFTER_S = 5.0  # of the world's clock: whatever else is going to count has counted
Edit = Callable[[Any], Any]


def unchanged(message: object) -> object:
    return message


def once(kind: type, change: Edit) -> Edit:
    """Change the first message of a kind."""
    seen: list[object] = []

    def edit(message: object) -> object:
        if not isinstance(message, kind) or seen:
            return message
        seen.append(message)
        return change(message)

    return edit


def say(w: World, to: Acceptor, *frames: bytes) -> Callable[[], None]:
    """Say something as a stranger; returns how to hang up."""
    dealer = CountedSocket.dealer(w._context, to.address)  # so that the world waits for what it says
    dealer.send(frames)
    return dealer.close


def greet(w: World, to: Acceptor, seq: int = 1, **other: Any) -> Callable[[], None]:
    """Greet as a decode node that is other than ours."""
    frames = CODEC.encode(Envelope(9, seq, replace(DECODE, node_id="decode-9", **other)))
    return say(w, to, *(bytes(frame) for frame in frames))


# In a world of nodes ----------------------------------------------------------------------------------------

Provoke = Callable[[World], Any]


@dataclass(frozen=True)
class Recipe:
    """How a kind is made to happen in a world."""

    role: Role
    kind: Failure
    provoke: Provoke
    edit: Edit = unchanged  # of what D and P say
    options: dict[str, Any] = field(default_factory=dict)
    from_start: bool = False  # it happens while the world begins

    def __str__(self) -> str:
        """Name it."""
        return f"{self.kind.value}-{self.role.value}-{self.provoke.__name__}"


def nothing(w: World) -> None:
    pass


def a_request(w: World) -> None:
    w.until_ended(w.ask(LONG, 8))


def after_losing(route: tuple[str, str], kind: str, nth: int = 1, **sampling: Any) -> Provoke:
    def lost_message(w: World) -> None:
        w.add(Rule(route, kind, Fault.LOST, nth))
        w.until_ended(w.ask(LONG, 8, **sampling))

    lost_message.__name__ = f"lost_{kind}"
    return lost_message


def choices_whose_submit_is_lost(w: World) -> None:
    w.add(Rule((G, D), "Submit", Fault.LOST))
    w.until_ended(*w.ask_for(LONG, SamplingParams(8, num_choices=3)))


def several_whose_tokens_are_lost(w: World) -> None:
    asked = [w.ask(prompt(seed, 30), 60) for seed in range(3)]
    w.until(lambda: all(len(each.tokens) > 3 for each in asked))
    w.add(Rule((D, G), "Tokens", Fault.LOST))
    w.until_ended(*asked)


def a_client_leaves_and_d_does_not_hear(w: World) -> None:
    asked = w.ask(LONG, 8)
    between_chunks_of(w, asked)
    w.held.add(P)  # or it would end by itself
    w.add(Rule((G, D), "Abort", Fault.LOST))
    w.abort(asked)
    w.until(lambda: not w.entries())
    w.held.discard(P)


def a_client_leaves(w: World) -> None:
    asked = w.ask(LONG, 8)
    between_chunks_of(w, asked)
    w.held.add(P)
    w.abort(asked)
    w.run(0.1)
    w.held.discard(P)


def d_dies(w: World) -> None:
    w.ask(LONG, 100)
    w.run(0.05)
    w.held.add(D)
    w.lines[0].cut()
    w.lines[2].cut()


def p_dies(w: World) -> None:
    w.ask(LONG, 8)
    w.held.add(P)
    w.lines[2].cut()
    w.run(2.0)
    w.lines[1].cut()


def p_dies_and_the_gateway_knows_first(w: World) -> None:
    w.held.add(P)
    w.lines[1].cut()
    w.until(lambda: not w.d._endpoint.ready_nodes())
    w.lines[2].cut()


def the_gateway_dies(w: World) -> None:
    w.ask(LONG, 100)
    w.run(0.05)
    w.held.add(G)
    w.lines[0].cut()
    w.lines[1].cut()


def nobody_is_there(w: World) -> None:
    w.d.drain()
    w.until(lambda: not w.client.usable())
    with suppress(RequestRejected):
        w.ask(LONG, 8)


def an_address_that_d_cannot_use(w: World) -> None:
    far = PeerInfo("prefill-9", "tcp://192.0.2.1:5555", 5)
    w.lines[0].edit = lambda m: Peers((*m.prefills, far)) if isinstance(m, Peers) else m
    for _ in range(3):
        w.client._tell_peers()
        w.run(0.1)


def a_stranger_at_the_gateway(w: World) -> Callable[[], None]:
    return greet(w, w.client._acceptor, model="another")


def a_stranger_at_p(w: World) -> Callable[[], None]:
    return greet(w, w.p._endpoint._acceptor, model="another")


def rubbish_at_the_gateway(w: World) -> Callable[[], None]:
    return say(w, w.client._acceptor, b"GET / HTTP/1.1")


def rubbish_at_p(w: World) -> Callable[[], None]:
    return say(w, w.p._endpoint._acceptor, b"\x00")


def slower_attention(w: World, role: Role) -> None:
    node = w.d if role is Role.DECODE else w.p
    node._engine = replace(node._engine, attention_fell_back=True)


def slower_attention_at_d(w: World) -> None:
    slower_attention(w, Role.DECODE)


def slower_attention_at_p(w: World) -> None:
    slower_attention(w, Role.PREFILL)


def a_token_that_is_none(commit: Commit) -> Commit:
    return replace(commit, choices=tuple(replace(c, first_token=2**30) for c in commit.choices))


def other_checksums(chunk: Chunk) -> Chunk:
    return replace(chunk, checksums=tuple(value ^ 1 for value in chunk.checksums))


def unmappable(message: Any) -> Any:
    """D says that its pool is behind a descriptor that it does not have."""
    if isinstance(message, Hello) and message.shm is not None:
        return replace(message, shm=SharedPool(1_000_000, message.shm.num_pages))
    return message


RECIPES = [
    Recipe(Role.GATEWAY, Failure.NO_NODES, nobody_is_there),
    Recipe(Role.GATEWAY, Failure.INTERNAL, a_request, once(Commit, a_token_that_is_none)),
    Recipe(Role.GATEWAY, Failure.DECODE_LOST, d_dies),
    Recipe(Role.GATEWAY, Failure.NODE_REFUSED, a_stranger_at_the_gateway),
    Recipe(Role.GATEWAY, Failure.MESSAGE_MALFORMED, rubbish_at_the_gateway),
    Recipe(Role.GATEWAY, Failure.MESSAGE_LOST, after_losing((G, D), "Submit")),
    Recipe(Role.GATEWAY, Failure.MESSAGE_LOST, after_losing((D, G), "Tokens", 4)),
    Recipe(Role.GATEWAY, Failure.MESSAGE_LOST, after_losing((D, G), "Tokens", 8)),
    Recipe(Role.GATEWAY, Failure.MESSAGE_LOST, choices_whose_submit_is_lost),
    Recipe(Role.GATEWAY, Failure.MESSAGE_LOST, several_whose_tokens_are_lost),
    Recipe(Role.DECODE, Failure.PREFILL_LOST, p_dies),
    Recipe(Role.DECODE, Failure.PREFILL_LOST, p_dies_and_the_gateway_knows_first),
    Recipe(
        Role.DECODE,
        Failure.PREFILL_FAILED,
        a_request,
        once(Commit, lambda commit: Failed(commit.transfer_id, 503, "out of order")),
    ),
    Recipe(Role.DECODE, Failure.GATEWAY_LOST, the_gateway_dies),
    Recipe(Role.DECODE, Failure.NODE_REFUSED, an_address_that_d_cannot_use),
    Recipe(
        Role.DECODE, Failure.MESSAGE_MALFORMED, a_client_leaves, once(Quiesced, lambda _: StatsRequest(1))
    ),
    Recipe(Role.DECODE, Failure.MESSAGE_LOST, a_client_leaves_and_d_does_not_hear),
    Recipe(Role.DECODE, Failure.TRANSFER_LOST, after_losing((D, P), "Prefill")),
    Recipe(Role.DECODE, Failure.TRANSFER_LOST, after_losing((P, D), "Commit")),
    Recipe(Role.DECODE, Failure.PAGES_WRONG, after_losing((P, D), "Chunk", 2)),
    Recipe(Role.DECODE, Failure.PAGES_WRONG, a_request, once(Chunk, other_checksums)),
    Recipe(Role.DECODE, Failure.PAGES_WRONG, a_request, once(Chunk, other_checksums), {"plane": "shm"}),
    Recipe(Role.DECODE, Failure.ATTENTION_FALLBACK, slower_attention_at_d),
    Recipe(Role.PREFILL, Failure.NODE_REFUSED, a_stranger_at_p),
    Recipe(Role.PREFILL, Failure.MESSAGE_MALFORMED, rubbish_at_p),
    Recipe(
        Role.PREFILL,
        Failure.MESSAGE_MALFORMED,
        a_request,
        once(Credit, lambda _: StatsRequest(1)),  # the first is said at once
        from_start=True,
    ),
    Recipe(Role.PREFILL, Failure.PLANE_FALLBACK, nothing, unmappable, {"plane": "auto"}, from_start=True),
    Recipe(Role.PREFILL, Failure.ATTENTION_FALLBACK, slower_attention_at_p),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_kind_counts_once_and_no_other(tiny_model: Path, recipe: Recipe) -> None:
    with world(tiny_model, edit=recipe.edit, **recipe.options) as w:
        watched = Watched(w)
        before = watched.failures()
        if recipe.from_start:
            before.clear()
        hang_up = recipe.provoke(w)
        w.until(lambda: watched.failures() != before)
        w.run(AFTER_S)
        after = watched.failures()
        if hang_up is not None:
            hang_up()
    after.subtract(before)
    assert +after == {(recipe.role, recipe.kind): 1}


def test_greetings_of_a_process_that_is_gone_are_no_loss(tiny_model: Path) -> None:
    """They lie in its connection, several, until a gateway that starts reads them."""
    with world(tiny_model) as w:
        watched = Watched(w)
        before = watched.failures()
        for seq in (1, 2, 3):
            hang_up = greet(w, w.client._acceptor, seq, model=w.d._engine.spec.fingerprint)
            w.until(lambda: any(node.peer.node_id == "decode-9" for node in w.client._router.nodes()))
            hang_up()
            w.run(AFTER_S)
        assert not +(watched.failures() - before)
        a_request(w)


# Over HTTP --------------------------------------------------------------------------------------------------

COMPLETION = {"model": MODEL, "prompt": "the quick", "max_tokens": 4}
HELD = Script(hold_after=1)


def ask(server: LiveServer, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=COMPLETION | fields, timeout=WAIT_S)


def answer_to(server: LiveServer, request: bytes) -> bytes:
    """What is answered to a request that stops here."""
    with socket.create_connection(("127.0.0.1", server.port), WAIT_S) as sock:
        sock.sendall(request)
        return sock.recv(1 << 16)


def client_leaves(server: LiveServer) -> None:
    server.nodes.script = HELD
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=COMPLETION | {"stream": True}, timeout=WAIT_S) as stream:
        next(stream.iter_bytes())


def half_a_head(server: LiveServer) -> None:
    assert answer_to(server, b"POST /v1/completions HTT").startswith(b"HTTP/1.1 408")


def half_a_body(server: LiveServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n{"
    assert answer_to(server, head).startswith(b"HTTP/1.1 408")


def no_end_in_time(server: LiveServer) -> None:
    server.nodes.script = HELD
    assert ask(server, timeout=0.1).status_code == 504


def too_many_wait(server: LiveServer) -> None:
    server.nodes.script = Script(refusal=RequestRejected("too many", status=429, retry_after_s=1))
    assert ask(server).status_code == 429


def too_many_connections(server: LiveServer) -> None:
    assert ask(server).status_code == 503  # there is the one that the metrics are read over


def a_bug_in_a_call(server: LiveServer) -> None:
    def broken(prompt_ids: object) -> list[int]:
        raise ZeroDivisionError

    server.nodes.script = Script(broken)
    assert ask(server).status_code == 500


def a_bug_in_a_page(server: LiveServer) -> None:
    server.nodes.stalled_ids = (object(),)  # type: ignore[assignment]
    assert httpx.get(f"{server.url}/health").status_code == 500
    server.nodes.stalled_ids = ()


FEW = ConnectionLimits(max_connections=1)
HASTY = ConnectionLimits(timeout_s=0.2)
OVER_HTTP: list[tuple[Failure, Callable[[LiveServer], None], ConnectionLimits]] = [
    (Failure.CLIENT_GONE, client_leaves, ConnectionLimits()),
    (Failure.CLIENT_SLOW, half_a_head, HASTY),
    (Failure.CLIENT_SLOW, half_a_body, HASTY),
    (Failure.DEADLINE, no_end_in_time, ConnectionLimits()),
    (Failure.OVERLOADED, too_many_wait, ConnectionLimits()),
    (Failure.OVERLOADED, too_many_connections, FEW),
    (Failure.INTERNAL, a_bug_in_a_call, ConnectionLimits()),
    (Failure.INTERNAL, a_bug_in_a_page, ConnectionLimits()),
]


@pytest.mark.parametrize(("kind", "provoke", "limits"), OVER_HTTP, ids=lambda x: getattr(x, "__name__", None))
def test_a_kind_of_a_call_counts_once_and_no_other(
    tiny_model: Path,
    kind: Failure,
    provoke: Callable[[LiveServer], None],
    limits: ConnectionLimits,
) -> None:
    config = GatewayConfig(client_timeout=limits.timeout_s)
    with (
        live_gateway(TextPipeline.load(tiny_model), config, limits) as server,
        httpx.Client(base_url=server.url, timeout=WAIT_S) as client,
    ):

        def failures() -> Counts:
            return failures_in(client.get("/metrics").text)

        before = failures()
        provoke(server)
        poll_until(lambda: failures() != before, WAIT_S, "it is counted")
        after = failures()
    after.subtract(before)
    assert +after == {(Role.GATEWAY, kind): 1}


def test_no_kind_is_left_out() -> None:
    provoked = {(recipe.role, recipe.kind) for recipe in RECIPES}
    provoked |= {(Role.GATEWAY, kind) for kind, _, _ in OVER_HTTP}
    assert provoked == {(role, kind) for kind, about in FAILURES.items() for role in about.counted_by}
    assert set(FAILURES) == set(Failure)
