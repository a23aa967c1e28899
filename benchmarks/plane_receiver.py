"""A decode node's end on a plane, to be measured: has pages moved, and says how long that took."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from benchmarks.plane_peer import Context, PageSource, address_of, greeting, serve
from common.config import TransferConfig
from common.device.streams import Streams
from common.errors import LocalError
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.messages import Commit, PeerInfo, Role, int32s
from common.request import SamplingParams
from common.sockets import wait
from transfer.planes.frames import FRAMES
from transfer.receiver_endpoint import ReceiverEndpoint, TransferDone

_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Peer:
    """The other process, and where its sockets are."""

    process: BaseProcess
    folder: Path


@dataclass(frozen=True, slots=True)
class Moved:
    """Seconds until pages and first token were here."""

    from_grant_s: float
    from_post_s: float  # P gave the pages to its plane


@contextmanager
def peer(layout: KVLayout, num_pages: int, device: str, planes: Sequence[str]) -> Iterator[Peer]:
    """Start the other process: P, with a pool of so many pages on `device`."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bt-") as name:
        arguments = (Path(name), layout, num_pages, device, tuple(planes))
        process = spawn.Process(target=serve, args=arguments, daemon=True)
        process.start()
        try:
            yield Peer(process, Path(name))
        finally:
            process.terminate()
            process.join()


class PlaneReceiver:
    """A decode node's end on one plane. Close it."""

    def __init__(
        self, context: Context, other: Peer, plane: str, pool: KVPool, patience_s: float = _PATIENCE_S
    ) -> None:
        config = TransferConfig(transfer=plane)
        hello, epoch = greeting(Role.DECODE, plane, pool, config)
        self.plane = plane
        self._patience_s = patience_s
        self._process = other.process
        self._pool = pool
        self._pages = PageSource(pool.num_pages, seed=2)
        self._endpoint = ReceiverEndpoint(context, pool, config, hello, epoch, streams=Streams(pool.device))
        info = PeerInfo(f"{Role.PREFILL.value}-{plane}", address_of(other.folder, plane), epoch=1)
        self._endpoint.set_prefill_nodes([info], time.monotonic())

    def connect(self) -> None:
        """Wait for the other end.

        Raises:
            LocalError: it does not come, or the plane does not work between the two.
        """

        def is_connected() -> bool:
            idle = self._endpoint.poll(time.monotonic()) == []
            if self._endpoint.counters()["links_refused"]:
                raise LocalError(f"the link over the plane {self.plane} was refused")
            return idle and bool(self._endpoint.ready_nodes())

        self._until(is_connected)

    def hand_over(self, num_pages: int) -> Moved:
        """Move pages once.

        Raises:
            LocalError: they do not come.
        """
        page_ids = self._pages.take(num_pages)
        prompt = int32s([1] * (num_pages * self._pool.layout.page_size))
        commits: list[Commit] = []

        def is_done() -> bool:
            outputs = self._endpoint.poll(time.monotonic())
            commits.extend(output.commit for output in outputs if isinstance(output, TransferDone))
            return bool(commits)

        granted_s = time.monotonic()
        self._endpoint.grant(self._endpoint.ready_nodes()[0], prompt, SamplingParams(max_tokens=1), page_ids)
        self._until(is_done)
        if self.plane == FRAMES and self._pool.device.type == "cuda":
            torch.cuda.synchronize(self._pool.device)  # D has launched its copies, no more
        done_s = time.monotonic()
        return Moved(done_s - granted_s, done_s - commits[0].stamps.start_s)

    def check(self) -> None:
        """See that no page of the pool is empty; after all of them were moved.

        Raises:
            LocalError: one is.
        """
        for page in range(1, self._pool.num_pages + 1):
            if not self._pool.data[:, page].any():
                raise LocalError(f"nothing came into page {page} over the plane {self.plane}")

    def close(self) -> None:
        """Close the link."""
        self._endpoint.close()

    def _until(self, done: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + self._patience_s
        while not done():
            if time.monotonic() > give_up_s or not self._process.is_alive():
                raise LocalError(f"nothing comes over the plane {self.plane}")
            wait(self._endpoint.pollables(), 0.1)
