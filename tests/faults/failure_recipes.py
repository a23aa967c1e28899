"""How each kind of failure of processes, and of what travels, is provoked in a world of real nodes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from common.acceptor import Acceptor
from common.codec import Envelope
from common.errors import RequestRejected
from common.messages import (
    CODEC,
    Chunk,
    Commit,
    Credit,
    Failed,
    Hello,
    PeerInfo,
    Peers,
    Quiesced,
    Role,
    SharedPool,
    StatsRequest,
    Status,
)
from common.request import SamplingParams
from gateway.failures import Failure
from tests.faults.world import D, G, P, World
from tests.faults.world_cases import prompt
from tests.faults.world_line import CountedSocket, Fault, Rule
from tests.faults.world_states import LONG, between_chunks_of
from tests.wire.hellos import DECODE
from tests.wire.raw import header_of, with_header

Edit = Callable[[Any], Any]
Provoke = Callable[[World], Any]


def unchanged(message: object) -> object:
    return message


def once(kind: type, change: Edit) -> Edit:
    """Change the first message of a kind."""
    seen: list[object] = []

    def edit(message: object) -> object:
        if not isinstance(message, kind) or seen:
            return message
        seen.append(message)
        return change(message)

    return edit


def say(w: World, to: Acceptor, *frames: bytes) -> Callable[[], None]:
    """Say something as a stranger; returns how to hang up."""
    dealer = CountedSocket.dealer(w._context, to.address)  # so that the world waits for what it says
    dealer.send(frames)
    return dealer.close


def greet(w: World, to: Acceptor, seq: int = 1, **other: Any) -> Callable[[], None]:
    """Greet as a decode node that is other than ours."""
    frames = CODEC.encode(Envelope(9, seq, replace(DECODE, node_id="decode-9", **other)))
    return say(w, to, *(bytes(frame) for frame in frames))


@dataclass(frozen=True)
class Recipe:
    """How a kind is made to happen in a world."""

    role: Role
    kind: Failure
    provoke: Provoke
    edit: Edit = unchanged  # of what D and P say
    options: dict[str, Any] = field(default_factory=dict)
    from_start: bool = False  # it happens while the world begins

    def __str__(self) -> str:
        """Name it."""
        return f"{self.kind.value}-{self.role.value}-{self.provoke.__name__}"


def nothing(w: World) -> None:
    pass


def a_request(w: World) -> None:
    w.until_ended(w.ask(LONG, 8))


def after_losing(route: tuple[str, str], kind: str, nth: int = 1, **sampling: Any) -> Provoke:
    def lost_message(w: World) -> None:
        w.add(Rule(route, kind, Fault.LOST, nth))
        w.until_ended(w.ask(LONG, 8, **sampling))

    lost_message.__name__ = f"lost_{kind}"
    return lost_message


def choices_whose_submit_is_lost(w: World) -> None:
    w.add(Rule((G, D), "Submit", Fault.LOST))
    w.until_ended(*w.ask_for(LONG, SamplingParams(8, num_choices=3)))


def several_whose_tokens_are_lost(w: World) -> None:
    asked = [w.ask(prompt(seed, 30), 60) for seed in range(3)]
    w.until(lambda: all(len(each.tokens) > 3 for each in asked))
    w.add(Rule((D, G), "Tokens", Fault.LOST))
    w.until_ended(*asked)


def a_client_leaves_and_d_does_not_hear(w: World) -> None:
    asked = w.ask(LONG, 8)
    between_chunks_of(w, asked)
    w.held.add(P)  # or it would end by itself
    w.add(Rule((G, D), "Abort", Fault.LOST))
    w.abort(asked)
    w.until(lambda: not w.entries())
    w.held.discard(P)


def a_client_leaves(w: World) -> None:
    asked = w.ask(LONG, 8)
    between_chunks_of(w, asked)
    w.held.add(P)
    w.abort(asked)
    w.run(0.1)
    w.held.discard(P)


def d_dies(w: World) -> None:
    w.ask(LONG, 100)
    w.run(0.05)
    w.held.add(D)
    w.lines[0].cut()
    w.lines[2].cut()


def p_dies(w: World) -> None:
    w.ask(LONG, 8)
    w.held.add(P)
    w.lines[2].cut()
    w.run(2.0)
    w.lines[1].cut()


def p_dies_and_the_gateway_knows_first(w: World) -> None:
    w.held.add(P)
    w.lines[1].cut()
    w.until(lambda: not w.d._endpoint.ready_nodes())
    w.lines[2].cut()


def the_gateway_dies(w: World) -> None:
    w.ask(LONG, 100)
    w.run(0.05)
    w.held.add(G)
    w.lines[0].cut()
    w.lines[1].cut()


def nobody_is_there(w: World) -> None:
    w.d.drain()
    w.until(lambda: not w.client.usable())
    with suppress(RequestRejected):
        w.ask(LONG, 8)


def an_address_that_d_cannot_use(w: World) -> None:
    far = PeerInfo("prefill-9", "tcp://192.0.2.1:5555", 5)
    w.lines[0].edit = lambda m: Peers((*m.prefills, far)) if isinstance(m, Peers) else m
    for _ in range(3):
        w.client._tell_peers()
        w.run(0.1)


def a_stranger_at_the_gateway(w: World) -> Callable[[], None]:
    return greet(w, w.client._acceptor, model="another")


def a_stranger_at_p(w: World) -> Callable[[], None]:
    return greet(w, w.p._endpoint._acceptor, model="another")


def two_of_another_version(w: World) -> Callable[[], None]:
    """They greet in turn, again and again, for they cannot read the answer."""
    greeting = with_header(DECODE, header_of(DECODE) | {"version": 99})
    dealers = [CountedSocket.dealer(w._context, w.client._acceptor.address) for _ in range(2)]
    for dealer in dealers * 3:
        dealer.send(greeting)
        w.run(0.1)

    def hang_up() -> None:
        for dealer in dealers:
            dealer.close()

    return hang_up


def rubbish_at_the_gateway(w: World) -> Callable[[], None]:
    return say(w, w.client._acceptor, b"GET / HTTP/1.1")


def rubbish_at_p(w: World) -> Callable[[], None]:
    return say(w, w.p._endpoint._acceptor, b"\x00")


def slower_attention(w: World, role: Role) -> None:
    node = w.d if role is Role.DECODE else w.p
    node._engine = replace(node._engine, attention_fell_back=True)


def slower_attention_at_d(w: World) -> None:
    slower_attention(w, Role.DECODE)


def slower_attention_at_p(w: World) -> None:
    slower_attention(w, Role.PREFILL)


def a_token_that_is_none(commit: Commit) -> Commit:
    return replace(commit, choices=tuple(replace(c, first_token=2**30) for c in commit.choices))


def other_checksums(chunk: Chunk) -> Chunk:
    return replace(chunk, checksums=tuple(value ^ 1 for value in chunk.checksums))


def sent_beyond_its_credit() -> Edit:
    """P says once that it sent more than D allowed; until pages travel only D's own total is above 0."""
    said: list[Status] = []

    def edit(message: Any) -> Any:
        if not isinstance(message, Status) or message.total_bytes or said:
            return message
        said.append(message)
        return replace(message, total_bytes=2**60)

    return edit


def unmappable(message: Any) -> Any:
    """D says that its pool is behind a descriptor that it does not have."""
    if isinstance(message, Hello) and message.shm is not None:
        return replace(message, shm=SharedPool(1_000_000, message.shm.num_pages))
    return message


RECIPES = [
    Recipe(Role.GATEWAY, Failure.NO_NODES, nobody_is_there),
    Recipe(Role.GATEWAY, Failure.INTERNAL, a_request, once(Commit, a_token_that_is_none)),
    Recipe(Role.GATEWAY, Failure.DECODE_LOST, d_dies),
    Recipe(Role.GATEWAY, Failure.NODE_REFUSED, a_stranger_at_the_gateway),
    Recipe(Role.GATEWAY, Failure.NODE_REFUSED, two_of_another_version),
    Recipe(Role.GATEWAY, Failure.MESSAGE_MALFORMED, rubbish_at_the_gateway),
    Recipe(Role.GATEWAY, Failure.MESSAGE_LOST, after_losing((G, D), "Submit")),
    Recipe(Role.GATEWAY, Failure.MESSAGE_LOST, after_losing((D, G), "Tokens", 4)),
    Recipe(Role.GATEWAY, Failure.MESSAGE_LOST, after_losing((D, G), "Tokens", 8)),
    Recipe(Role.GATEWAY, Failure.MESSAGE_LOST, choices_whose_submit_is_lost),
    Recipe(Role.GATEWAY, Failure.MESSAGE_LOST, several_whose_tokens_are_lost),
    Recipe(Role.DECODE, Failure.PREFILL_LOST, p_dies),
    Recipe(Role.DECODE, Failure.PREFILL_LOST, p_dies_and_the_gateway_knows_first),
    Recipe(
        Role.DECODE,
        Failure.PREFILL_FAILED,
        a_request,
        once(Commit, lambda commit: Failed(commit.transfer_id, 503, "out of order")),
    ),
    Recipe(Role.DECODE, Failure.GATEWAY_LOST, the_gateway_dies),
    Recipe(Role.DECODE, Failure.NODE_REFUSED, an_address_that_d_cannot_use),
    Recipe(
        Role.DECODE, Failure.MESSAGE_MALFORMED, a_client_leaves, once(Quiesced, lambda _: StatsRequest(1))
    ),
    Recipe(Role.DECODE, Failure.MESSAGE_MALFORMED, nothing, sent_beyond_its_credit(), from_start=True),
    Recipe(Role.DECODE, Failure.MESSAGE_LOST, a_client_leaves_and_d_does_not_hear),
    Recipe(Role.DECODE, Failure.TRANSFER_LOST, after_losing((D, P), "Prefill")),
    Recipe(Role.DECODE, Failure.TRANSFER_LOST, after_losing((P, D), "Commit")),
    Recipe(Role.DECODE, Failure.PAGES_WRONG, after_losing((P, D), "Chunk", 2)),
    Recipe(Role.DECODE, Failure.PAGES_WRONG, a_request, once(Chunk, other_checksums)),
    Recipe(Role.DECODE, Failure.PAGES_WRONG, a_request, once(Chunk, other_checksums), {"plane": "shm"}),
    Recipe(Role.DECODE, Failure.ATTENTION_FALLBACK, slower_attention_at_d),
    Recipe(Role.PREFILL, Failure.NODE_REFUSED, a_stranger_at_p),
    Recipe(Role.PREFILL, Failure.MESSAGE_MALFORMED, rubbish_at_p),
    Recipe(
        Role.PREFILL,
        Failure.MESSAGE_MALFORMED,
        a_request,
        once(Credit, lambda _: StatsRequest(1)),  # the first is said at once
        from_start=True,
    ),
    Recipe(Role.PREFILL, Failure.PLANE_FALLBACK, nothing, unmappable, {"plane": "auto"}, from_start=True),
    Recipe(Role.PREFILL, Failure.ATTENTION_FALLBACK, slower_attention_at_p),
]
