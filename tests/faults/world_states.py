"""The states that a request is aborted in: how to bring a world there, and what must hold afterwards.

Where an Abort goes to a node that computes all the while, the node is held until the Abort lies before it: a
chunk takes longer than a message, and in a world of one thread nothing else says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from decode_node.entry import Phase
from tests.faults.world import D, G, P, World, world
from tests.faults.world_asked import Asked
from tests.faults.world_cases import CLEAN_WITHIN_S, check_answer, check_next, prompt
from tests.faults.world_engines import SIZES, Sizes
from tests.faults.world_line import Fault, Rule

LONG = prompt(1, 100)  # seven pages, four chunks
PLANES = ("frames", "shm")


@dataclass(frozen=True)
class Reached:
    """The request to abort, others that go on, and what is to be let go once the Abort is said."""

    asked: Asked
    others: tuple[Asked, ...] = ()
    go_on: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class State:
    """A state; `overlap`: there with overlapped steps alone."""

    name: str
    reach: Callable[[World], Reached]
    sizes: Sizes = SIZES
    overlap: bool = False

    def __str__(self) -> str:
        """Name it as tests are named."""
        return self.name.replace(" ", "-")


@dataclass(frozen=True)
class Cell:
    """A state on a plane, with or without overlap."""

    state: State
    plane: str
    overlap: bool

    def __str__(self) -> str:
        """Name it as tests are named."""
        return f"{self.state}-{self.plane}-{'overlap' if self.overlap else 'plain'}"


def abort_p(w: World) -> Callable[[], None]:
    """Stop P where it is; it goes on when the Abort lies before it."""
    w.held.add(P)
    before = w.passed((D, P), "Abort")

    def go_on() -> None:
        w.until(lambda: w.passed((D, P), "Abort") > before)
        w.held.discard(P)

    return go_on


def between_chunks_of(w: World, asked: Asked) -> Callable[[], None]:
    """Stop P when one chunk of four is at D; see abort_p."""
    computed, received = w.counter("tokens_computed"), w.counter("pages_received")
    w.until(lambda: w.counter("tokens_computed") > computed)
    go_on = abort_p(w)
    w.until(lambda: w.counter("pages_received") > received)
    assert w.phase(asked) is Phase.TRANSFERRING
    return go_on


def not_arrived(w: World) -> Reached:
    """Its Abort overtakes it."""
    rule = w.add(Rule((G, D), "Submit", Fault.HELD))
    asked = w.ask(LONG, 8)
    w.until(lambda: rule.fired == 1)

    def go_on() -> None:
        w.until(lambda: w.passed((G, D), "Abort") == 1)
        w.release(rule)
        w.until(lambda: w.counter("requests_submitted") == 1)

    return Reached(asked, go_on=go_on)


def unread(w: World) -> Reached:
    """Request and Abort lie before D together."""
    w.held.add(D)

    def go_on() -> None:
        w.held.discard(D)
        w.until(lambda: w.counter("requests_submitted") == 1)

    return Reached(w.ask(LONG, 8), go_on=go_on)


def queued_on_d(w: World) -> Reached:
    """P has enough to do."""
    w.held.add(P)
    other, asked = w.ask(prompt(2, 70), 8), w.ask(LONG, 8)
    w.until(lambda: (w.phase(other), w.phase(asked)) == (Phase.TRANSFERRING, Phase.QUEUED))
    return Reached(asked, (other,), lambda: w.held.discard(P))


def granted(w: World) -> Reached:
    """P has not read it."""
    w.held.add(P)
    asked = w.ask(LONG, 8)
    w.until(lambda: w.passed((D, P), "Prefill") == 1)
    return Reached(asked, go_on=lambda: w.held.discard(P))


def queued_on_p(w: World) -> Reached:
    """P has no pages for it."""
    w.held.add(P)
    other, asked = w.ask(prompt(2, 40), 8), w.ask(prompt(3, 20), 8)
    w.until(lambda: w.passed((D, P), "Prefill") == 2)
    w.held.discard(P)
    w.until(lambda: w.p._scheduler.num_queued == 1)
    return Reached(asked, (other,), abort_p(w))


def in_a_chunk(w: World) -> Reached:
    """The Abort comes while the first chunk is computed: it is read when that is done."""
    asked = w.ask(LONG, 8)
    w.until(lambda: w.passed((D, P), "Prefill") == 1)
    rule = w.add(Rule((D, P), "Abort", Fault.HELD))

    def go_on() -> None:
        w.held.discard(P)
        w.until(lambda: w.counter("tokens_computed") > 0)
        w.held.add(P)
        w.until(lambda: rule.fired == 1)
        w.release(rule)
        w.held.discard(P)

    w.held.add(P)
    return Reached(asked, go_on=go_on)


def between_chunks(w: World) -> Reached:
    """Some pages are at D."""
    asked = w.ask(LONG, 8)
    return Reached(asked, go_on=between_chunks_of(w, asked))


def last_chunk_launched(w: World) -> Reached:
    """The first token is not there."""
    asked = w.ask(LONG, 8)
    w.until(lambda: w.counter("tokens_computed") == len(LONG))
    assert not w.p._handoff.loop.is_idle
    return Reached(asked, go_on=abort_p(w))


def commit_on_its_way(w: World) -> Reached:
    """P has forgotten it, and D does not know."""
    rule = w.add(Rule((P, D), "Commit", Fault.HELD))
    asked = w.ask(LONG, 8)
    w.until(lambda: rule.fired == 1)

    def go_on() -> None:
        w.until(lambda: w.passed((D, P), "Abort") == 1)
        w.release(rule)
        w.until(lambda: w.passed((P, D), "Commit") == 1)

    return Reached(asked, go_on=go_on)


def before_prebuilt(w: World) -> Reached:
    """As many as may run do."""
    other = w.ask(prompt(2, 20), 40)
    w.until(lambda: w.phase(other) is Phase.RUNNING)
    asked = w.ask(LONG, 8)
    w.until(lambda: w.passed((D, P), "Prefill") == 2)
    w.held.add(D)  # the other one goes on when all has come
    w.until(lambda: w.passed((P, D), "Commit") == 2)
    w.held.discard(D)
    w.until(lambda: w.phase(asked) is Phase.ARRIVED)
    return Reached(asked, (other,))


def running(w: World) -> Reached:
    """It decodes."""
    asked = w.ask(LONG, 60)
    w.until(lambda: len(asked.tokens) >= 3)
    return Reached(asked)


def step_in_flight(w: World) -> Reached:
    """A step was launched for it whose tokens were not read."""
    reached = running(w)
    assert not w.d._loop.is_idle
    return reached


def retracted(w: World) -> Reached:
    """Two grew until no page was left: the younger waits for pages again, with its tokens."""
    other, asked = w.ask(prompt(2, 16), 400), w.ask(prompt(3, 16), 400)
    w.until(lambda: w.counter("requests_retracted") > 0)
    assert (w.phase(other), w.phase(asked)) == (Phase.RUNNING, Phase.QUEUED)
    assert asked.tokens
    return Reached(asked, (other,))


def computed_again(w: World) -> Reached:
    """It was retracted, and D computes its prompt and its tokens."""
    reached = retracted(w)
    w.abort(reached.others[0])
    w.until(lambda: w.phase(reached.asked) is Phase.PREFILLING)
    return Reached(reached.asked)


def after_the_end(w: World) -> Reached:
    """Its last token is on its way to the gateway."""
    rule = w.add(Rule((D, G), "Tokens", Fault.HELD, nth=4))
    asked = w.ask(LONG, 4)
    w.until(lambda: rule.fired == 1)

    def go_on() -> None:
        w.until(lambda: w.passed((G, D), "Abort") == 1)
        w.release(rule)
        w.until(lambda: w.client.counters()["messages_late"] > 0)

    return Reached(asked, go_on=go_on)


GROWING = Sizes(d_pages=36)  # two enter, and each may need 26
STATES = (
    State("not arrived yet", not_arrived),
    State("before D with its Abort", unread),
    State("queued on D", queued_on_d),
    State("granted", granted),
    State("queued on P", queued_on_p, Sizes(p_pages=3)),
    State("in a chunk", in_a_chunk),
    State("between chunks", between_chunks),
    State("last chunk launched, no first token", last_chunk_launched, overlap=True),
    State("between the last chunk and Commit", commit_on_its_way),
    State("between Commit and PREBUILT", before_prebuilt, Sizes(max_running=1)),
    State("in the running batch", running),
    State("in the step in flight", step_in_flight, overlap=True),
    State("while retracted", retracted, GROWING),
    State("computed again after that", computed_again, GROWING),
    State("after the end", after_the_end),
)


def cells() -> Iterator[Cell]:
    """The whole table."""
    for state in STATES:
        for plane in PLANES:
            yield from (
                Cell(state, plane, overlap) for overlap in (False, True) if overlap or not state.overlap
            )


def is_gone(w: World, reached: Reached) -> bool:
    """The ledgers show what others hold, and nothing else: here and at P."""
    if not reached.others:
        return w.is_clean()
    d, p = w.ledgers()
    held = sum(len(entry.lease.pages) for entry in w.entries() if entry.lease is not None)
    return (
        w.phase(reached.asked) is None
        and d.free + held == d.total
        and p.quarantined == 0
        and len(w.p._endpoint._transfers) <= len(reached.others)
    )


def abort_there(folder: Path, cell: Cell) -> float:
    """Abort a request in a state; return the seconds until the ledgers are clean.

    They are those that passed here, and those that the world let pass until a deadline. Checked: those before
    whom it was, and the next one, are answered rightly.
    """
    with world(folder, plane=cell.plane, overlap=cell.overlap, sizes=cell.state.sizes) as w:
        reached = cell.state.reach(w)
        from_s, waited_s = time.perf_counter(), w.waited_s
        w.abort(reached.asked)
        reached.go_on()
        w.until(lambda: is_gone(w, reached), CLEAN_WITHIN_S)
        took_s = time.perf_counter() - from_s + (w.waited_s - waited_s)
        w.until_ended(*reached.others)
        for other in reached.others:
            check_answer(folder, other)
        check_next(folder, w)
    return took_s
