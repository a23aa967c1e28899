"""A request's time, as stages that follow each other: from stamps of all processes, all on this one's clock.

    stage     from           to
    tokenize  received       submitted
    submit    submitted      queued
    queue     queued         prefill_start
    prefill   prefill_start  the last chunk
    transfer  the last chunk arrived
    send      arrived        first_token      these six add up to the time to the first token
    decode    first_token    done

What nodes say comes from other clocks, maybe of other hosts, so each stamp is put behind the one before it
and before the first token, which is this process's own. Times are whole microseconds from then on: sums are
exact.
Pure; knows no request, no HTTP, and none of the two sides that it has the stamps from.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from gateway.nodes import NodeStamps

FIRST_TOKEN_STAGES = ("tokenize", "submit", "queue", "prefill", "transfer", "send")
STAGES = (*FIRST_TOKEN_STAGES, "decode")
_STAMPS = ("received", "tokenized", "submitted", "queued", "granted", "prefill_start", "chunks", "committed")
STAMPS = (*_STAMPS, "arrived", "prebuilt", "first_token", "second_token", "done")
_NOWHERE = NodeStamps("")


@dataclass(frozen=True, slots=True)
class GatewayStamps:
    """When the gateway did what for a request, in seconds of time.monotonic(); None: not (yet)."""

    received_s: float  # the first bytes of its call came
    tokenized_s: float | None = None
    submitted_s: float | None = None  # given to a decode node; the first one, where it moved
    first_token_s: float | None = None  # given to its client's socket; where nothing streams: known
    done_s: float | None = None  # however it ended


@dataclass(frozen=True, slots=True)
class Timeline:
    """A request's times, in microseconds since it was received; None: did not happen (yet).

    `ttft_us` is the sum of FIRST_TOKEN_STAGES. A stage is 0 where the stamp that ends it is missing and a
    later one is there: the next one has its time.
    """

    stamps_us: dict[str, int | None]  # all STAMPS but `chunks`, in their order
    chunks_us: tuple[int, ...]
    stages_us: dict[str, int | None]  # all STAGES, in their order
    ttft_us: int | None
    first_decode_us: int | None  # from `arrived` to the second token
    total_us: int | None
    prefill_node: str | None
    decode_node: str | None

    def to_json(self) -> dict[str, Any]:
        """Return what the API calls `timings`: milliseconds."""
        first = {f"{name}_ms": _ms(self.stages_us[name]) for name in FIRST_TOKEN_STAGES}
        stamps: dict[str, Any] = {name: _ms(self.stamps_us.get(name)) for name in STAMPS}
        return {
            "ttft_ms": _ms(self.ttft_us),
            **first,
            "first_decode_ms": _ms(self.first_decode_us),
            "decode_ms": _ms(self.stages_us["decode"]),
            "total_ms": _ms(self.total_us),
            "prefill_node": self.prefill_node,
            "decode_node": self.decode_node,
            "stamps_ms": stamps | {"chunks": [us / 1000 for us in self.chunks_us]},
        }


def timeline(gateway: GatewayStamps, node: NodeStamps | None, now_s: float) -> Timeline:
    """Put a request's stamps into order, and its time into stages.

    Args:
        node: None where it was given to no node.
        now_s: what lives has no stamp after it.
    """
    node = node or _NOWHERE
    end_s = max(gateway.received_s, now_s if gateway.done_s is None else gateway.done_s)
    put = _Order(gateway.received_s, end_s)
    us: dict[str, int | None] = {
        "received": 0,
        "tokenized": put.next(gateway.tokenized_s),
        "submitted": put.next(gateway.submitted_s),
    }
    if gateway.first_token_s is not None:
        put.limit_s = min(end_s, max(put.last_s, gateway.first_token_s))
    us |= {
        "queued": put.next(node.queued_s),
        "granted": put.next(node.granted_s),
        "prefill_start": put.next(node.prefill_start_s),
    }
    chunks = tuple(put.known(chunk_s) for chunk_s in node.chunks_s)
    us |= {"committed": put.next(node.committed_s), "arrived": put.next(node.arrived_s)}
    after = _Order(gateway.received_s, end_s, last_s=put.last_s)  # decoding and sending overlap
    us |= {
        "prebuilt": after.next(node.prebuilt_s),
        "first_token": put.next(gateway.first_token_s),
        "second_token": after.next(node.second_token_s),
        "done": None if gateway.done_s is None else put.since(end_s),
    }
    begins = [us[name] for name in ("received", "submitted", "queued", "prefill_start")]
    ends = [chunks[-1] if chunks else None, us["arrived"], us["first_token"]]
    # What ended without a first token was in none of the stages to its end.
    done = None if us["first_token"] is None else us["done"]
    return Timeline(
        us,
        chunks,
        dict(zip(STAGES, _stages([*begins, *ends, done]), strict=True)),
        ttft_us=us["first_token"],
        first_decode_us=_between(us["arrived"], us["second_token"]),
        total_us=us["done"],
        prefill_node=node.prefill_node,
        decode_node=node.decode_node or None,
    )


class _Order:
    """Puts stamps behind each other, none after a limit; counts from the begin."""

    def __init__(self, begin_s: float, limit_s: float, *, last_s: float | None = None) -> None:
        self.limit_s = limit_s
        self.last_s = begin_s if last_s is None else last_s
        self._begin_s = begin_s

    def next(self, stamp_s: float | None) -> int | None:
        """Return its place, in microseconds."""
        return None if stamp_s is None else self.known(stamp_s)

    def known(self, stamp_s: float) -> int:
        """Return its place; what is no number (nan) has that of the one before."""
        self.last_s = min(self.limit_s, max(self.last_s, stamp_s))
        return self.since(self.last_s)

    def since(self, at_s: float) -> int:
        """Return the microseconds since the begin."""
        return round((at_s - self._begin_s) * 1e6)


def _stages(ends: list[int | None]) -> list[int | None]:
    """Return what lies between the ends of stages; one that is missing before another is that before it."""
    num_known = max(place for place, end in enumerate(ends) if end is not None) + 1
    filled: list[int | None] = list(ends)
    for place in range(1, num_known):
        if filled[place] is None:
            filled[place] = filled[place - 1]
    return [_between(begin, end) for begin, end in pairwise(filled)]


def _between(begin: int | None, end: int | None) -> int | None:
    return None if begin is None or end is None else end - begin


def _ms(us: int | None) -> float | None:
    return None if us is None else us / 1000
