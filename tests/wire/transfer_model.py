"""Both ends of transfers around the real machines: pages are values, the plane is a queue, time is a number.

What the endpoints do with sockets and tensors is done here with lists, so that a test can lose, delay,
double and reorder anything. Every page that D places, that P writes into D's memory (on a one-sided plane)
and that either releases is checked at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common.errors import RemoteProtocolError
from common.messages import Abort, Choice, Chunk, Commit, Failed, Prefill, Quiesced, Rejected, Status, int32s
from common.reconcile import Reconciler
from common.request import PrefillStamps, SamplingParams
from transfer import receiver as rx
from transfer import sender as tx
from transfer.states import SenderState

SendMessage = Callable[[Any], int]
OVERWRITTEN = b"somebody else's"


def nowhere(_: Any) -> int:
    """Send to who is out of reach."""
    return 0


def page_value(transfer_id: int, page: int) -> bytes:
    """What P computes for a page."""
    return b"%d:%d" % (transfer_id, page)


@dataclass(eq=False)
class Incoming:
    """A transfer at D: the machine, what its pages hold, at which process it is, what its owner was told."""

    machine: rx.Receiver
    pages: list[bytes | None]
    process: int
    in_reach: bool = True
    outcomes: list[str] = field(default_factory=list)
    released: bool = False  # the pages of a transfer that did not end well are somebody else's


class DecodeEnd:
    """D. `write` is what a one-sided P does to its memory."""

    def __init__(self, *, one_sided: bool) -> None:
        self.one_sided = one_sided
        self.next_id = 1
        self.open: dict[int, Incoming] = {}
        self.all: dict[int, Incoming] = {}
        self.reconciler = Reconciler()

    def grant(self, num_pages: int, process: int, send: SendMessage) -> None:
        transfer_id, self.next_id = self.next_id, self.next_id + 1
        machine = rx.Receiver(transfer_id, num_pages, one_sided=self.one_sided)
        incoming = Incoming(machine, [None] * num_pages, process)
        self.open[transfer_id] = self.all[transfer_id] = incoming
        sampling = SamplingParams(max_tokens=1)
        seq = send(Prefill(transfer_id, sampling, int32s([1]), int32s(range(1, num_pages + 1))))
        self.reconciler.opened(transfer_id, seq)

    def give_up(self, transfer_id: int, now: float, send: SendMessage) -> None:
        outcomes = self.open[transfer_id].outcomes
        if not outcomes:
            outcomes.append("given up")
        self.feed(transfer_id, rx.GiveUp(), now, send)

    def write(self, transfer_id: int, page: int, value: bytes) -> None:
        """P writes into D's memory."""
        incoming = self.all[transfer_id]
        assert not incoming.released, "a page of somebody else's was written"
        assert incoming.outcomes != ["done"], "a page was written after Commit"
        incoming.pages[page] = value

    def link_down(self, now: float) -> None:
        for transfer_id, incoming in list(self.open.items()):
            if incoming.in_reach:
                incoming.in_reach = False
                self.feed(transfer_id, rx.Lost("link down", quiet=False), now, nowhere)
        self.reconciler = Reconciler()

    def link_up(self, process: int) -> None:
        for incoming in self.open.values():
            incoming.in_reach = incoming.process == process

    def process_died(self, process: int, now: float) -> None:
        for transfer_id, incoming in list(self.open.items()):
            if incoming.process == process:
                self.feed(transfer_id, rx.Lost("its process ended", quiet=True), now, nowhere)

    def status(self) -> Status:
        return Status(last_seq_seen=0, open_ids=self.reconciler.open_ids())

    def message(self, message: Any, now: float, send: SendMessage) -> None:
        match message:
            case Status(last_seq_seen=seq, open_ids=ids):
                for transfer_id in self.reconciler.on_status(seq, ids):
                    self.feed(transfer_id, rx.Lost("not known", quiet=True), now, send)
            case _:
                transfer_id = message.id if isinstance(message, Failed) else message.transfer_id
                if transfer_id in self.open and self.open[transfer_id].in_reach:
                    self.feed(transfer_id, message, now, send)

    def tick(self, now: float, send: SendMessage) -> None:
        for transfer_id in list(self.open):
            self.feed(transfer_id, rx.Tick(), now, send)

    def feed(self, transfer_id: int, input_: rx.Input, now: float, send: SendMessage) -> None:
        incoming = self.open.get(transfer_id)
        if incoming is None:
            return
        try:
            outputs = incoming.machine.handle(input_, now)
        except RemoteProtocolError as error:
            outputs = incoming.machine.handle(rx.Broken(str(error)), now)
        for output in outputs:
            self._perform(incoming, output, send if incoming.in_reach else nowhere)
        if incoming.machine.ended:
            del self.open[transfer_id]
            self.reconciler.closed(transfer_id)

    def _perform(self, incoming: Incoming, output: rx.Output, send: SendMessage) -> None:
        match output:
            case rx.Send(abort):
                self.reconciler.closed(abort.id)
                send(abort)
            case rx.Place(chunk):
                assert not incoming.outcomes, "its pages are somebody else's already"
                for page, value in enumerate(chunk.frames, start=chunk.first_page):
                    assert incoming.pages[page] is None, "placed twice"
                    incoming.pages[page] = bytes(value)
                assert incoming.pages[chunk.first_page] is not None, "not yet written"
            case rx.Done(commit):
                transfer_id = incoming.machine.transfer_id
                assert incoming.pages == [page_value(transfer_id, i) for i in range(len(incoming.pages))]
                assert commit.choices[0].first_token == transfer_id
                incoming.outcomes.append("done")
            case rx.GaveOut():
                incoming.outcomes.append("gave out")
            case rx.PagesFree():
                assert not incoming.released, "released twice"
                assert incoming.outcomes in (["given up"], ["gave out"]), "the owner does not know"
                incoming.released = True
                incoming.pages[:] = [OVERWRITTEN] * len(incoming.pages)


@dataclass(eq=False)
class Outgoing:
    """A transfer at P: the machine, what its pages hold, whether they were released."""

    machine: tx.Sender
    pages: list[bytes]
    send: SendMessage
    num_computed: int = 0
    has_token: bool = False
    released: bool = False


class PrefillEnd:
    """P. Its plane is a queue of pages that have not left; they are read when they leave.

    `memory` is the D that a one-sided plane writes to.
    """

    def __init__(self, memory: DecodeEnd | None) -> None:
        self.memory = memory
        self.open: dict[int, Outgoing] = {}  # of the link that is up
        self.all: list[Outgoing] = []
        self.queue: deque[tuple[Outgoing, int]] = deque()
        self.early_aborts: set[int] = set()
        self.reconciler = Reconciler()

    def status(self) -> Status:
        return Status(last_seq_seen=0, open_ids=tuple(self.open))

    def in_state(self, *states: SenderState) -> list[Outgoing]:
        return [outgoing for outgoing in self.all if outgoing.machine.state in states]

    def message(self, message: Any, send: SendMessage) -> None:
        match message:
            case Prefill(transfer_id=transfer_id):
                self._arrived(transfer_id, len(message.page_ids), send)
            case Abort(id=transfer_id):
                if transfer_id in self.open:
                    self.feed(self.open[transfer_id], message)
                else:
                    self.early_aborts.add(transfer_id)
                    send(Quiesced(transfer_id))
            case Status(last_seq_seen=seq, open_ids=ids):
                for transfer_id in self.reconciler.on_status(seq, ids):
                    self.feed(self.open[transfer_id], tx.Lost())

    def _arrived(self, transfer_id: int, num_pages: int, send: SendMessage) -> None:
        if transfer_id in self.early_aborts:
            return
        assert transfer_id not in self.open
        pages = [page_value(transfer_id, page) for page in range(num_pages)]
        outgoing = Outgoing(tx.Sender(transfer_id, num_pages), pages, send)
        self.open[transfer_id] = outgoing
        self.all.append(outgoing)
        self.reconciler.opened(transfer_id)

    def link_down(self) -> None:
        """What is over may still be read for a while; into D's memory a plane writes no more once closed."""
        for outgoing in list(self.open.values()):
            outgoing.send = nowhere
            self.feed(outgoing, tx.Lost())
            if self.memory is not None and not outgoing.released:
                self.quiet(outgoing)
        self.open.clear()
        self.reconciler = Reconciler()

    # What the scheduler does ------------------------------------------------------------------------------

    def compute(self, outgoing: Outgoing, num_pages: int) -> None:
        first = outgoing.num_computed
        outgoing.num_computed = min(first + num_pages, outgoing.machine.num_pages)
        is_last = outgoing.num_computed == outgoing.machine.num_pages
        page_ids = tuple(range(first, outgoing.num_computed))
        self.feed(outgoing, tx.ChunkComputed(first, page_ids, is_last))

    def sample(self, outgoing: Outgoing) -> None:
        outgoing.has_token = True
        self.feed(outgoing, tx.FirstToken((Choice(outgoing.machine.transfer_id, None),), PrefillStamps()))

    # What the plane does ----------------------------------------------------------------------------------

    def move(self) -> None:
        """The first page in the queue leaves."""
        outgoing, page = self.queue.popleft()
        transfer_id = outgoing.machine.transfer_id
        frames: tuple[bytes, ...] = (outgoing.pages[page],)
        if self.memory is not None:
            self.memory.write(transfer_id, page, outgoing.pages[page])
            frames = ()
        outgoing.send(Chunk(transfer_id, page, 1, total_bytes=1, frames=frames))
        self.feed(outgoing, tx.Posted(1))

    def quiet(self, outgoing: Outgoing) -> None:
        self.queue = deque(item for item in self.queue if item[0] is not outgoing)
        self.feed(outgoing, tx.Quiet())

    def feed(self, outgoing: Outgoing, input_: tx.Input) -> None:
        for output in outgoing.machine.handle(input_):
            match output:
                case tx.Send(message):
                    assert isinstance(message, Commit | Rejected | Failed | Quiesced)
                    outgoing.send(message)
                case tx.Post(_, page_ids):
                    self.queue.extend((outgoing, page) for page in page_ids)
                case tx.Stop():
                    pass
                case tx.Ended():
                    self._released(outgoing)

    def _released(self, outgoing: Outgoing) -> None:
        assert not outgoing.released, "released twice"
        assert all(item[0] is not outgoing for item in self.queue), "the plane still reads it"
        outgoing.released = True
        outgoing.pages[:] = [OVERWRITTEN] * len(outgoing.pages)
        transfer_id = outgoing.machine.transfer_id
        if self.open.get(transfer_id) is outgoing:
            del self.open[transfer_id]
            self.reconciler.closed(transfer_id)
