"""The plane for two processes on one host without GPUs: P writes straight into D's pool.

D's pool is a memfd. D names the descriptor in its Hello, P opens it as /proc/PID/fd/N: the memory has no
name, so a kill leaves nothing behind. A page moves in one copy. Afterwards a `Chunk` without frames says
which pages are in.

P writes until it says `Quiesced`, `Rejected` or `Failed`, or is dead: until then D keeps the pages of a
transfer that it gave up in quarantine (see receiver.py). A copy here is over when `poll` returns, so P is
quiet as soon as nothing waits.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.codec import MAX_FRAMES, Header
from common.errors import ConfigError, RemoteProtocolError
from common.host import open_pidfd, same_host
from common.kv.checksum import page_checksums
from common.kv.pool import KVPool
from common.messages import Chunk, Hello, Status
from transfer.planes.base import Posted, verify_pages

SHM = "shm"

# Pages written before the node's loop gets its turn again: a large chunk must not hold up an abort.
MAX_BYTES_PER_POLL = 64 << 20


class ShmUnavailable(Exception):
    """Another process's pool cannot be mapped here; the text says why."""


def open_pool(local: Hello, peer: Hello) -> KVPool:
    """Map the pool that a decode node on this host offers in its Hello.

    The pid and start time of the Hello must be those of a living process *after* the descriptor was
    opened, or it could be another process's; the size must be what the layout says, and sealed: memory
    that shrinks would kill whoever writes there.

    Raises:
        ShmUnavailable: it is not there, or not what the Hello says.
    """
    if peer.shm is None or peer.layout is None:
        raise ShmUnavailable("it offers no shared pool")
    if not same_host(local.host, peer.host):
        raise ShmUnavailable("it is on another host")
    try:
        fd = os.open(f"/proc/{peer.host.pid}/fd/{peer.shm.fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ShmUnavailable(f"its memory cannot be opened: {error.strerror}") from None
    try:
        pidfd = open_pidfd(local.host, peer.host)
        if pidfd is None:
            raise ShmUnavailable("its process is gone")
        os.close(pidfd)
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ShmUnavailable("its memory is not sealed")
        return KVPool.map(peer.layout, peer.shm.num_pages, fd)
    except (ConfigError, OSError) as error:
        raise ShmUnavailable(str(error)) from None
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Pages that are to be copied: from `page_ids` here to `target_ids` there."""

    transfer_id: int
    first_page: int
    page_ids: tuple[int, ...]
    target_ids: tuple[int, ...]


class ShmSender:
    """P's end (see PlaneSender); `target` is D's pool, mapped here."""

    def __init__(
        self, pool: KVPool, target: KVPool, send: Callable[[Chunk], object], *, verify_pages: bool
    ) -> None:
        self._pool = pool
        self._target: KVPool | None = target
        self._send = send
        self._verify = verify_pages
        self._most = max(1, min(MAX_FRAMES, MAX_BYTES_PER_POLL // pool.layout.page_bytes))
        self._waiting: deque[_Waiting] = deque()
        self._total_bytes = 0

    def can_reach(self, target_ids: Sequence[int]) -> bool:
        """Say whether these pages are in D's pool: writing is up to us."""
        target = self._target
        return target is None or all(1 <= page <= target.num_pages for page in target_ids)

    def post(
        self, transfer_id: int, first_page: int, page_ids: Sequence[int], target_ids: Sequence[int]
    ) -> None:
        """Copy these pages."""
        for at in range(0, len(page_ids), self._most):
            part = slice(at, at + self._most)
            self._waiting.append(
                _Waiting(transfer_id, first_page + at, tuple(page_ids[part]), tuple(target_ids[part]))
            )

    def poll(self) -> tuple[Posted, ...]:
        """Copy what is next, and tell D."""
        if not self._waiting or self._target is None:
            return ()
        item = self._waiting.popleft()
        self._target.copy_pages(item.target_ids, self._pool, item.page_ids)
        self._total_bytes += len(item.page_ids) * self._pool.layout.page_bytes
        sums = page_checksums(self._pool, item.page_ids, item.first_page) if self._verify else ()
        self._send(
            Chunk(
                transfer_id=item.transfer_id,
                first_page=item.first_page,
                num_pages=len(item.page_ids),
                total_bytes=self._total_bytes,
                checksums=tuple(sums),
            )
        )
        return (Posted(item.transfer_id, len(item.page_ids)),)

    @property
    def has_more(self) -> bool:
        """`poll` has something to do at once."""
        return bool(self._waiting)

    def quiesce(self, transfer_id: int) -> bool:
        """Drop what waits; a copy is over when `poll` returns."""
        self._waiting = deque(item for item in self._waiting if item.transfer_id != transfer_id)
        return True

    def on_credit(self, limit_bytes: int) -> None:
        """No credit here: the pages were granted."""

    def total_bytes(self) -> int:
        """KV bytes written on this link so far."""
        return self._total_bytes

    def close(self) -> None:
        """Unmap D's pool: a dead D's memory stays taken until then."""
        self._waiting.clear()
        held, self._target = [self._target], None
        # On a thread: where D is dead its memory goes with the mapping, which takes 0.3 s a GiB.
        threading.Thread(target=held.clear, name="unmap").start()


class ShmReceiver:
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
            raise RemoteProtocolError("frames on the plane shm")
        if page_ids is not None and self._verify:
            verify_pages(self._pool, chunk, page_ids)

    def on_status(self, status: Status) -> None:
        """No credit to heal."""

    def limit_bytes(self) -> int:
        """No credit."""
        return 0

    def close(self) -> None:
        """Nothing is held here."""
