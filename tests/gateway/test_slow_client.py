"""A client that stops reading: its answers wait in the gateway in order, and nobody waits for it."""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from typing import Any

import httpx

from tests.gateway.conftest import LIMITS, MODEL, WAIT_S, LiveServer

NUM_PROMPTS = 64
MAX_TOKENS = LIMITS.context_length - 8
# All chunks together are far more than the kernel keeps for a connection.
BODY = {
    "model": MODEL,
    "prompt": [[40 + i, 80, 90 + i] for i in range(NUM_PROMPTS)],
    "max_tokens": MAX_TOKENS,
    "temperature": 0,
}


def events_of(raw: bytes) -> list[Any]:
    """What a chunked body of events says, [DONE] as None."""
    lines = [line for line in raw.split(b"\n") if line.startswith(b"data: ")]
    return [None if line == b"data: [DONE]" else json.loads(line.removeprefix(b"data: ")) for line in lines]


def test_what_a_client_did_not_read_in_time_it_reads_later(server: LiveServer, client: httpx.Client) -> None:
    expected = [choice["text"] for choice in client.post("/v1/completions", json=BODY).json()["choices"]]
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(WAIT_S)
        slow.connect(("127.0.0.1", server.port))
        body = json.dumps(BODY | {"stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        slow.sendall(head % len(body) + body)
        # Nothing was read, and the nodes are through with all of it; others are served.
        assert server.nodes.wait_submitted(2 * NUM_PROMPTS, WAIT_S)
        assert server.nodes.wait_idle(WAIT_S)
        assert client.get("/health").status_code == 200
        raw = b""
        while data := slow.recv(1 << 20):
            raw += data
    *events, last = events_of(raw)
    assert last is None
    texts: defaultdict[int, str] = defaultdict(str)
    finished = set()
    for event in events:
        (choice,) = event["choices"]
        assert choice["index"] not in finished
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"] is not None:
            finished.add(choice["index"])
    assert [texts[i] for i in range(NUM_PROMPTS)] == expected
    assert len(finished) == NUM_PROMPTS
