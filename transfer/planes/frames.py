"""The plane that works anywhere: KV bytes as ZMQ frames behind a `Chunk` header, with credits in bytes.

P gathers pages into a fresh buffer, and its pages are free to be reused once that is done; ZMQ reads the
buffer until it is sent, and pyzmq keeps it alive for so long. D receives into a staging buffer of the right
size (`recv_into`, sizes compared by sockets.py) and scatters it into its pages. A message holds as many pages
as fit 4 MiB, at least one; a page larger than that is cut into several frames.

On a GPU the buffers are fresh pinned memory. torch gives a block of it out again only when nobody refers to
it and the copies that it knows of are done: it is the ring, with an event a slot. P's copies run on the
transfer stream. D copies to its GPU on the transfer stream, and scatters on the forward stream: so all that
D's GPU does to a page, for its old owner and for its new one, is in order, and D need not wait for any of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.codec import MAX_FRAME_BYTES, MAX_FRAMES, Buffer, Header
from common.device.pinned import is_pin_memory_available, to_host
from common.device.streams import Event, Stream, Streams
from common.errors import RemoteProtocolError
from common.kv.checksum import page_checksums
from common.kv.pool import KVPool
from common.messages import Chunk, Credit, Status
from transfer.credits import ReceiveWindow, SendWindow
from transfer.planes.base import Posted, verify_pages
from transfer.transfer_stream import TransferStream

FRAMES = "frames"
MAX_GATHERS = 8  # messages of a link whose pages are on their way to the host


def _cut(data: Tensor) -> tuple[memoryview, ...]:
    """Cut host memory into frames; each of them keeps all of it alive."""
    view = data.numpy().data
    return tuple(view[at : at + MAX_FRAME_BYTES] for at in range(0, len(view), MAX_FRAME_BYTES))


def pages_per_message(page_bytes: int) -> int:
    """Pages in one Chunk at the most."""
    # A Chunk has room for MAX_FRAMES checksums.
    return min(MAX_FRAMES, max(1, MAX_FRAME_BYTES // page_bytes))


@dataclass(frozen=True, slots=True)
class _Message:
    """Pages of a message that waits for credit and for `after`."""

    transfer_id: int
    first_page: int
    page_ids: tuple[int, ...]
    num_bytes: int
    after: Event


@dataclass(frozen=True, slots=True)
class _Gathered:
    """A message whose bytes are in `data`, on the host, once `end` has happened."""

    message: _Message
    data: Tensor
    end: Event


class FramesSender:
    """P's end (see PlaneSender).

    Args:
        pool: where the pages are.
        send: puts a message on the link.
        stream: where copies run.
        verify_pages: send a checksum a page.
    """

    def __init__(
        self, pool: KVPool, send: Callable[[Chunk], object], stream: TransferStream, *, verify_pages: bool
    ) -> None:
        self._pool = pool
        self._send = send
        self._stream = stream
        self._verify = verify_pages
        self._window = SendWindow()
        self._waiting: deque[_Message] = deque()
        self._under_way: deque[_Gathered] = deque()

    def can_reach(self, target_ids: Sequence[int]) -> bool:
        """D places them: the ids are its own business."""
        return True

    def post(
        self,
        transfer_id: int,
        first_page: int,
        page_ids: Sequence[int],
        target_ids: Sequence[int],
        after: Event,
    ) -> None:
        """Send these pages as credit allows."""
        page_bytes = self._pool.layout.page_bytes
        most = pages_per_message(page_bytes)
        for at in range(0, len(page_ids), most):
            part = tuple(page_ids[at : at + most])
            self._waiting.append(_Message(transfer_id, first_page + at, part, len(part) * page_bytes, after))

    def poll(self) -> tuple[Posted, ...]:
        """Gather what the credit allows, send what is on the host; gathered is as good as left."""
        posted = []
        while True:
            gathered = self._gather_next()
            if self._under_way and self._under_way[0].end.is_done():
                posted.append(self._send_chunk(self._under_way.popleft()))
            elif not gathered:
                return tuple(posted)

    @property
    def has_more(self) -> bool:
        """What waits, waits for credit or for a gather."""
        return False

    def quiesce(self, transfer_id: int) -> bool:
        """Drop what waits and, once nothing reads the pages any more, what was gathered."""
        self._waiting = deque(item for item in self._waiting if item.transfer_id != transfer_id)
        own = [item for item in self._under_way if item.message.transfer_id == transfer_id]
        if not all(item.end.is_done() for item in own):
            return False
        self._under_way = deque(item for item in self._under_way if item.message.transfer_id != transfer_id)
        return True

    def on_credit(self, limit_bytes: int) -> None:
        """D allows so many bytes in all."""
        self._window.on_limit(limit_bytes)

    def total_bytes(self) -> int:
        """KV bytes sent on this link so far."""
        return self._window.total

    def close(self) -> None:
        """Drop what waits; what is being gathered goes nowhere."""
        self._waiting.clear()

    def _gather_next(self) -> bool:
        """Start the next gather if it may start."""
        if not self._waiting or len(self._under_way) == MAX_GATHERS:
            return False
        message = self._waiting[0]
        pending_bytes = sum(item.message.num_bytes for item in self._under_way)
        if not self._window.can_send(pending_bytes + message.num_bytes):
            return False
        self._waiting.popleft()
        data, end = self._stream.launch(lambda: self._to_host(message.page_ids), message.after)
        self._under_way.append(_Gathered(message, data, end))
        return True

    def _to_host(self, page_ids: Sequence[int]) -> Tensor:
        data = self._pool.gather(page_ids)
        return data if data.is_cpu else to_host(data)

    def _send_chunk(self, gathered: _Gathered) -> Posted:
        message = gathered.message
        self._window.sent(message.num_bytes)
        # The pages are still this transfer's, and final: their forward is over.
        sums = page_checksums(self._pool, message.page_ids, message.first_page) if self._verify else ()
        self._send(
            Chunk(
                transfer_id=message.transfer_id,
                first_page=message.first_page,
                num_pages=len(message.page_ids),
                total_bytes=self._window.total,
                checksums=tuple(sums),
                frames=_cut(gathered.data),
            )
        )
        return Posted(message.transfer_id, len(message.page_ids))


class FramesReceiver:
    """D's end (see PlaneReceiver).

    Args:
        pool: where the pages go.
        send: puts a message on the link.
        streams: of the node; the forward stream does all else to the pages.
        window_bytes: how much may be under way.
        verify_pages: check a checksum a page, and insist on it.
    """

    one_sided = False

    def __init__(
        self,
        pool: KVPool,
        send: Callable[[Credit], object],
        streams: Streams,
        *,
        window_bytes: int,
        verify_pages: bool,
    ) -> None:
        self._pool = pool
        self._send = send
        self._streams = streams
        self._pin = is_pin_memory_available(pool.device)
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
        return _cut(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pin))

    def take(self, chunk: Chunk, page_ids: Sequence[int] | None) -> None:
        """Scatter a chunk into these pages, and check what arrived there."""
        if (limit := self._window.on_total(chunk.total_bytes)) is not None:
            self._send(Credit(limit))
        if page_ids is None:
            return
        data = _join(chunk.frames)
        if data.nbytes != chunk.num_pages * self._pool.layout.page_bytes:
            raise RemoteProtocolError(f"{data.nbytes} bytes for {chunk.num_pages} pages")
        with self._streams.transfer():
            staged = data.to(self._pool.device, non_blocking=True)
        self._streams.wait(Stream.FORWARD, self._streams.record(Stream.TRANSFER))
        with self._streams.forward():
            self._pool.scatter(page_ids, staged)
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


def _join(frames: Sequence[Buffer]) -> Tensor:
    """One tensor over a chunk's frames: the staging buffer itself where they were received into one."""
    first = frames[0] if frames else b""
    staging: Any = first.obj if isinstance(first, memoryview) else None
    if isinstance(staging, np.ndarray) and staging.nbytes == sum(memoryview(f).nbytes for f in frames):
        # Its base is the tensor that was allocated, by which torch knows that the memory is pinned.
        return staging.base if isinstance(staging.base, Tensor) else torch.from_numpy(staging)
    # Frames of other memory (a test, a bytes object) may be read-only.
    return torch.from_numpy(np.frombuffer(bytearray().join(frames), dtype=np.uint8))
