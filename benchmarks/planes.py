"""How fast pages get from one process to another: each data plane, from `grant` to pages and first token.

Beside it, in turns: a plain memcpy of as many bytes by one thread, which is what `shm` is held against, and
raw ZeroMQ frames over the same kind of socket, received into memory that is there (`recv_into`), which is
what `frames` is held against. Pages are scattered, and memory moves on from round to round, so that nothing
is measured out of a cache which a server would not find there either.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch
import zmq

from benchmarks.plane_peer import (
    PLANES,
    RAW,
    RAW_REQUEST,
    Bytes,
    Context,
    PageSource,
    address_of,
    bytes_of,
    greeting,
    raw_socket,
    serve,
)
from benchmarks.report import Report
from common.config import TransferConfig
from common.errors import LocalError
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.messages import PeerInfo, Role, SharedPool, int32s
from common.request import SamplingParams
from common.small_machine import keep_freed_memory
from common.sockets import wait
from transfer.receiver_endpoint import ReceiverEndpoint, TransferDone

_RAW_FRAME_BYTES = (1 << 20, 4 << 20)
_PATIENCE_S = 60.0
# The aims hold where bytes take longer than the messages around them.
_AIM_PAGES = 16
_AIMS = {"frames": 0.5, "shm": 0.25}


@dataclass(frozen=True, slots=True)
class PlaneReceiver:
    """A decode node's end on one plane."""

    plane: str
    endpoint: ReceiverEndpoint
    pages: PageSource
    page_size: int

    def until(self, done: Callable[[], bool]) -> None:
        """Poll until it is so; whoever waits too long has lost the other process."""
        give_up_s = time.monotonic() + _PATIENCE_S
        while not done():
            if time.monotonic() > give_up_s:
                raise LocalError(f"nothing comes over the plane {self.plane}")
            wait(self.endpoint.pollables(), 0.1)

    def connect(self) -> None:
        """Wait for the other end."""
        self.until(lambda: self.endpoint.poll(time.monotonic()) == [] and bool(self.endpoint.ready_nodes()))

    def hand_over(self, num_pages: int) -> float:
        """Move pages once; returns the seconds from granting them to having them."""
        page_ids = self.pages.take(num_pages)
        prompt = int32s([1] * (num_pages * self.page_size))
        started_s = time.perf_counter()
        self.endpoint.grant(self.endpoint.ready_nodes()[0], prompt, SamplingParams(max_tokens=1), page_ids)
        self.until(lambda: any(isinstance(o, TransferDone) for o in self.endpoint.poll(time.monotonic())))
        return time.perf_counter() - started_s


class PlainCopies:
    """What the machine does with as many bytes: memcpy here, raw frames from the other process."""

    def __init__(self, raw: zmq.Socket[bytes], num_bytes: int) -> None:
        self._raw = raw
        self._source: Bytes = np.ones(num_bytes, np.uint8)
        self._target: Bytes = np.ones(num_bytes, np.uint8)  # zeros would not be touched
        self._at = 0

    def memcpy(self, num_bytes: int) -> float:
        """Return the seconds of one copy."""
        target, source = self._window(self._target, num_bytes), self._window(self._source, num_bytes)
        started_s = time.perf_counter()
        np.copyto(target, source)
        elapsed_s = time.perf_counter() - started_s
        self._at += num_bytes
        return elapsed_s

    def receive(self, num_bytes: int, frame_bytes: int) -> float:
        """Return the seconds from asking for raw frames to having them."""
        view = self._window(self._target, num_bytes).data
        started_s = time.perf_counter()
        self._raw.send(RAW_REQUEST.pack(num_bytes, frame_bytes))
        at = 0
        while at < num_bytes:
            at += self._raw.recv_into(view[at : at + frame_bytes])
        elapsed_s = time.perf_counter() - started_s
        self._at += num_bytes
        return elapsed_s

    def _window(self, memory: Bytes, num_bytes: int) -> Bytes:
        start = self._at % (len(memory) - num_bytes + 1)
        return memory[start : start + num_bytes]


@contextmanager
def peers(layout: KVLayout, num_pages: int) -> Iterator[tuple[list[PlaneReceiver], PlainCopies]]:
    """Start the other process and connect everything to it."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bt-") as name:
        folder = Path(name)
        process = spawn.Process(target=serve, args=(folder, layout, num_pages), daemon=True)
        process.start()
        context: Context = zmq.Context()
        pool = KVPool(layout, num_pages, torch.device("cpu"), shared=True)
        bytes_of(pool)[:] = 0  # so that the system has given the memory
        receivers = [_receiver(context, folder, plane, pool) for plane in PLANES]
        raw = raw_socket(context)
        raw.connect(address_of(folder, RAW))
        try:
            for receiver in receivers:
                receiver.connect()
            yield receivers, PlainCopies(raw, num_pages * layout.page_bytes)
        finally:
            for receiver in receivers:
                receiver.endpoint.close()
            raw.close()
            context.destroy(linger=0)
            process.terminate()
            process.join()


def _receiver(context: Context, folder: Path, plane: str, pool: KVPool) -> PlaneReceiver:
    config = TransferConfig(transfer=plane)
    assert pool.fd is not None
    shared = SharedPool(pool.fd, pool.num_pages)
    hello, epoch = greeting(Role.DECODE, plane, pool.layout, config, shared)
    endpoint = ReceiverEndpoint(context, pool, config, hello, epoch)
    info = PeerInfo(f"{Role.PREFILL.value}-{plane}", address_of(folder, plane), epoch=1)
    endpoint.set_prefill_nodes([info], time.monotonic())
    return PlaneReceiver(plane, endpoint, PageSource(pool.num_pages, seed=2), pool.layout.page_size)


@click.command()
@click.option("--pages", default="1,16,128,512", show_default=True, help="Pages of a hand-over.")
@click.option("--layers", default=30, show_default=True, help="Of SmolLM2-135M's shape in bfloat16.")
@click.option("--rounds", default=15, show_default=True, help="Rounds of each; the best counts.")
@click.option("--save", is_flag=True, help="Keep the result in benchmarks/results.")
def main(pages: str, layers: int, rounds: int, *, save: bool) -> None:
    """Time the planes, memcpy and raw frames in turns, between two processes."""
    keep_freed_memory()  # as the nodes do
    report = Report.of_command("planes")
    layout = KVLayout(layers, page_size=16, kv_heads=3, head_dim=64, dtype="bfloat16")
    sizes = [int(size) for size in pages.split(",")]
    with peers(layout, num_pages=max(sizes) * 5 // 4) as (receivers, copies):
        for receiver in receivers * 2:  # every page once: the first use of a page maps it
            receiver.hand_over(max(sizes))
        for num_pages in sizes:
            num_bytes = num_pages * layout.page_bytes
            best: dict[str, float] = {}

            def note(name: str, seconds: float, best: dict[str, float] = best) -> None:
                best[name] = min(seconds, best.get(name, seconds))

            for _ in range(rounds):
                for receiver in receivers:
                    note(receiver.plane, receiver.hand_over(num_pages))
                note("memcpy", copies.memcpy(num_bytes))
                for frame_bytes in _RAW_FRAME_BYTES:
                    note("raw", copies.receive(num_bytes, frame_bytes))
            _add_figures(report, num_pages, num_bytes, best)
    report.publish(save=save)


def _add_figures(report: Report, num_pages: int, num_bytes: int, best: dict[str, float]) -> None:
    limits = {"frames": ("raw", "raw ZeroMQ, ipc"), "shm": ("memcpy", "memcpy")}
    for plane, (other, limit_name) in limits.items():
        what = f"{plane}, {num_pages} pages"
        rate, limit = num_bytes / best[plane] / 1e9, num_bytes / best[other] / 1e9
        report.add(what, rate, "GB/s", limit=limit, limit_name=limit_name)
        aim = _AIMS[plane] if num_pages >= _AIM_PAGES else None
        report.add(f"{what} / {other}", rate / limit, "x", at_least=aim)
        report.add(f"{what}, time", best[plane] * 1000, "ms", limit=best[other] * 1000, limit_name=limit_name)


if __name__ == "__main__":
    main()
