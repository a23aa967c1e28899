"""A client leaves its long prompt: the short one that follows waits for one chunk of it, and no more."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.soak.settings import setting
from tests.system.client import WAIT_S, Body, Client
from tests.system.server import running
from tests.tiny import VOCAB_SIZE, write_tiny_model

pytestmark = pytest.mark.soak

PROMPT_TOKENS = setting("LONG_PROMPT", 8000)
REPEATS = setting("LONG_REPEATS", 20)
CHUNK_TOKENS = 512
LAST_CHUNKS = 4  # the slowest of a prompt; their time is taken from two prompts that differ by them
MARGIN_S = 0.1
SET_UPS = {"disaggregated": (), "colocated": ("--colocated",)}


class Clients:
    """One of them asks long, and leaves; the other short."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._draw = random.Random(61)

    def prompt(self, length: int) -> list[int]:
        """One that was not asked before."""
        return [self._draw.randrange(3, VOCAB_SIZE) for _ in range(length)]

    def body(self, length: int, **fields: object) -> Body:
        """One token of answer to a new prompt: what the client waits for is its first."""
        return {"model": self._client.model, "prompt": self.prompt(length), "max_tokens": 1} | fields

    def took_s(self, length: int) -> float:
        """Seconds until the answer, in all."""
        start = time.monotonic()
        assert self._client.ask(self.body(length)).succeeded
        return time.monotonic() - start

    async def left_after(self, leave_s: float) -> tuple[float, bool]:
        """Send a long prompt, leave after so long, ask a short one at once.

        Returns its seconds, and whether the long one was still computed when its client left.
        """
        url = httpx.URL(self._client.url)
        body = json.dumps(self.body(PROMPT_TOKENS)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.host}\r\nContent-Length: {len(body)}\r\n\r\n"
        async with httpx.AsyncClient(base_url=self._client.url, timeout=WAIT_S, verify=False) as http:
            await http.get("/v1/models")  # the connection is there
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(head.encode() + body)
            await writer.drain()
            answer = asyncio.create_task(reader.read(1))
            await asyncio.wait([answer], timeout=leave_s)
            was_computed = not answer.done()
            answer.cancel()
            writer.close()
            start = time.monotonic()
            response = await http.post("/v1/completions", json=self.body(4))
            took_s = time.monotonic() - start
            assert response.status_code == 200
            return took_s, was_computed


@pytest.mark.parametrize("set_up", SET_UPS)
def test_disconnected_long_prompt(tmp_path: Path, set_up: str, say: Callable[[str], None]) -> None:
    model = write_tiny_model(tmp_path / "long", max_position_embeddings=2 * PROMPT_TOKENS)
    with running(model, "--prefill-budget", str(CHUNK_TOKENS), *SET_UPS[set_up]) as server:
        client = Client(server.url, server.model)
        clients = Clients(client)
        clients.took_s(PROMPT_TOKENS)  # warm
        whole_s = min(clients.took_s(PROMPT_TOKENS) for _ in range(3))
        less_s = min(clients.took_s(PROMPT_TOKENS - LAST_CHUNKS * CHUNK_TOKENS) for _ in range(3))
        chunk_s = (whole_s - less_s) / LAST_CHUNKS
        alone_s = statistics.median(clients.took_s(4) for _ in range(9))
        draw, blocked_s = random.Random(62), []
        for _ in range(REPEATS):
            took_s, was_computed = asyncio.run(clients.left_after(whole_s * draw.uniform(0.2, 0.8)))
            client.assert_ledger_clean()
            if was_computed:
                blocked_s.append(took_s - alone_s)
        say(
            f"{set_up}: a prompt of {PROMPT_TOKENS} takes {whole_s * 1e3:.0f} ms, its last chunk of "
            f"{CHUNK_TOKENS} {chunk_s * 1e3:.0f} ms; a short one alone {alone_s * 1e3:.1f} ms, and behind an "
            f"abandoned long one {statistics.median(blocked_s) * 1e3:.1f} ms more, at most "
            f"{max(blocked_s) * 1e3:.1f} ({len(blocked_s)} times)"
        )
        assert len(blocked_s) > REPEATS / 2
        assert max(blocked_s) < chunk_s + MARGIN_S
        client.assert_ledger_clean()
