"""The other process of `planes` and `transfer`: a prefill node's end on each plane, a raw socket, no model.

What it sends is in memory before it is asked: a transfer's pages are "computed" when its Prefill arrives.
"""

from __future__ import annotations

import random
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import zmq

from common.config import NodeConfig, TransferConfig
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.messages import Choice, Hello, Role, SharedPool
from common.node import make_hello
from common.request import PrefillStamps
from common.sockets import Pollable, wait
from common.supervision.small_machine import keep_freed_memory
from transfer.planes.cuda_ipc import cuda_pool
from transfer.sender import FirstToken
from transfer.sender_endpoint import SenderEndpoint, TransferArrived

PLANES = ("frames", "shm")
RAW = "raw"
RAW_REQUEST = struct.Struct("<QQ")  # bytes in all, bytes a frame

Context = zmq.Context[zmq.Socket[bytes]]
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def address_of(folder: Path, name: str) -> str:
    """Where the end of a plane, or the raw socket, listens."""
    return f"ipc://{folder}/{name}.sock"


def greeting(role: Role, plane: str, pool: KVPool, config: TransferConfig) -> tuple[Hello, int]:
    """Return this process's Hello for a plane, and an epoch; D offers its pool."""
    is_offered = role is Role.DECODE
    return make_hello(
        role,
        NodeConfig(join="nobody", node_id=f"{role.value}-{plane}"),
        model="none",
        layout=pool.layout,
        capacity_tokens=1 << 20,
        prefill_budget_tokens=1 << 20,
        transfer=config,
        device_type=pool.device.type,
        shm=SharedPool(pool.fd, pool.num_pages) if is_offered and pool.fd is not None else None,
        cuda=cuda_pool(pool) if is_offered else None,
    )


def raw_socket(context: Context) -> zmq.Socket[bytes]:
    """Make one end of the raw connection, without high-water marks, as the servers' sockets are."""
    socket = context.socket(zmq.PAIR)
    for name in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
        socket.setsockopt(name, 0)
    return socket


def bytes_of(pool: KVPool) -> Bytes:
    """Return all of a pool's memory, flat."""
    memory: Bytes = pool.data.view(-1).view(torch.uint8).numpy()
    return memory


class PageSource:
    """Pages of a pool in an order that scatters them, taken round and round."""

    def __init__(self, num_pages: int, seed: int) -> None:
        self._order = random.Random(seed).sample(range(1, num_pages + 1), num_pages) * 2
        self._num_pages = num_pages
        self._at = 0

    def take(self, count: int) -> tuple[int, ...]:
        """Return the next `count` pages."""
        start = self._at
        self._at = (start + count) % self._num_pages
        return tuple(self._order[start : start + count])


@dataclass(frozen=True, slots=True)
class PlaneSender:
    """A prefill node's end that computes nothing."""

    endpoint: SenderEndpoint
    pages: PageSource

    def turn(self) -> None:
        """Answer what arrived, and move pages."""
        for output in self.endpoint.poll(time.monotonic()):
            if isinstance(output, TransferArrived):
                pages = self.pages.take(len(output.prefill.page_ids))
                self.endpoint.start(output.key)
                # Nothing is computed here: when the pages were posted travels as the start of that.
                posted = PrefillStamps(time.monotonic())
                self.endpoint.chunk(output.key, 0, pages, is_last=True)
                self.endpoint.first_token(output.key, FirstToken((Choice(1, None),), posted))


def _send_raw(socket: zmq.Socket[bytes], memory: Bytes) -> None:
    """Send what was asked for, in frames that ZeroMQ reads where they are."""
    while int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
        num_bytes, frame_bytes = RAW_REQUEST.unpack(socket.recv())
        for at in range(0, num_bytes, frame_bytes):
            socket.send(memory[at : min(at + frame_bytes, num_bytes)].data, copy=False)


def _fill(pool: KVPool) -> None:
    """Put something in every page that is not zero."""
    if pool.device.type == "cuda":
        pool.data.view(-1).view(torch.uint8).random_(1, 256)
        torch.cuda.synchronize(pool.device)
        return
    memory = bytes_of(pool)
    memory[:] = np.random.default_rng(0).integers(0, 256, len(memory), dtype=np.uint8)


def serve(folder: Path, layout: KVLayout, num_pages: int, device_name: str, planes: tuple[str, ...]) -> None:
    """Answer on the sockets of these planes until the process is ended, and on the raw one on a CPU."""
    keep_freed_memory()  # as the nodes do
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    pool = KVPool(layout, num_pages, device)
    _fill(pool)
    context: Context = zmq.Context()
    raw = raw_socket(context)
    raw.bind(address_of(folder, RAW))
    senders = []
    for plane in planes:
        config = TransferConfig(transfer=plane)
        hello, epoch = greeting(Role.PREFILL, plane, pool, config)
        endpoint = SenderEndpoint(context, address_of(folder, plane), pool, config, hello, epoch)
        senders.append(PlaneSender(endpoint, PageSource(num_pages, seed=1)))
    while True:
        for sender in senders:
            sender.turn()
        if device.type == "cpu":
            _send_raw(raw, bytes_of(pool))
        if any(sender.endpoint.has_more for sender in senders):
            continue
        sockets: list[Pollable] = [raw]
        deadlines = []
        for sender in senders:
            sockets += sender.endpoint.pollables()
            if (deadline := sender.endpoint.deadline()) is not None:
                deadlines.append(deadline)
        wait(sockets, max(0.0, min(deadlines) - time.monotonic()) if deadlines else None)
