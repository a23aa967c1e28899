"""A prefill node that takes no prompt: real links, a real endpoint, and a refusal for everything.

Decode nodes check all that a prefill node checks, so a real one never refuses what they send.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import torch
import zmq

from common.config import TransferConfig
from common.connector import Connector
from common.kv.pool import KVPool
from common.messages import Hello, PageLedger, Role, Stats, StatsRequest, Status
from common.model.spec import load_spec
from common.peer import PeerMessage, new_epoch
from common.sockets import wait
from tests.wire.hellos import hello, here
from transfer.sender_endpoint import SenderEndpoint, TransferArrived

REASON = "not in the mood"
PAGE_SIZE = 16
NUM_PAGES = 4


class RefusingPrefill:
    """Joins a gateway, lets decode nodes link, and refuses every transfer with 400."""

    def __init__(self, model: Path, gateway: str, listen: str) -> None:
        layout = load_spec(model).kv_layout(PAGE_SIZE, "float32")
        pool = KVPool(layout, NUM_PAGES, torch.device("cpu"))
        greeting = replace(here(hello(Role.PREFILL, layout=layout)), model=load_spec(model).fingerprint)
        greeting = replace(greeting, listen=listen)
        self.refused = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        epoch = new_epoch()
        self._endpoint = SenderEndpoint(self._context, listen, pool, TransferConfig(), greeting, epoch)
        self._gateway = self._join(gateway, greeting, epoch)

    def _join(self, gateway: str, greeting: Hello, epoch: int) -> Connector:
        return Connector(
            self._context, gateway, greeting, epoch, lambda _: Status(0, ()), now=time.monotonic()
        )

    def run(self, stop: Event) -> None:
        """Work until told to stop."""
        while not stop.is_set():
            now = time.monotonic()
            for event in self._gateway.poll(now):
                match event:
                    case PeerMessage(peer, StatsRequest(query_id)):
                        peer.send(Stats(query_id, PageLedger(NUM_PAGES, free=NUM_PAGES), {}))
                    case _:
                        pass
            for output in self._endpoint.poll(now):
                if isinstance(output, TransferArrived):
                    self.refused += 1
                    self._endpoint.reject(output.key, 400, REASON)
            wait([*self._gateway.pollables(), *self._endpoint.pollables()], 0.02)

    def close(self) -> None:
        """Close all sockets."""
        self._gateway.close()
        self._endpoint.close()
        self._context.destroy(linger=0)


@contextmanager
def refusing_prefill(model: Path, gateway: str, listen: str) -> Iterator[RefusingPrefill]:
    """One that works in a thread of its own."""
    node = RefusingPrefill(model, gateway, listen)
    stop = Event()
    thread = Thread(target=node.run, args=(stop,))
    thread.start()
    try:
        yield node
    finally:
        stop.set()
        thread.join()
        node.close()
