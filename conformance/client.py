"""Ask a server over HTTP, one request or many at once, or leave early; look at its ledger and metrics.

Every wait has an end: what does not come within `wait_s` of the client raises AssertionError, or is an
outcome that has not succeeded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from conformance.waiting import poll_until

WAIT_S = 120.0  # for what must come, however slow the machine
LEDGER_S = 2.0  # promised: pages are back within 2 s

Body = dict[str, Any]


@dataclass
class Outcome:
    """How a call ended, as its client saw it."""

    status: int = 0  # 0: the connection broke before there was one
    done: bool = False  # a whole body, or [DONE]
    error: Body | None = None  # an error object, as the body or as an event
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] | None = None
    finish: str | None = None
    usage: Body | None = None
    order: list[int] = field(default_factory=list)  # index of the choice of each event with tokens
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def succeeded(self) -> bool:
        """A whole answer, and no error."""
        return self.status == 200 and self.done and self.error is None

    def take_choice(self, choice: Body) -> None:
        """Add what a choice, whole or part, brings."""
        content = choice.get("delta") or choice.get("message") or choice
        self.text += content.get("text") or content.get("content") or ""
        self.token_ids += choice.get("token_ids") or []
        self.prompt_token_ids = choice.get("prompt_token_ids", self.prompt_token_ids)
        self.finish = choice["finish_reason"] or self.finish
        if choice.get("token_ids"):
            self.order.append(choice["index"])

    def take_event(self, line: str) -> None:
        """Take a line of a stream."""
        if line == "data: [DONE]":
            assert self.error is None, "[DONE] behind an error"
            self.done = True
        elif line:
            assert line.startswith("data: ")
            event = json.loads(line.removeprefix("data: "))
            self.error = event.get("error")
            for choice in event.get("choices", ()):
                self.take_choice(choice)
            self.usage = event.get("usage") or self.usage


def greedy(prompt: str | Sequence[int] | Sequence[Sequence[int]], max_tokens: int, **fields: Any) -> Body:
    """The body of a completion that an oracle can predict: greedy, past every end-of-sequence token."""
    return {
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }


class Pending:
    """A request under way, followed by a thread."""

    def __init__(self, client: Client, body: Body, path: str) -> None:
        self.outcome = Outcome()
        self.took_s = 0.0
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._follow(client, body, path))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """The client left, or has all that there will be."""
        return not self._thread.is_alive()

    def leave(self) -> None:
        """Close the connection, whatever has come."""
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def wait(self) -> Outcome:
        """Wait for the end; a client's patience has one."""
        self._thread.join()
        return self.outcome

    def _run(self) -> None:
        start = time.monotonic()
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.close()
        self.took_s = time.monotonic() - start

    async def _follow(self, client: Client, body: Body, path: str) -> None:
        async with client.session() as http:
            await client.follow(http, body, self.outcome, path)


class Client:
    """One server's client; waits for `wait_s` at most, and shows its key where it has one."""

    def __init__(self, url: str, model: str, wait_s: float = WAIT_S, api_key: str | None = None) -> None:
        self.url = url
        self.model = model
        self.wait_s = wait_s
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._pages = httpx.Client(base_url=url, timeout=wait_s, verify=False, headers=self._headers)

    def get(self, path: str) -> httpx.Response:
        """Get a page."""
        return self._pages.get(path)

    def post(self, path: str, body: Body) -> httpx.Response:
        """Post a body as it is; for answers that are not completions."""
        return self._pages.post(path, json={"model": self.model, **body})

    def ask(self, body: Body, path: str = "/v1/completions") -> Outcome:
        """Send one request and wait for its end."""
        return self.ask_all([body], path)[0]

    def begin(self, body: Body, path: str = "/v1/completions") -> Pending:
        """Send one request and go on."""
        return Pending(self, body, path)

    def ask_all(self, bodies: Sequence[Body], path: str = "/v1/completions") -> list[Outcome]:
        """Send all at once and wait for all."""
        return self.ask_each([(path, body) for body in bodies])

    def ask_each(self, calls: Sequence[tuple[str, Body]]) -> list[Outcome]:
        """Send all at once, each to its own path, and wait for all."""

        async def run() -> list[Outcome]:
            async with self.session() as http:
                return await asyncio.gather(
                    *(self.follow(http, body, Outcome(), path) for path, body in calls)
                )

        return asyncio.run(run())

    def session(self) -> httpx.AsyncClient:
        """A client with as many connections as it takes."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        # verify=False: plain HTTP needs no certificates, and loading them takes as long as a request.
        return httpx.AsyncClient(
            base_url=self.url, timeout=self.wait_s, limits=limits, verify=False, headers=self._headers
        )

    async def follow(
        self, http: httpx.AsyncClient, body: Body, outcome: Outcome, path: str = "/v1/completions"
    ) -> Outcome:
        """Send a request and put what comes into `outcome`, to its end."""
        body = {"model": self.model, **body}
        try:
            async with http.stream("POST", path, json=body) as response:
                outcome.status = response.status_code
                outcome.headers = dict(response.headers)
                if response.headers["content-type"].startswith("text/event-stream"):
                    async for line in response.aiter_lines():
                        outcome.take_event(line)
                else:
                    whole = json.loads(await response.aread())
                    outcome.error = whole.get("error")
                    outcome.usage = whole.get("usage")
                    for choice in whole.get("choices", ()):
                        outcome.take_choice(choice)
                    outcome.done = True
        except httpx.TransportError:
            pass  # the outcome is what came before
        return outcome

    def ledger_trouble(self) -> str | None:
        """Say what is wrong with the ledger of an idle server: a page that is neither free nor cached."""
        body = self.get("/debug/kv").json()
        if body["missing"] or not body["nodes"]:
            return f"missing: {body}"
        for node in body["nodes"]:
            pages = dict(node["pages"])
            total = pages.pop("total")
            assert sum(pages.values()) == total, node
            if pages["free"] + pages["cached"] != total:
                return f"not idle: {node}"
        return None

    def assert_ledger_clean(self, deadline_s: float = LEDGER_S) -> None:
        """Check that every page of every node is free or cached, now or soon."""
        poll_until(
            lambda: self.ledger_trouble() is None,
            deadline_s,
            "all pages are free or cached",
            lambda: str(self.ledger_trouble()),
        )

    def until(self, probe: Callable[[], Any], what: str, deadline_s: float | None = None) -> None:
        """Wait until something is so."""
        poll_until(lambda: bool(probe()), self.wait_s if deadline_s is None else deadline_s, what)

    def pages(self, role: str) -> dict[str, int]:
        """The ledger of the nodes of a role, summed."""
        total: dict[str, int] = {}
        for node in self.get("/debug/kv").json()["nodes"]:
            for state, count in node["pages"].items() if node["role"] == role else ():
                total[state] = total.get(state, 0) + count
        return total

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over all series that have these labels."""
        total = 0.0
        for line in self.get("/metrics").text.splitlines():
            found = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
            if found and all(f'{key}="{value}"' in (found[1] or "") for key, value in labels.items()):
                total += float(found[2])
        return total
