"""The plane that works anywhere: KV bytes as ZMQ frames behind a `Chunk` header, with credits in bytes.

P gathers pages into a fresh buffer, and its pages are free to be reused at once; ZMQ reads the buffer until
it is sent, and pyzmq keeps it alive for so long. D receives into a staging buffer of the right size
(`recv_into`, sizes compared by sockets.py) and scatters it into its pages. A message holds as many pages as
fit 4 MiB, at least one; a page larger than that is cut into several frames.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common.codec import MAX_FRAME_BYTES, MAX_FRAMES, Buffer, Header
from common.errors import RemoteProtocolError
from common.kv.checksum import page_checksums
from common.kv.pool import KVPool
from common.messages import Chunk, Credit, Status
from transfer.credits import ReceiveWindow, SendWindow
from transfer.planes.base import Posted, verify_pages

FRAMES = "frames"


def _cut(data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> tuple[memoryview, ...]:
    view = data.data
    return tuple(view[at : at + MAX_FRAME_BYTES] for at in range(0, len(view), MAX_FRAME_BYTES))


def pages_per_message(page_bytes: int) -> int:
    """Pages in one Chunk at the most."""
    # A Chunk has room for MAX_FRAMES checksums.
    return min(MAX_FRAMES, max(1, MAX_FRAME_BYTES // page_bytes))


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Pages that wait for credit."""

    transfer_id: int
    first_page: int
    page_ids: tuple[int, ...]


class FramesSender:
    """P's end (see PlaneSender).

    Args:
        pool: where the pages are.
        send: puts a message on the link.
        verify_pages: send a checksum a page.
    """

    def __init__(self, pool: KVPool, send: Callable[[Chunk], object], *, verify_pages: bool) -> None:
        self._pool = pool
        self._send = send
        self._verify = verify_pages
        self._window = SendWindow()
        self._waiting: deque[_Waiting] = deque()

    def can_reach(self, target_ids: Sequence[int]) -> bool:
        """D places them: the ids are its own business."""
        return True

    def post(
        self, transfer_id: int, first_page: int, page_ids: Sequence[int], target_ids: Sequence[int]
    ) -> None:
        """Send these pages as credit allows."""
        most = pages_per_message(self._pool.layout.page_bytes)
        for at in range(0, len(page_ids), most):
            self._waiting.append(_Waiting(transfer_id, first_page + at, tuple(page_ids[at : at + most])))

    def poll(self) -> tuple[Posted, ...]:
        """Send what the credit allows; gathered is as good as left."""
        posted = []
        while self._waiting:
            item = self._waiting[0]
            num_bytes = len(item.page_ids) * self._pool.layout.page_bytes
            if not self._window.can_send(num_bytes):
                break
            self._waiting.popleft()
            self._window.sent(num_bytes)
            self._send(self._chunk(item))
            posted.append(Posted(item.transfer_id, len(item.page_ids)))
        return tuple(posted)

    @property
    def has_more(self) -> bool:
        """What waits, waits for credit."""
        return False

    def quiesce(self, transfer_id: int) -> bool:
        """Drop what waits; a gather is over when `poll` returns, so nothing else reads the pages."""
        self._waiting = deque(item for item in self._waiting if item.transfer_id != transfer_id)
        return True

    def on_credit(self, limit_bytes: int) -> None:
        """D allows so many bytes in all."""
        self._window.on_limit(limit_bytes)

    def total_bytes(self) -> int:
        """KV bytes sent on this link so far."""
        return self._window.total

    def close(self) -> None:
        """Drop everything that waits."""
        self._waiting.clear()

    def _chunk(self, item: _Waiting) -> Chunk:
        data = self._pool.gather(item.page_ids)
        sums = page_checksums(self._pool, item.page_ids, item.first_page) if self._verify else ()
        return Chunk(
            transfer_id=item.transfer_id,
            first_page=item.first_page,
            num_pages=len(item.page_ids),
            total_bytes=self._window.total,
            checksums=tuple(sums),
            frames=_cut(data.numpy()),
        )


class FramesReceiver:
    """D's end (see PlaneReceiver).

    Args:
        pool: where the pages go.
        send: puts a message on the link.
        window_bytes: how much may be under way.
        verify_pages: check a checksum a page, and insist on it.
    """

    one_sided = False

    def __init__(
        self,
        pool: KVPool,
        send: Callable[[Credit], object],
        *,
        window_bytes: int,
        verify_pages: bool,
    ) -> None:
        self._pool = pool
        self._send = send
        self._verify = verify_pages
        most = pages_per_message(pool.layout.page_bytes)
        self._most_bytes = most * pool.layout.page_bytes
        self._window = ReceiveWindow(max(window_bytes, 2 * self._most_bytes))
        self._send(Credit(self._window.limit))

    def place(self, header: Header) -> Sequence[memoryview] | None:
        """Give a fresh staging buffer of the size that the header announces."""
        num_bytes = header.values.get("num_pages", 0) * self._pool.layout.page_bytes
        if header.kind != Chunk.__name__ or num_bytes > self._most_bytes:
            return None
        return _cut(np.empty(num_bytes, dtype=np.uint8))

    def take(self, chunk: Chunk, page_ids: Sequence[int] | None) -> None:
        """Scatter a chunk into these pages, and check what arrived there."""
        if (limit := self._window.on_total(chunk.total_bytes)) is not None:
            self._send(Credit(limit))
        if page_ids is None:
            return
        data = _join(chunk.frames)
        if data.nbytes != chunk.num_pages * self._pool.layout.page_bytes:
            raise RemoteProtocolError(f"{data.nbytes} bytes for {chunk.num_pages} pages")
        self._pool.scatter(page_ids, torch.from_numpy(data))
        if self._verify:
            verify_pages(self._pool, chunk, page_ids)

    def on_status(self, status: Status) -> None:
        """What P has sent and did not arrive was lost: its credit comes back."""
        if (limit := self._window.on_total(status.total_bytes)) is not None:
            self._send(Credit(limit))

    def limit_bytes(self) -> int:
        """What P may send in all."""
        return self._window.limit

    def close(self) -> None:
        """Nothing is held here."""


def _join(frames: Sequence[Buffer]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """One array over a chunk's frames: the staging buffer itself where they were received into one."""
    if len(frames) == 1:
        # Frames of other memory (a test, a bytes object) may be read-only: scatter only reads.
        return np.frombuffer(frames[0], dtype=np.uint8)
    first = frames[0] if frames else b""
    staging: Any = first.obj if isinstance(first, memoryview) else None
    if isinstance(staging, np.ndarray) and staging.nbytes == sum(memoryview(f).nbytes for f in frames):
        return staging
    return np.frombuffer(b"".join(frames), dtype=np.uint8)
