"""What every data plane does, on both ends. A plane moves pages; it decides nothing about transfers.

P's end is given pages in order (`post`), says which have left (`poll`), and can be told to drop what has
not (`quiesce`). D's end takes what arrives (`place`, `take`). Chosen at Hello, one pair a link. Nothing here
waits, except to verify pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.codec import Header
from common.device.streams import Event
from common.errors import RemoteProtocolError
from common.kv.checksum import page_checksums
from common.kv.pool import KVPool
from common.messages import Chunk, Status


class PlaneUnavailable(Exception):
    """A plane does not work between two nodes; the text says why."""


@dataclass(frozen=True, slots=True)
class Posted:
    """Pages that have left P for good: their memory may be written again."""

    transfer_id: int
    num_pages: int


class PlaneSender(Protocol):
    """P's end, for one decode node."""

    def can_reach(self, target_ids: Sequence[int]) -> bool:
        """Say whether D has pages of these ids, as far as this end has to know."""

    def post(
        self,
        transfer_id: int,
        first_page: int,
        page_ids: Sequence[int],
        target_ids: Sequence[int],
        after: Event,
    ) -> None:
        """Send these pages into D's `target_ids`, behind `after` and all that was posted before.

        `first_page` is the logical index of the first.
        """

    def poll(self) -> tuple[Posted, ...]:
        """Start what can start; return what has left since the last call.

        What is under way ends by itself, which wakes the loop through the node's TransferStream.
        """

    @property
    def has_more(self) -> bool:
        """`poll` has something to start at once."""

    def quiesce(self, transfer_id: int) -> bool:
        """Drop what has not left; True once nothing reads or writes the transfer's pages any more.

        To be asked again until it is, after `close`, too.
        """

    def on_credit(self, limit_bytes: int) -> None:
        """D allows so many bytes in all."""

    def total_bytes(self) -> int:
        """KV bytes sent on this link so far."""

    def close(self) -> None:
        """The link is gone: drop what waits, and let go of D's memory when what is under way has ended."""


class PlaneReceiver(Protocol):
    """D's end, for one prefill node.

    `one_sided`: P writes into D's pages by itself, so they are D's again only once P is known to be quiet.
    """

    one_sided: bool

    def place(self, header: Header) -> Sequence[memoryview] | None:
        """Give buffers for a chunk's frames, or None to have them in fresh memory."""

    def take(self, chunk: Chunk, page_ids: Sequence[int] | None) -> None:
        """Put a chunk into these pages, or nowhere; its credit comes back either way.

        Raises:
            RemoteProtocolError: wrong size, wrong checksum, or more than the credit.
        """

    def on_status(self, status: Status) -> None:
        """P's Status says how much it has sent."""

    def limit_bytes(self) -> int:
        """What P may send in all."""

    def close(self) -> None:
        """The link is gone."""


def verify_pages(pool: KVPool, chunk: Chunk, page_ids: Sequence[int]) -> None:
    """Check what arrived in D's pages against the checksums that came with it.

    Raises:
        RemoteProtocolError: a page is not the one that was sent.
    """
    if chunk.checksums != tuple(page_checksums(pool, page_ids, chunk.first_page)):
        raise RemoteProtocolError(f"checksum of pages from {chunk.first_page} on is wrong")
