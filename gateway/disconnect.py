"""Work for a client that may leave: ends the work when it does.

`StreamingResponse` notices only when it writes (since ASGI 2.4), so an idle stream would run on for nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run `work` to its end, or cancel it when the client leaves. The request's body has been read before.

    Raises:
        ClientDisconnect: the client left; the work has been cancelled and has ended.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_client_left(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        task.result()
    finally:  # reached by a cancellation of this call too (the server stops)
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
