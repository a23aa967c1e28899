"""A decode node's scheduler that holds who arrived before they merge: where faults are asked for."""

from __future__ import annotations

from common import faults
from decode_node.entry import Prebuilt, RequestKey
from decode_node.scheduler import DecodeScheduler


class FaultyDecodeScheduler(DecodeScheduler):
    """See above; the first token has gone out by then."""

    def __post_init__(self) -> None:
        """Make what the rules need, too."""
        super().__post_init__()
        active = faults.active()
        assert active is not None
        self._faults = active
        self._merges: set[RequestKey] = set()  # met the barrier
        self._merge_hold: faults.Hold | None = None

    def take_prebuilt(self) -> Prebuilt | None:
        """Batch what arrived, or nothing while one of them is held."""
        prebuilt = super().take_prebuilt()
        if prebuilt is None:
            return None
        for entry in prebuilt.entries:
            if entry.key not in self._merges:
                self._merges.add(entry.key)
                self._merge_hold = self._faults.hold("merge", "barrier") or self._merge_hold
        if self._merge_hold is not None and not self._merge_hold.is_over():
            return None
        self._merges.difference_update(entry.key for entry in prebuilt.entries)
        return prebuilt


def scheduler_class() -> type[DecodeScheduler]:
    """Choose what schedules requests."""
    return DecodeScheduler if faults.active() is None else FaultyDecodeScheduler
