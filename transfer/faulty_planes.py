"""Data planes with faults in them: a chunk is held, lost, or written wrong. Where faults are asked for.

Pages that travel in messages are spoiled by common/faulty_socket.py; here are those that P writes itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor

from common import faults
from common.config import TransferConfig
from common.device.streams import Event
from common.kv.pages import Pages
from common.kv.pool import KVPool
from common.messages import Hello
from common.peer import Peer
from transfer.planes.base import PlaneSender, Posted
from transfer.sender_planes import OpenPages, SenderPlanes
from transfer.transfer_stream import TransferStream


class FaultyPages:
    """D's pages as P maps them, in which what P writes may come out wrong."""

    def __init__(self, real: Pages, active: faults.Faults) -> None:
        self._real = real
        self._faults = active
        self.num_pages = real.num_pages

    def gather(self, page_ids: Sequence[int]) -> Tensor:
        """See Pages."""
        return self._real.gather(page_ids)

    def scatter(self, page_ids: Sequence[int], data: Tensor) -> None:
        """See Pages."""
        self._real.scatter(page_ids, data)

    def copy_from(self, page_ids: Sequence[int], source: Pages, source_ids: Sequence[int]) -> None:
        """Copy pages, two of them to each other's place or one with a bit flipped, if rules say so."""
        targets = list(page_ids)
        if len(targets) > 1 and self._faults.find("pages", "swap") is not None:
            targets[0], targets[1] = targets[1], targets[0]
        self._real.copy_from(targets, source, source_ids)
        for page in page_ids:
            if self._faults.find("page", "corrupt") is not None:
                data = self._real.gather([page])
                data[3] ^= 0x40  # not the last bit: it would not be seen in the tokens
                self._real.scatter([page], data)


class FaultyPlane:
    """P's end of a plane (see PlaneSender) on which a chunk is held, with all behind it, or goes nowhere."""

    def __init__(self, real: PlaneSender, active: faults.Faults) -> None:
        self._real = real
        self._faults = active
        self._held: deque[tuple[faults.Hold | None, int, Callable[[], None]]] = deque()
        self.can_reach = real.can_reach
        self.on_credit = real.on_credit
        self.total_bytes = real.total_bytes

    @property
    def has_more(self) -> bool:
        """See PlaneSender."""
        return self._real.has_more

    def post(
        self,
        transfer_id: int,
        first_page: int,
        page_ids: Sequence[int],
        target_ids: Sequence[int],
        after: Event,
    ) -> None:
        """Give a chunk to the plane, later, or not at all."""
        rule = self._faults.find("plane", "stall", "cut")
        if rule is not None and rule.action == "cut":
            return
        go = partial(self._real.post, transfer_id, first_page, tuple(page_ids), tuple(target_ids), after)
        hold = None if rule is None else faults.Hold(rule, self._faults)
        if hold is None and not self._held:
            go()
        else:
            self._held.append((hold, transfer_id, go))

    def poll(self) -> tuple[Posted, ...]:
        """See PlaneSender."""
        while self._held and (self._held[0][0] is None or self._held[0][0].is_over()):
            self._held.popleft()[2]()
        return self._real.poll()

    def quiesce(self, transfer_id: int) -> bool:
        """Drop what is held of the transfer, too."""
        self._held = deque(item for item in self._held if item[1] != transfer_id)
        return self._real.quiesce(transfer_id)

    def close(self) -> None:
        """See PlaneSender."""
        self._held.clear()
        self._real.close()


class FaultyPlanes(SenderPlanes):
    """See SenderPlanes."""

    def __init__(
        self, pool: KVPool, config: TransferConfig, stream: TransferStream, openers: Mapping[str, OpenPages]
    ) -> None:
        active = faults.active()
        assert active is not None
        self._faults = active
        opened = {plane: partial(self._open, opener) for plane, opener in openers.items()}
        super().__init__(pool, config, stream, opened)

    def make(self, peer: Peer) -> PlaneSender:
        """Make a plane with faults."""
        return FaultyPlane(super().make(peer), self._faults)

    def _open(self, opener: OpenPages, ours: Hello, theirs: Hello) -> Pages:
        return FaultyPages(opener(ours, theirs), self._faults)


def planes_class() -> type[SenderPlanes]:
    """Choose what makes planes."""
    return SenderPlanes if faults.active() is None else FaultyPlanes
