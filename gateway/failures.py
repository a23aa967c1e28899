"""Every kind of failure, who counts it, and what to do: the one source of code, docs and tests.

A kind is a cause, not what follows from it. It is counted once, by the process that decides that it is one;
a call that ends with an error because of it counts in `baton_requests_total{outcome}` alone. Who *uses*
another process counts its loss: gateways use decode nodes, decode nodes use prefill nodes and are used by
gateways. Who leaves as it was told is no failure, nor is what a client asks for wrongly
(`outcome="rejected"`).

Knows no metric library; where a kind is the sum of counters of a node, or of the gateway's network side, they
are named here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from common.errors import RequestRejected
from common.messages import Role

GATEWAY, DECODE, PREFILL = Role.GATEWAY, Role.DECODE, Role.PREFILL


class Failure(Enum):
    """A kind of failure; the value is its label."""

    # Of a call
    CLIENT_GONE = "client_gone"
    CLIENT_SLOW = "client_slow"
    DEADLINE = "deadline"
    OVERLOADED = "overloaded"
    NO_NODES = "no_nodes"
    INTERNAL = "internal"
    # Of a process that is used
    DECODE_LOST = "decode_lost"
    PREFILL_LOST = "prefill_lost"
    PREFILL_FAILED = "prefill_failed"
    GATEWAY_LOST = "gateway_lost"
    NODE_REFUSED = "node_refused"
    # Of what travels
    MESSAGE_MALFORMED = "message_malformed"
    MESSAGE_LOST = "message_lost"
    TRANSFER_LOST = "transfer_lost"
    PAGES_WRONG = "pages_wrong"
    # What is slower than it could be
    PLANE_FALLBACK = "plane_fallback"
    ATTENTION_FALLBACK = "attention_fallback"


class CountsFailures(Protocol):
    """Who counts a failure that this process decided on."""

    def failed(self, kind: Failure) -> None:
        """Count one; never raises."""
        ...


@dataclass(frozen=True, slots=True)
class About:
    """What a kind is. `counters` are those whose sum it is; without any, the HTTP side counts it."""

    counted_by: tuple[Role, ...]
    what: str
    advice: str
    counters: tuple[str, ...] = ()


FAILURES: dict[Failure, About] = {
    Failure.CLIENT_GONE: About(
        (GATEWAY,),
        "A client left before it had its answer, or did not read it until its deadline had passed.",
        "Nothing, unless there are many: then clients may wait less long than answers take.",
    ),
    Failure.CLIENT_SLOW: About(
        (GATEWAY,),
        "A request did not come in time: 408.",
        "Look at the client or the network; `--client-timeout` is how long it may take.",
    ),
    Failure.DEADLINE: About(
        (GATEWAY,),
        "A call did not end in time: 504.",
        "Look where the time goes (`baton_request_stage_seconds`); add nodes, or raise `--request-timeout`.",
    ),
    Failure.OVERLOADED: About(
        (GATEWAY,),
        "A call was turned away: as many wait as may (429), or there are too many connections (503).",
        "More nodes; or let more wait: `--max-queued`, `--max-connections`.",
    ),
    Failure.NO_NODES: About(
        (GATEWAY,),
        "A call came while no pair of nodes was ready: 503.",
        "Look at `baton_nodes`, `baton_restarts_total` and the log: which node is not there, and why.",
        ("requests_without_nodes",),
    ),
    Failure.INTERNAL: About(
        (GATEWAY,),
        "A bug: in the gateway, or in a node that ended a request with 500.",
        "Report it, with what the log says at that time.",
        ("requests_broken",),
    ),
    Failure.DECODE_LOST: About(
        (GATEWAY,),
        "A decode node died, or its link broke: once at each gateway.",
        "Look at its last words in the log, and at `baton_restarts_total`.",
        ("decode_nodes_lost",),
    ),
    Failure.PREFILL_LOST: About(
        (DECODE,),
        "A prefill node died, or its link broke: once at each decode node.",
        "Look at its last words in the log, and at `baton_restarts_total`.",
        ("prefill_nodes_lost",),
    ),
    Failure.PREFILL_FAILED: About(
        (DECODE,),
        "A prefill node gave a transfer up, and does not leave; it is tried again.",
        "Look at the prefill node's log.",
        ("prefill_nodes_failed",),
    ),
    Failure.GATEWAY_LOST: About(
        (DECODE,),
        "A gateway died, or its link broke: once at each decode node. What it had asked for was ended.",
        "Look at its last words in the log, and at `baton_restarts_total`.",
        ("gateways_lost",),
    ),
    Failure.NODE_REFUSED: About(
        (GATEWAY, DECODE, PREFILL),
        "A process that does not fit was turned away, each reason once: another model, page size, version or "
        "key, a name that is taken, an address that cannot be used.",
        "The log names both values: start both alike.",
        ("peers_refused", "peers_unusable"),
    ),
    Failure.MESSAGE_MALFORMED: About(
        (GATEWAY, DECODE, PREFILL),
        "Bytes that are no message, or a message that its sender may not send then.",
        "Find who writes to that address. If it is one of ours, report it.",
        ("messages_malformed", "messages_misplaced"),
    ),
    Failure.MESSAGE_LOST: About(
        (GATEWAY, DECODE),
        "A message about a request was lost: its tokens have a gap, or the other side does not know it.",
        "Look for links that broke at that time, and at the network between the hosts.",
        ("requests_lost",),
    ),
    Failure.TRANSFER_LOST: About(
        (DECODE,),
        "A message about a transfer was lost: the prefill node does not know it. It is tried again.",
        "Look for links that broke at that time, and at the network between the hosts.",
        ("transfers_lost",),
    ),
    Failure.PAGES_WRONG: About(
        (DECODE,),
        "Pages came out of order, too many, too few, of a wrong size or with a wrong checksum. The transfer "
        "is tried again.",
        "If `baton_node_chunks_broken_total` rises, suspect memory or the network; else messages were lost.",
        ("pages_wrong", "chunks_broken"),
    ),
    Failure.PLANE_FALLBACK: About(
        (PREFILL,),
        "Pages travel in messages to a decode node of this host, for its memory cannot be mapped.",
        "The log says why; run both nodes as one user, in one PID namespace.",
        ("planes_fallen_back",),
    ),
    Failure.ATTENTION_FALLBACK: About(
        (DECODE, PREFILL),
        "Attention is not the fastest that there is for this GPU.",
        "The log says why: float32, or flashinfer is not installed.",
        ("attention_fallbacks",),
    ),
}


def kinds_of(role: Role) -> list[Failure]:
    """The kinds that processes of a role count."""
    return [kind for kind, about in FAILURES.items() if role in about.counted_by]


def failure_of(error: RequestRejected) -> Failure | None:
    """The kind that a call's own end is; None: a mistake of its client's, or what was counted elsewhere."""
    by_status = {408: Failure.CLIENT_SLOW, 429: Failure.OVERLOADED, 504: Failure.DEADLINE}
    return by_status.get(error.status)
