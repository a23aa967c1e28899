"""What nodes have in common: addresses, the link to the gateway, and the loop that their process runs in."""

from __future__ import annotations

import gc
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import zmq

from common.addresses import listen_towards
from common.clock import Clock
from common.config import NodeConfig, TransferConfig
from common.connector import Connector
from common.drain import Drain
from common.errors import ConfigError
from common.host import this_process
from common.kv.layout import KVLayout
from common.messages import CudaPool, Hello, PageLedger, Role, SharedPool, Stats, StatsRequest, Status
from common.peer import PeerEvent, PeerMessage, PeerUp, new_epoch
from common.sockets import Pollable, wait
from common.supervision.lifeline import Lifeline
from common.supervision.stop_signals import StopSignals

log = logging.getLogger("baton.node")

ALIVE_EVERY_S = 1.0
PLANES = {"cpu": ("shm", "frames"), "cuda": ("cuda-ipc", "frames")}  # by device, the better first


class NodeLoop(Protocol):
    """A node as its process runs it."""

    def turn(self, now: float) -> bool:
        """Do what can be done now; True when there is more to do at once."""

    def pollables(self) -> list[Pollable]:
        """What the node waits for."""

    def deadline(self) -> float | None:
        """When `turn` has something to do at the latest."""

    def drain(self) -> None:
        """Take no new work from now on, and say so."""

    def is_drained(self) -> bool:
        """Say whether all that was taken is finished, and who waits for it knows."""

    def close(self) -> None:
        """Close all sockets."""


def run_loop(loop: NodeLoop, lifeline: Lifeline, drain_grace_s: float) -> None:
    """Run a node until it is told to end and has finished what it has (drain.py), or its supervisor ends."""
    # What is here now stays: a walk of the collector over torch and a model takes a tenth of a second, in
    # which no step would be launched.
    gc.collect()
    gc.freeze()
    with StopSignals() as signals:
        lifeline.ready()
        alive_due_s = time.monotonic()
        drain = Drain(drain_grace_s, is_supervised=lifeline.is_supervised)
        try:
            while True:
                now = time.monotonic()
                if (signum := signals.take()) is not None and drain.told(signum, now):
                    log.info("told to end: no new work, and at most %g s for what is here", drain_grace_s)
                    loop.drain()
                if drain.is_over(now, loop.is_drained):
                    break
                if now >= alive_due_s:
                    lifeline.alive()
                    alive_due_s = now + ALIVE_EVERY_S
                if loop.turn(now):
                    continue
                deadlines = (alive_due_s, loop.deadline(), drain.deadline_s)
                wake_s = min(d for d in deadlines if d is not None)
                wait([signals.fileno(), *loop.pollables()], wake_s - time.monotonic())
        finally:
            loop.close()
            lifeline.close()


def private_address(join: str, name: str, lifeline: Lifeline) -> str:
    """Choose an address for who joins the same gateway: a private ipc socket, or where that has TCP a port.

    Raises:
        ConfigError: no way leads to the gateway.
    """
    first, *_ = gateways_of(join)
    if not first.startswith("ipc://"):
        return listen_towards(first)
    folder = Path(tempfile.mkdtemp(prefix="baton-"))
    lifeline.remove_at_exit(folder)
    return f"ipc://{folder}/{name}.sock"


def remove_socket_at_exit(address: str, lifeline: Lifeline) -> None:
    """Take care that an ipc socket that this process binds is gone when it ends, however it ends."""
    scheme, _, path = address.partition("://")
    if scheme == "ipc":
        lifeline.remove_at_exit(Path(path))


class GatewayLink:
    """A node's link to its gateway: greets, answers StatsRequest, passes the rest on.

    Args:
        status_of: what the node says of itself once a second.
        stats: its ledger and counters, at the moment of asking.
        clock: the one that `poll` is given the time of.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        hello: Hello,
        epoch: int,
        *,
        status_of: Callable[[int], Status],
        stats: Callable[[], tuple[PageLedger, dict[str, int]]],
        clock: Clock,
    ) -> None:
        log.info("joining the gateway at %s", address)
        self._stats = stats
        self._status_of = status_of
        self.connector = Connector(
            context, address, hello, epoch, lambda peer: status_of(peer.epoch), now=clock(), clock=clock
        )

    def poll(self, now: float) -> list[PeerEvent]:
        """Read all messages; returns what is the node's own business."""
        events: list[PeerEvent] = []
        for event in self.connector.poll(now):
            match event:
                case PeerMessage(peer, StatsRequest(query_id)):
                    ledger, counters = self._stats()
                    peer.send(Stats(query_id, ledger, counters))
                case PeerUp(peer):
                    log.info("joined %s", peer.node_id)
                    events.append(event)
                case _:
                    events.append(event)
        return events

    def send_status(self) -> None:
        """Say now what the next Status would say."""
        if (peer := self.connector.peer) is not None:
            peer.send(self._status_of(peer.epoch))

    def close(self) -> None:
        """Close the link."""
        self.connector.close()


def gateways_of(join: str) -> list[str]:
    """Return the addresses of `--join`."""
    return [address.strip() for address in join.split(",")]


def join_gateways(
    context: zmq.Context[zmq.Socket[bytes]], join: str, hello: Hello, epoch: int, **rest: Any
) -> list[GatewayLink]:
    """Link to each gateway of `--join`; for the rest see `GatewayLink`."""
    return [GatewayLink(context, address, hello, epoch, **rest) for address in gateways_of(join)]


def make_hello(
    role: Role,
    config: NodeConfig,
    *,
    model: str,
    layout: KVLayout,
    capacity_tokens: int,
    prefill_budget_tokens: int,
    transfer: TransferConfig,
    device_type: str = "cpu",
    shm: SharedPool | None = None,
    cuda: CudaPool | None = None,
) -> tuple[Hello, int]:
    """Describe this node; returns its Hello and the epoch of its process.

    Raises:
        ConfigError: there is no gateway to join, or the plane does not work on the device.
    """
    if not config.join:
        raise ConfigError(f"baton {role.value} needs --join ADDRESS, the address that `baton gateway` prints")
    planes = PLANES[device_type]
    if transfer.transfer not in ("auto", *planes):
        raise ConfigError(
            f"--transfer {transfer.transfer} does not work with --device {device_type}: "
            f"use auto, {' or '.join(planes)}"
        )
    hello = Hello(
        node_id=config.node_id or f"{role.value}-{os.getpid()}",
        role=role,
        host=this_process(),
        model=model,
        layout=layout,
        planes=planes if transfer.transfer == "auto" else (transfer.transfer,),
        shm=shm,
        cuda=cuda,
        verify_pages=transfer.verify_pages,
        capacity_tokens=capacity_tokens,
        prefill_budget_tokens=prefill_budget_tokens,
    )
    return hello, new_epoch()
