"""Questions to nodes about their ledgers and counters, and the answers that come in time.

One that is silent or gone is named, and holds nobody up for longer. It must not know requests.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from common.messages import Stats, StatsRequest
from common.peer import Peer
from gateway.nodes import NodeSnapshot
from gateway.router import Node

STATS_TIMEOUT_S = 2.0


class NodeQueries:
    """What nodes are being asked; to be used in one event loop."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._open: dict[int, tuple[Peer, asyncio.Future[Stats]]] = {}

    async def ask(
        self, nodes: Sequence[Node], sent: Callable[[], None]
    ) -> tuple[list[NodeSnapshot], list[str]]:
        """Ask all at once; the second part names those that do not answer within 2 s, or are down.

        `sent` is called when the questions are under way, before anybody waits for an answer.
        """
        asked: list[tuple[int, Node, asyncio.Future[Stats]]] = []
        for node in nodes:
            query_id = next(self._ids)
            future: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
            self._open[query_id] = (node.peer, future)
            asked.append((query_id, node, future))
            node.peer.send(StatsRequest(query_id))
        sent()
        if asked:
            await asyncio.wait([future for _, _, future in asked], timeout=STATS_TIMEOUT_S)
        answers, missing = [], []
        for query_id, node, future in asked:
            self._open.pop(query_id, None)
            if not future.done() or future.cancelled():  # silent, or gone while it was asked
                future.cancel()
                missing.append(node.peer.node_id)
            else:
                answers.append(_snapshot(node, future.result()))
        return answers, missing

    def answered(self, peer: Peer, stats: Stats) -> None:
        """Take an answer; nobody else's, and none that came too late."""
        query = self._open.get(stats.query_id)
        if query is not None and query[0] is peer and not query[1].done():
            query[1].set_result(stats)

    def gone(self, peer: Peer) -> None:
        """Wait no longer for a node that is down."""
        for asked, future in self._open.values():
            if asked is peer:
                future.cancel()


def _snapshot(node: Node, stats: Stats) -> NodeSnapshot:
    hello, status = node.peer.hello, node.status
    return NodeSnapshot(
        node.peer.node_id,
        hello.role,
        node.peer.epoch,
        stats.pages,
        stats.counters,
        running=0 if status is None else status.running,
        queued=0 if status is None else status.queued,
        page_bytes=0 if hello.layout is None else hello.layout.page_bytes,
    )
