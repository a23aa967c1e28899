"""How many KV bytes may be under way on one link. Pure; as QUIC's MAX_DATA (RFC 9000, section 4.1).

1. D allows a total, ever: `limit`. P sends while its own total stays within it.
2. D raises the limit when half a window was consumed. Both numbers only grow, so a lost `Credit` heals
   with the next one, or with D's `Status`, which carries the limit too.
3. Each `Chunk`, and P's `Status`, carries P's total. What D did not receive of it was lost, and counts as
   consumed: a lost chunk takes no credit away for good.
"""

from __future__ import annotations

from common.errors import LocalProtocolError, RemoteProtocolError


class SendWindow:
    """P's side, in bytes."""

    def __init__(self) -> None:
        self.total = 0
        self._limit = 0

    def on_limit(self, limit: int) -> None:
        """Take D's limit; an older one changes nothing."""
        self._limit = max(self._limit, limit)

    def can_send(self, num_bytes: int) -> bool:
        """Say whether D has room for so much more."""
        return self.total + num_bytes <= self._limit

    def sent(self, num_bytes: int) -> None:
        """Count bytes that are sent now.

        Raises:
            LocalProtocolError: there is no credit for them.
        """
        if not self.can_send(num_bytes):
            raise LocalProtocolError(f"{num_bytes} bytes sent beyond the credit")
        self.total += num_bytes


class ReceiveWindow:
    """D's side, in bytes. `window` must hold the largest chunk."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._consumed = 0
        self.limit = window

    def on_total(self, total: int) -> int | None:
        """Everything up to P's total was consumed or lost; returns a new limit when it is worth a Credit.

        Raises:
            RemoteProtocolError: P has sent more than it may.
        """
        if total > self.limit:
            raise RemoteProtocolError(f"{total - self.limit} bytes beyond the credit")
        self._consumed = max(self._consumed, total)
        if self._consumed + self._window < self.limit + self._window // 2:
            return None
        self.limit = self._consumed + self._window
        return self.limit
