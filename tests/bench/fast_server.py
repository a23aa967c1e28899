"""A server of /v1/completions that streams as fast as it can, in the way of several servers.

It shows whether the client counts right, and what it can take.

`python -m tests.bench.fast_server [SECONDS]` serves on a port that it prints, to put the client to its limit
by hand; with SECONDS, it rests so long after each chunk of a stream.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass
class FastServer:
    """Answers with as many tokens as asked for.

    `served` counts the whole answers, `open` and `most_open` those that are begun.
    """

    tokens_a_chunk: int = 1
    rest_s: float = 0.0
    first_s: Callable[[Json], float] = lambda body: 0.0  # until the first token of a body's answer
    has_usage: bool = True  # with each chunk, where it was asked for
    cut_bytes: int | None = None  # write so many bytes at a time
    fails: Callable[[Json], str] = lambda body: ""  # "refuse", "cut", "event" or "" for a body
    served: int = 0
    open: int = 0
    most_open: int = 0
    bodies: list[Json] = field(default_factory=list)
    is_stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            if head.startswith("get "):
                await self._write(writer, _plain(200, {"data": [{"id": "fast"}]}))
                return
            body = json.loads(await reader.readexactly(int(head.split("content-length: ")[1].split("\r")[0])))
            self.bodies.append(body)
            self.open += 1
            self.most_open = max(self.open, self.most_open)
            await self._answer(writer, body)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, body: Json) -> None:
        failure = self.fails(body)
        if failure == "refuse":
            await self._write(writer, _plain(429, {"error": {"message": "too many"}}))
            return
        await self._write(
            writer, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        )
        sent = 0
        await asyncio.sleep(self.first_s(body))
        while sent < body["max_tokens"]:
            count = min(self.tokens_a_chunk, body["max_tokens"] - sent)
            sent += count
            await self._write(writer, _chunk(json.dumps(self._event(body, sent, count))))
            if failure == "event":
                await self._write(writer, _chunk('{"error": {"message": "the node died"}}'))
            if failure:
                return
            await asyncio.sleep(self.rest_s)
        self.open -= 1  # the client may know before we do
        usage = {"choices": [], "usage": _usage(body, sent)}
        await self._write(writer, _chunk(json.dumps(usage)) + _chunk("[DONE]") + b"0\r\n\r\n")
        self.served += 1

    def _event(self, body: Json, sent: int, count: int) -> Json:
        choice: Json = {"index": 0, "text": "word ", "finish_reason": None}
        if body.get("return_token_ids"):
            choice["token_ids"] = list(range(count))
            choice["prompt_token_ids"] = body["prompt"]
        return {"choices": [choice]} | ({"usage": _usage(body, sent)} if self.has_usage else {})

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        step = self.cut_bytes or len(data)
        for at in range(0, len(data), step):
            writer.write(data[at : at + step])
            await writer.drain()
            if self.cut_bytes:
                await asyncio.sleep(0)


def _usage(body: Json, sent: int) -> Json:
    return {"prompt_tokens": len(body["prompt"]), "completion_tokens": sent}


def _chunk(event: str) -> bytes:
    data = f"data: {event}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


def _plain(status: int, content: Json) -> bytes:
    data = json.dumps(content).encode()
    return b"HTTP/1.1 %d Status\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (
        status,
        len(data),
        data,
    )


@contextmanager
def serving(server: FastServer) -> Iterator[str]:
    """Serve from a thread for a while; gives the address."""
    ports: list[int] = []
    ready = threading.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        listening = await asyncio.start_server(server, "127.0.0.1", 0, backlog=1024)
        ports.append(listening.sockets[0].getsockname()[1])
        ready.set()
        await server.is_stopping.wait()
        listening.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait()
    try:
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(server.is_stopping.set)
        thread.join()
        loop.close()


if __name__ == "__main__":
    with serving(FastServer(rest_s=float(sys.argv[1]) if len(sys.argv) > 1 else 0.0)) as address:
        print(address, flush=True)  # noqa: T201
        threading.Event().wait()
