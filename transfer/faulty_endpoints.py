"""The two ends of all transfers with barriers in them: where faults are asked for.

At P a transfer is held before its last pages go (`after-prefill`), or when all went and only its Commit is
to be said (`before-commit`). At D it is held when all has arrived and nobody knows (`arrived`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from common import faults
from common.device.streams import DONE, Event
from transfer import sender as tx
from transfer.receiver_endpoint import ReceiverEndpoint, ReceiverOutput, TransferDone, TransferReleased
from transfer.sender_endpoint import SenderEndpoint, SenderOutput, TransferKey


def _active() -> faults.Faults:
    active = faults.active()
    assert active is not None
    return active


class FaultySenderEndpoint(SenderEndpoint):
    """See above, and SenderEndpoint."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._faults = _active()
        self._held: dict[TransferKey, tuple[faults.Hold, list[Callable[[], None]]]] = {}
        super().__init__(*args, **kwargs)

    def chunk(
        self,
        key: TransferKey,
        first_page: int,
        page_ids: Sequence[int],
        *,
        is_last: bool,
        after: Event = DONE,
    ) -> None:
        """Take a chunk, hold the last one, or fail."""
        if self._faults.find("plane", "fail") is not None:
            self._feed(key, tx.Fail(503, "a fault point failed the plane"))
            return
        go = partial(super().chunk, key, first_page, tuple(page_ids), is_last=is_last, after=after)
        self._do("after-prefill" if is_last else None, key, go)

    def first_token(self, key: TransferKey, token: tx.FirstToken) -> None:
        """Take the first tokens, behind what is held."""
        self._do("before-commit", key, partial(super().first_token, key, token))

    def poll(self, now: float) -> list[SenderOutput]:
        """Go on with what is held no longer."""
        for key, (hold, calls) in list(self._held.items()):
            if hold.is_over():
                del self._held[key]
                for call in calls:
                    call()
        return super().poll(now)

    def _do(self, point: str | None, key: TransferKey, call: Callable[[], None]) -> None:
        """Do something about a transfer, or hold it with all that comes behind it."""
        if key not in self._held:
            hold = None if point is None else self._faults.hold(point, "barrier")
            if hold is None:
                call()
                return
            self._held[key] = hold, []
        self._held[key][1].append(call)


class FaultyReceiverEndpoint(ReceiverEndpoint):
    """See above, and ReceiverEndpoint."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._faults = _active()
        self._held: dict[int, tuple[faults.Hold, TransferDone]] = {}
        self._given_up: list[ReceiverOutput] = []
        super().__init__(*args, **kwargs)

    def abort(self, transfer_id: int, now: float) -> None:
        """Give a transfer up, also one that is held: its pages are D's at once."""
        if self._held.pop(transfer_id, None) is not None:
            self._given_up.append(TransferReleased(transfer_id))
        super().abort(transfer_id, now)

    def poll(self, now: float) -> list[ReceiverOutput]:
        """Report what is held no longer, and what is not held."""
        outputs, self._given_up = self._given_up, []
        for transfer_id, (hold, done) in list(self._held.items()):
            if hold.is_over():
                del self._held[transfer_id]
                outputs.append(done)
        for output in super().poll(now):
            hold_ = self._faults.hold("arrived", "barrier") if isinstance(output, TransferDone) else None
            if isinstance(output, TransferDone) and hold_ is not None:
                self._held[output.transfer_id] = hold_, output
            else:
                outputs.append(output)
        return outputs


def sender_class() -> type[SenderEndpoint]:
    """Choose P's end."""
    return SenderEndpoint if faults.active() is None else FaultySenderEndpoint


def receiver_class() -> type[ReceiverEndpoint]:
    """Choose D's end."""
    return ReceiverEndpoint if faults.active() is None else FaultyReceiverEndpoint
