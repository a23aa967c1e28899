"""This gateway's generating calls as /debug/requests shows them: those that live, and the last that ended.

Keeps stamps and counts alone: no prompt, and no text of an answer. Asks nobody.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from gateway.answer import Answer
from gateway.metrics import Outcome
from gateway.nodes import NodeStamps
from gateway.rows import Rows
from gateway.timeline import GatewayStamps, timeline

NUM_ENDED = 200
MOST_ERROR_CHARS = 500


def gateway_id() -> str:
    """Return the name of this gateway among the processes of a server."""
    return f"gateway-{os.getpid()}"


class State(Enum):
    """How far a request is, as far as this process knows: of a prefill it hears when that is over."""

    TOKENIZING = "tokenizing"  # or its body is still read
    SUBMITTED = "submitted"
    QUEUED = "queued"  # at its decode node
    GRANTED = "granted"  # it has pages, and a prefill node, which may be at it already
    DECODING = "decoding"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What is kept of one choice of a call."""

    call_id: str
    choice: int
    endpoint: str
    gateway: GatewayStamps
    node: NodeStamps | None = None
    prompt_tokens: int | None = None
    output_tokens: int = 0
    finish_reason: str | None = None
    outcome: Outcome | None = None  # of its call; None: that lives
    error: str | None = None

    @property
    def state(self) -> State:
        """How far it is."""
        node = self.node
        if self.gateway.done_s is not None:
            return State.DONE
        if node is None:
            return State.TOKENIZING
        if self.gateway.first_token_s is not None or node.arrived_s is not None:
            return State.DECODING
        if node.granted_s is not None:
            return State.GRANTED
        return State.SUBMITTED if node.queued_s is None else State.QUEUED

    def to_json(self, now_s: float, unix_s: float) -> dict[str, Any]:
        """Return it as /debug/requests has it; both arguments are now, one of each clock."""
        return {
            "id": self.call_id,
            "choice": self.choice,
            "endpoint": self.endpoint,
            "state": self.state.value,
            "outcome": None if self.outcome is None else self.outcome.value,
            "error": self.error,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "received_s": round(unix_s - (now_s - self.gateway.received_s), 6),
            "timings": timeline(self.gateway, self.node, now_s).to_json(),
        }


@dataclass(eq=False, slots=True)
class LiveCall:
    """A call from its first bytes on; `answers` and `begun` are kept up to date by who serves it."""

    call_id: str
    endpoint: str
    begun: GatewayStamps  # what all its choices have in common
    answers: list[Answer] = field(default_factory=list)

    def records(self) -> list[RequestRecord]:
        """Return one for each choice; before there are any, one for the call."""
        if not self.answers:
            return [RequestRecord(self.call_id, 0, self.endpoint, self.begun)]
        return [
            RequestRecord(
                self.call_id,
                answer.index,
                self.endpoint,
                answer.stamps,
                answer.node_stamps,
                len(answer.prompt_ids),
                answer.num_tokens,
                None if answer.finish is None else answer.finish.value,
            )
            for answer in self.answers
        ]


class LiveRequests:
    """All calls of this process."""

    def __init__(self, gateway: str) -> None:
        self._gateway = gateway
        self._live: dict[LiveCall, None] = {}  # in the order of their begins
        self._ended: deque[RequestRecord] = deque(maxlen=NUM_ENDED)

    def begin(self, call: LiveCall) -> None:
        """A call came."""
        self._live[call] = None

    def end(self, call: LiveCall, outcome: Outcome, error: str | None) -> Sequence[RequestRecord]:
        """A call is over; returns what is kept of it."""
        del self._live[call]
        now_s = time.monotonic()
        records = [_ended(record, now_s, outcome, error) for record in call.records()]
        self._ended.extend(records)
        return records

    def to_json(self) -> dict[str, Any]:
        """Return the answer of /debug/requests: those that live first, and of both the newest first."""
        now_s, unix_s = time.monotonic(), time.time()
        records = [record for call in reversed(self._live) for record in call.records()]
        records += reversed(self._ended)
        rows = Rows(record.to_json(now_s, unix_s) for record in records)
        return {"gateway": self._gateway, "now_s": round(unix_s, 6), "requests": rows}


def _ended(record: RequestRecord, now_s: float, outcome: Outcome, error: str | None) -> RequestRecord:
    stamps = record.gateway
    if stamps.done_s is None:
        stamps = replace(stamps, done_s=now_s)
    said = None if error is None else error[:MOST_ERROR_CHARS]
    return replace(record, gateway=stamps, outcome=outcome, error=said)
