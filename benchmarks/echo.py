"""The least that an ASGI server can do for a stream: it writes the request's body so many times.

    python -m benchmarks.echo

It says its port on stdout and runs until it is ended. Imports nothing of ours: uvicorn and httptools,
without a framework.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

import uvicorn

_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answer one request; the header `x-times` says how often its body is written."""
    times = int(dict(scope["headers"])[b"x-times"])
    chunk, more = b"", True
    while more:
        message = await receive()
        chunk += message["body"]
        more = message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    for _ in range(times):
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def main() -> None:
    """Serve on a port that the system picks."""
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as http:
        sys.stdout.write(f"{http.getsockname()[1]}\n")
        sys.stdout.flush()
        config: Any = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            loop="asyncio",
        )
        asyncio.run(uvicorn.Server(config).serve(sockets=[http]))


if __name__ == "__main__":
    main()
