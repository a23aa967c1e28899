"""How fast pages get from one process to another: each data plane, from `grant` to pages and first token.

Beside it, in turns: a plain memcpy of as many bytes by one thread, which is what `shm` is held against, and
raw ZeroMQ frames over the same kind of socket, received into memory that is there (`recv_into`), which is
what `frames` is held against. Pages are scattered, and memory moves on from round to round, so that nothing
is measured out of a cache which a server would not find there either.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

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
    address_of,
    bytes_of,
    raw_socket,
)
from benchmarks.plane_receiver import PlaneReceiver, peer
from benchmarks.report import Report
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.supervision.small_machine import keep_freed_memory

_RAW_FRAME_BYTES = (1 << 20, 4 << 20)
# The aims hold where bytes take longer than the messages around them.
_AIM_PAGES = 16
_AIMS = {"frames": 0.5, "shm": 0.25}


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
    with peer(layout, num_pages, "cpu", PLANES) as other:
        context: Context = zmq.Context()
        pool = KVPool(layout, num_pages, torch.device("cpu"), shared=True)
        bytes_of(pool)[:] = 0  # so that the system has given the memory
        receivers = [PlaneReceiver(context, other, plane, pool) for plane in PLANES]
        raw = raw_socket(context)
        raw.connect(address_of(other.folder, RAW))
        try:
            for receiver in receivers:
                receiver.connect()
            yield receivers, PlainCopies(raw, num_pages * layout.page_bytes)
        finally:
            for receiver in receivers:
                receiver.close()
            raw.close()
            context.destroy(linger=0)


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
                    note(receiver.plane, receiver.hand_over(num_pages).from_grant_s)
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
