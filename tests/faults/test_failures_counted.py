"""Each kind of failure, provoked: it counts once, where it should, and no other kind does.

A kind that is new has no recipe here, and fails a test. Kinds of processes and of what travels are provoked
in a world of real nodes (`failure_recipes.py`); those of clients over HTTP, before fake nodes.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.config import GatewayConfig
from common.errors import RequestRejected
from common.messages import Role
from conformance.waiting import poll_until
from gateway.connections import ConnectionLimits
from gateway.failures import FAILURES, Failure
from gateway.fake import Script
from gateway.text import TextPipeline
from tests.faults.failure_counts import Counts, Watched, failures_in
from tests.faults.failure_recipes import RECIPES, Recipe, a_request, greet
from tests.faults.world import world
from tests.gateway.conftest import MODEL, WAIT_S, LiveServer
from tests.gateway.live import live_gateway

AFTER_S = 5.0  # of the world's clock: whatever else is going to count has counted


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
