"""Find what a link lost: an id that should be open at the peer, and is not.

Each side opens ids (a request, a transfer) with a message, and each side's `Status` lists the ids that are
open there, with the last sequence number it has seen. An id whose opening message lies at or before that
number, and that is absent from two Statuses in a row, is over at the peer: its last news was lost.
Two, because the Status and the news of the end may be under way at once.

Pure: no clock, no socket. The link delivers in order, so for an id that the *peer* opened, any Status that
arrives later already counts (`opened_seq=0`).
"""

from __future__ import annotations

from collections.abc import Collection

STATUSES_UNTIL_LOST = 2


class Reconciler:
    """The open ids of one link, each with how many Statuses in a row left it out."""

    def __init__(self) -> None:
        self._opened_seq: dict[int, int] = {}
        self._absent: dict[int, int] = {}

    def opened(self, open_id: int, opened_seq: int = 0) -> None:
        """An id is open from now on; `opened_seq` is the sequence number of our message that opened it."""
        self._opened_seq[open_id] = opened_seq
        self._absent[open_id] = 0

    def closed(self, open_id: int) -> None:
        """An id ended; closing it twice is fine."""
        self._opened_seq.pop(open_id, None)
        self._absent.pop(open_id, None)

    def open_ids(self) -> tuple[int, ...]:
        """The ids that are open on our side, for our own Status."""
        return tuple(self._opened_seq)

    def on_status(self, last_seq_seen: int, peers_open_ids: Collection[int]) -> tuple[int, ...]:
        """Take the peer's Status; return the ids that are over there. They stay open until `closed`."""
        peers = frozenset(peers_open_ids)
        lost = []
        for open_id, opened_seq in self._opened_seq.items():
            if open_id in peers or opened_seq > last_seq_seen:
                self._absent[open_id] = 0
                continue
            self._absent[open_id] += 1
            if self._absent[open_id] >= STATUSES_UNTIL_LOST:
                lost.append(open_id)
        return tuple(lost)
