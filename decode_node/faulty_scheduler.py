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
        self._holds: dict[RequestKey, faults.Hold | None] = {}  # of those that arrived

    def take_prebuilt(self) -> Prebuilt | None:
        """Batch what arrived, or nothing while one of them is held."""
        prebuilt = super().take_prebuilt()
        if prebuilt is None:
            return None
        known, self._holds = self._holds, {}
        for key in (entry.key for entry in prebuilt.entries):
            self._holds[key] = known[key] if key in known else self._faults.hold("merge", "barrier")
        if any(hold is not None and not hold.is_over() for hold in self._holds.values()):
            return None
        return prebuilt


def scheduler_class() -> type[DecodeScheduler]:
    """Choose what schedules requests."""
    return DecodeScheduler if faults.active() is None else FaultyDecodeScheduler
