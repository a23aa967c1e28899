"""P writes straight into D's pool, which it has mapped. What the planes `shm` and `cuda-ipc` have in common.

P launches a copy of a chunk's pages behind the forward that fills them. When it has ended, a `Chunk` without
frames says that they are in. On a CPU that is at once; on a GPU the copy runs by itself, and D's first use of
the pages is a kernel that D launches after it has read the `Chunk`: P has seen the end of the copy by then,
so all of it is in D's memory and nothing older is cached.

P writes until it says `Quiesced`, `Rejected` or `Failed`, or is dead: until then D keeps the pages of a
transfer that it gave up in quarantine (see receiver.py). A copy that was launched cannot be called back, so
P is quiet about a transfer once its last one has ended, link or no link.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from common.codec import MAX_FRAMES, Header
from common.device.streams import DONE, Event
from common.errors import RemoteProtocolError
from common.kv.checksum import page_checksums
from common.kv.pages import Pages
from common.kv.pool import KVPool
from common.messages import Chunk, Status
from transfer.planes.base import Posted, verify_pages
from transfer.transfer_stream import TransferStream

# Written by one launch, by device. On a CPU a launch is the copy itself: it must not hold up an abort.
LAUNCH_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}


@dataclass(frozen=True, slots=True)
class _Write:
    """Pages to be copied behind `after`: from `page_ids` here to `target_ids` there."""

    transfer_id: int
    first_page: int
    page_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    after: Event


@dataclass(frozen=True, slots=True)
class _Launched:
    """A write that is under way until `end`."""

    write: _Write
    end: Event


class OneSidedSender:
    """P's end (see PlaneSender).

    Args:
        pool: where the pages are.
        target: D's pages, mapped here.
        send: puts a message on the link.
        stream: where copies run.
        verify_pages: send a checksum a page.
    """

    def __init__(
        self,
        pool: KVPool,
        target: Pages,
        send: Callable[[Chunk], object],
        stream: TransferStream,
        *,
        verify_pages: bool,
    ) -> None:
        self._pool = pool
        self._target: Pages | None = target
        self._send = send
        self._stream = stream
        self._verify = verify_pages
        launch_pages = LAUNCH_BYTES[pool.device.type] // pool.layout.page_bytes
        self._most = max(1, min(MAX_FRAMES, launch_pages))  # a Chunk has room for MAX_FRAMES checksums
        self._waiting: deque[_Write] = deque()
        self._under_way: deque[_Launched] = deque()
        self._total_bytes = 0

    def can_reach(self, target_ids: Sequence[int]) -> bool:
        """Say whether these pages are in D's pool: writing is up to us."""
        target = self._target
        return target is None or all(1 <= page <= target.num_pages for page in target_ids)

    def post(
        self,
        transfer_id: int,
        first_page: int,
        page_ids: Sequence[int],
        target_ids: Sequence[int],
        after: Event,
    ) -> None:
        """Copy these pages."""
        for at in range(0, len(page_ids), self._most):
            here, there = page_ids[at : at + self._most], target_ids[at : at + self._most]
            self._waiting.append(_Write(transfer_id, first_page + at, tuple(here), tuple(there), after))

    def poll(self) -> tuple[Posted, ...]:
        """Launch what is next, and tell D of what has ended."""
        target = self._target
        if target is not None and self._waiting:
            write = self._waiting.popleft()
            _, end = self._stream.launch(
                lambda: target.copy_from(write.target_ids, self._pool.pages, write.page_ids), write.after
            )
            self._under_way.append(_Launched(write, end))
        posted = []
        while self._under_way and self._under_way[0].end.is_done():
            posted.append(self._report(self._under_way.popleft().write))
        return tuple(posted)

    @property
    def has_more(self) -> bool:
        """There is more to launch."""
        return bool(self._waiting)

    def quiesce(self, transfer_id: int) -> bool:
        """Drop what waits; True once what was launched has ended. D is not told of it any more."""
        self._waiting = deque(item for item in self._waiting if item.transfer_id != transfer_id)
        own = [item for item in self._under_way if item.write.transfer_id == transfer_id]
        if not all(item.end.is_done() for item in own):
            return False
        self._under_way = deque(item for item in self._under_way if item.write.transfer_id != transfer_id)
        return True

    def on_credit(self, limit_bytes: int) -> None:
        """No credit here: the pages were granted."""

    def total_bytes(self) -> int:
        """KV bytes written on this link so far."""
        return self._total_bytes

    def close(self) -> None:
        """Drop what waits, and unmap D's pool behind the writes: a dead D's memory stays taken until then."""
        self._waiting.clear()
        held, self._target = [self._target], None
        last = self._under_way[-1].end if self._under_way else DONE

        device = self._pool.device

        def let_go() -> None:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a new thread is on GPU 0, and would make a context there
            last.synchronize()
            held.clear()

        # On a thread: where D is dead its memory goes with the mapping, which takes seconds.
        threading.Thread(target=let_go, name="unmap").start()

    def _report(self, write: _Write) -> Posted:
        self._total_bytes += len(write.page_ids) * self._pool.layout.page_bytes
        # The pages are still this transfer's, and final: their forward is over.
        sums = page_checksums(self._pool, write.page_ids, write.first_page) if self._verify else ()
        self._send(
            Chunk(
                transfer_id=write.transfer_id,
                first_page=write.first_page,
                num_pages=len(write.page_ids),
                total_bytes=self._total_bytes,
                checksums=tuple(sums),
            )
        )
        return Posted(write.transfer_id, len(write.page_ids))


class OneSidedReceiver:
    """D's end (see PlaneReceiver): the pages are in when their Chunk is."""

    one_sided = True

    def __init__(self, pool: KVPool, *, verify_pages: bool) -> None:
        self._pool = pool
        self._verify = verify_pages

    def place(self, header: Header) -> Sequence[memoryview] | None:
        """There are no frames."""
        return None

    def take(self, chunk: Chunk, page_ids: Sequence[int] | None) -> None:
        """Check what was written."""
        if chunk.frames:
            raise RemoteProtocolError("frames on a plane without frames")
        if page_ids is not None and self._verify:
            verify_pages(self._pool, chunk, page_ids)

    def on_status(self, status: Status) -> None:
        """No credit to heal."""

    def limit_bytes(self) -> int:
        """No credit."""
        return 0

    def close(self) -> None:
        """Nothing is held here."""
