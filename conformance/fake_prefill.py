"""A prefill node that computes nothing: real links, and a refusal for every prompt, or nobody at its address.

Decode nodes check all that a prefill node checks, so a real one never refuses what they send.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import torch
import zmq

from common.config import TransferConfig
from common.connector import Connector
from common.host import this_process
from common.kv.pool import KVPool
from common.messages import Hello, PageLedger, Role, Stats, StatsRequest, Status
from common.model.spec import load_spec
from common.peer import PeerMessage, new_epoch
from common.sockets import wait
from transfer.sender_endpoint import SenderEndpoint, TransferArrived

REASON = "not in the mood"
PAGE_SIZE, NUM_PAGES = 16, 4
TURN_S = 0.02


class FakePrefill:
    """Joins a gateway.

    Args:
        model: folder of the model that the decode nodes serve.
        gateway: where nodes join.
        name: its own.
        listen: where it says that it waits for decode nodes.
        refuses: it does wait there, and refuses every prompt with 400.
        verify_pages: as the decode nodes have it.
    """

    def __init__(
        self, model: Path, gateway: str, name: str, listen: str, *, refuses: bool, verify_pages: bool
    ) -> None:
        spec = load_spec(model)
        layout = spec.kv_layout(PAGE_SIZE, "float32")
        hello = Hello(
            node_id=name,
            role=Role.PREFILL,
            host=this_process(),
            model=spec.fingerprint,
            layout=layout,
            planes=("frames",),
            verify_pages=verify_pages,
            listen=listen,
            capacity_tokens=4096,
            prefill_budget_tokens=128,
        )
        self.num_refused = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._endpoint: SenderEndpoint | None = None
        epoch = new_epoch()
        if refuses:
            pool = KVPool(layout, NUM_PAGES, torch.device("cpu"))
            config = TransferConfig(verify_pages=verify_pages)
            self._endpoint = SenderEndpoint(self._context, listen, pool, config, hello, epoch)
        now = time.monotonic()
        leaving = Status(0, (), draining=True)  # so that nobody misses it afterwards
        self._gateway = Connector(self._context, gateway, hello, epoch, lambda _: leaving, now=now)

    def run(self, stop: Event) -> None:
        """Work until told to stop."""
        while not stop.is_set():
            now = time.monotonic()
            for event in self._gateway.poll(now):
                if isinstance(event, PeerMessage) and isinstance(event.message, StatsRequest):
                    pages = PageLedger(NUM_PAGES, free=NUM_PAGES)
                    event.peer.send(Stats(event.message.query_id, pages, {}))
            pollables = list(self._gateway.pollables())
            if self._endpoint is not None:
                self._refuse(self._endpoint, now)
                pollables += self._endpoint.pollables()
            wait(pollables, TURN_S)

    def _refuse(self, endpoint: SenderEndpoint, now: float) -> None:
        for output in endpoint.poll(now):
            if isinstance(output, TransferArrived):
                self.num_refused += 1
                endpoint.reject(output.key, 400, REASON)

    def close(self) -> None:
        """Close all sockets."""
        self._gateway.close()
        if self._endpoint is not None:
            self._endpoint.close()
        self._context.destroy(linger=0)


@contextmanager
def fake_prefill(
    model: Path, gateway: str, name: str, listen: str, *, refuses: bool = False, verify_pages: bool = True
) -> Iterator[FakePrefill]:
    """Have one that works in a thread of its own for a while."""
    node = FakePrefill(model, gateway, name, listen, refuses=refuses, verify_pages=verify_pages)
    stop = Event()
    thread = Thread(target=node.run, args=(stop,))
    thread.start()
    try:
        yield node
    finally:
        stop.set()
        thread.join()
        node.close()
