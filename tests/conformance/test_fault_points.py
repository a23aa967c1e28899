"""Each fault point does what its rule says, and nothing of it is there without rules."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

import pytest
import torch
import zmq

from common import faults
from common.codec import Envelope
from common.device.streams import DONE, Event
from common.faulty_socket import FaultySocket, socket_class
from common.kv.allocator import PageAllocator, PageUse
from common.kv.faulty_allocator import page_allocator
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.messages import CODEC, Abort, Chunk, Commit, Quiesced, StatsRequest, Status
from common.sockets import FrameSocket
from decode_node.faulty_scheduler import scheduler_class
from decode_node.scheduler import DecodeScheduler
from transfer.faulty_endpoints import receiver_class, sender_class
from transfer.faulty_planes import FaultyPages, FaultyPlane, planes_class
from transfer.planes.base import Posted
from transfer.receiver_endpoint import ReceiverEndpoint
from transfer.sender_endpoint import SenderEndpoint
from transfer.sender_planes import SenderPlanes

EPOCH = 7
LAYOUT = KVLayout(layers=2, page_size=4, kv_heads=1, head_dim=8, dtype="float32")
Message = Abort | Chunk | Commit | Quiesced | StatsRequest | Status


class Clock:
    """Time that passes when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def on(text: str, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Have faults on while something is built."""
    faults.begin("prefill-0", text, clock)
    try:
        yield
    finally:
        faults.begin("prefill-0", "")


def test_without_rules_the_real_things_are_built() -> None:
    faults.begin("decode-0", "")
    assert faults.active() is None
    assert socket_class(FrameSocket) is FrameSocket
    assert type(page_allocator(4)) is PageAllocator
    assert sender_class() is SenderEndpoint
    assert receiver_class() is ReceiverEndpoint
    assert planes_class() is SenderPlanes
    assert scheduler_class() is DecodeScheduler


# Messages --------------------------------------------------------------------------------------------------


class Wire:
    """A faulty socket and a plain one that hears it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], text: str) -> None:
        self.clock = Clock()
        self._seq = 0
        self.there = FrameSocket.router(context, "tcp://127.0.0.1:*")
        with on(text, self.clock):
            self.here = socket_class(FrameSocket).dealer(context, self.there.address)
        assert type(self.here) is FaultySocket

    def say(self, *messages: Message) -> None:
        for message in messages:
            self._seq += 1
            assert self.here.send(CODEC.encode(Envelope(EPOCH, self._seq, message)))

    def turn(self, later_s: float = 0.0) -> None:
        """What the loop of the faulty node does, so much later."""
        self.clock.now += later_s
        self.here.receive()

    def heard(self) -> list[tuple[int, Message]]:
        """All messages up to the next Quiesced, with their numbers."""
        found: list[tuple[int, Message]] = []
        poller = zmq.Poller()
        poller.register(self.there.pollables()[0], zmq.POLLIN)
        while not found or not isinstance(found[-1][1], Quiesced):
            assert poller.poll(10_000), f"{found}, and no more"
            received = self.there.receive()
            assert received is not None
            envelope = CODEC.decode(received.frames)
            found.append((envelope.seq, envelope.message))
        return found

    def close(self) -> None:
        self.here.close()
        self.there.close()


@pytest.fixture
def wire() -> Iterator[Callable[[str], Wire]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with ExitStack() as stack:
        yield lambda text: stack.enter_context(closing(Wire(context, text)))
    context.destroy(linger=0)


A1, A2, END = Abort(1), Abort(2), Quiesced(9)
STATUS = Status(last_seq_seen=0, open_ids=())


def test_dropped(wire: Callable[[str], Wire]) -> None:
    w = wire("drop:Abort")
    w.say(A1, A2, END)
    assert w.heard() == [(2, A2), (3, END)]  # the number is missed, so the loss can be found


def test_doubled(wire: Callable[[str], Wire]) -> None:
    w = wire("double:Abort@2")
    w.say(A1, A2, END)
    assert w.heard() == [(1, A1), (2, A2), (2, A2), (3, END)]


def test_delayed_it_is_said_as_if_then(wire: Callable[[str], Wire]) -> None:
    w = wire("delay:Abort:2s")
    w.say(A1, A2, END)
    assert w.heard() == [(1, A2), (2, END)]  # a link would drop an older number
    w.turn(1.9)
    w.say(END)
    assert w.heard() == [(3, END)]
    w.turn(0.2)
    w.say(END)
    assert w.heard() == [(4, A1), (5, END)]


def test_reordered_with_the_next_message_about_a_request(wire: Callable[[str], Wire]) -> None:
    w = wire("reorder:Abort")
    w.say(A1, STATUS, StatsRequest(7), A2, END)
    assert w.heard() == [(1, STATUS), (2, StatsRequest(7)), (3, A2), (4, A1), (5, END)]


def test_stalled_with_all_behind_it(wire: Callable[[str], Wire]) -> None:
    w = wire("stall:Abort:2s")
    w.say(END, A1, A2, END)
    assert w.heard() == [(1, END)]
    w.turn(2.0)
    assert w.heard() == [(2, A1), (3, A2), (4, END)]


def test_behind_what_is_stalled_others_change_places_and_are_doubled(wire: Callable[[str], Wire]) -> None:
    w = wire("stall:Abort:2s; reorder:Abort@2; double:Abort@4")
    w.say(A1, A2, Abort(3), Abort(4), END)
    w.turn(2.0)
    assert w.heard() == [(1, A1), (2, Abort(3)), (3, A2), (4, Abort(4)), (4, Abort(4)), (5, END)]


@pytest.mark.parametrize(("rule", "changed"), [("corrupt:page@2", [1]), ("swap:pages", [0, 1])])
def test_pages_in_frames_are_spoiled(wire: Callable[[str], Wire], rule: str, changed: list[int]) -> None:
    w = wire(rule)
    whole = torch.arange(3, dtype=torch.uint8).repeat_interleave(LAYOUT.page_bytes)  # one layer
    w.say(Chunk(1, 0, 3, 0, (), (whole.numpy().tobytes(),)), END)
    (_, message), _ = w.heard()
    assert isinstance(message, Chunk)
    got = torch.frombuffer(bytearray(message.frames[0]), dtype=torch.uint8).view(3, -1)
    differs = (got != whole.view(3, -1)).sum(1).tolist()
    assert [page for page, count in enumerate(differs) if count] == changed
    if rule.startswith("corrupt"):
        assert sum(differs) == 1  # one byte
    else:
        assert (got[0].unique().tolist(), got[1].unique().tolist()) == ([1], [0])


# Planes ----------------------------------------------------------------------------------------------------


class Recorder:
    """A plane on which everything leaves at once (see PlaneSender)."""

    has_more = False

    def __init__(self) -> None:
        self.posted: list[tuple[int, int]] = []

    def can_reach(self, target_ids: Sequence[int]) -> bool:
        return True

    def post(
        self,
        transfer_id: int,
        first_page: int,
        page_ids: Sequence[int],
        target_ids: Sequence[int],
        after: Event,
    ) -> None:
        self.posted.append((transfer_id, first_page))

    def poll(self) -> tuple[Posted, ...]:
        return ()

    def quiesce(self, transfer_id: int) -> bool:
        return True

    def on_credit(self, limit_bytes: int) -> None: ...

    def total_bytes(self) -> int:
        return 0

    def close(self) -> None: ...


def plane(text: str) -> tuple[FaultyPlane, Recorder, Clock]:
    clock, real = Clock(), Recorder()
    return FaultyPlane(real, faults.Faults(text, "prefill-0", clock)), real, clock


def post(end: FaultyPlane, transfer_id: int, first_page: int) -> None:
    end.post(transfer_id, first_page, [1], [1], DONE)


def test_a_stalled_plane_keeps_the_order() -> None:
    end, real, clock = plane("stall:plane@2:1s")
    for first in (0, 1, 2):
        post(end, 5, first)
    end.poll()
    assert real.posted == [(5, 0)]
    clock.now = 1.0
    end.poll()
    assert real.posted == [(5, 0), (5, 1), (5, 2)]


def test_what_a_stalled_plane_holds_of_an_aborted_transfer_never_goes() -> None:
    end, real, clock = plane("stall:plane:1s")
    post(end, 5, 0)
    post(end, 6, 0)
    assert end.quiesce(5)
    clock.now = 1.0
    end.poll()
    assert real.posted == [(6, 0)]


def test_a_cut_plane_lets_nothing_through() -> None:
    end, real, _ = plane("cut:plane@2*")
    for first in (0, 1, 2):
        post(end, 5, first)
    end.poll()
    assert real.posted == [(5, 0)]


@pytest.mark.parametrize(("rule", "wrong"), [("corrupt:page@2", [2]), ("swap:pages", [1, 2])])
def test_pages_that_are_mapped_are_spoiled(rule: str, wrong: list[int]) -> None:
    source, target = (KVPool(LAYOUT, 4, torch.device("cpu")) for _ in range(2))
    source.data.uniform_(1, 2)
    FaultyPages(target.pages, faults.Faults(rule, "prefill-0")).copy_from([1, 2, 3], source.pages, [1, 2, 3])
    same = [page for page in (1, 2, 3) if torch.equal(target.data[:, page], source.data[:, page])]
    assert [page for page in (1, 2, 3) if page not in same] == wrong


# Pages -----------------------------------------------------------------------------------------------------


def test_an_allocation_is_refused_as_if_nothing_were_free() -> None:
    with on("refuse:allocation*2; refuse:growth@2"):
        pages, decoding = page_allocator(4, allocations=True), page_allocator(4)
    assert [pages.num_free for _ in range(3)] == [0, 0, 4]
    lease = decoding.allocate(1, PageUse.ACTIVE)
    assert lease is not None
    assert [decoding.grow(lease) is None for _ in range(3)] == [False, True, False]
    decoding.check_invariants()
    assert decoding.num_free == decoding.ledger().free == 1  # a decode node's admission is not touched
