"""The fuzz targets, for a few seconds: the inputs that were kept, and some thousand new ones.

`python -m fuzz` runs them for as long as one likes. Each target also finds a fault that is put in.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

import fuzz.codec
from common import link
from common.codec import Codec, Header
from common.messages import MESSAGES
from fuzz import corpus
from fuzz.plain import Found, begin
from fuzz.targets import TARGETS, Target
from gateway import prompts
from transfer import receiver as rx
from transfer import sender as tx

RUNS = {
    "codec": 20_000,
    "receiver": 5_000,
    "sender": 10_000,
    "link": 4_000,
    "link-pair": 600,
    "transfer-pair": 1_000,
    "one-sided-pair": 1_000,
    "bodies": 8_000,
}
LEAST_OUTCOMES = {"codec": 300, "bodies": 200, "transfer-pair": 30, "one-sided-pair": 30}  # of others, 5


@pytest.fixture(scope="module")
def targets() -> dict[str, Target]:
    return {name: make() for name, make in TARGETS.items()}


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_happens_that_must_not(targets: dict[str, Target], name: str) -> None:
    run = begin(targets[name], corpus.load(name))
    run.go_on(RUNS[name], random.Random(1))
    assert len(run.firsts) > LEAST_OUTCOMES.get(name, 5)


def test_the_codec_is_fed_messages_as_well(targets: dict[str, Target]) -> None:
    """Mutations that are all refused would say little: every kind gets through, changed."""
    run = begin(targets["codec"], [])
    seeds = run.seen.copy()
    run.go_on(RUNS["codec"], random.Random(2))
    more = run.seen - seeds
    assert all(more[kind.__name__] > 0 for kind in MESSAGES), more


class Lenient(Codec):
    """Lets an error of msgpack through."""

    def decode_header(self, data: Any) -> Header:
        if b"\xff" in bytes(data)[:20]:
            raise UnicodeDecodeError("utf-8", b"", 0, 1, "put in")
        return super().decode_header(data)


def _lenient_codec(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fuzz.codec, "CODEC", Lenient(MESSAGES))


def _pages_in_any_order(patch: pytest.MonkeyPatch) -> None:
    def chunk(self: rx.Receiver, chunk: Any, now: float) -> tuple[rx.Output, ...]:
        self._step(rx.ReceiverEvent.CHUNK)
        self.pages_in += chunk.num_pages
        return (rx.Place(chunk),)

    patch.setattr(rx.Receiver, "_chunk", chunk)


def _commit_before_the_pages_have_left(patch: pytest.MonkeyPatch) -> None:
    honest = tx.Sender._commit_if_complete

    def commit(self: tx.Sender) -> tuple[tx.Output, ...]:
        self._pages_posted = self.num_pages
        return honest(self)

    patch.setattr(tx.Sender, "_commit_if_complete", commit)


def _pages_free_at_once(patch: pytest.MonkeyPatch) -> None:
    honest = rx.Receiver._give_up

    def give_up(self: rx.Receiver, event: Any, now: float) -> tuple[rx.Output, ...]:
        outputs = honest(self, event, now)
        return (*outputs, rx.PagesFree()) if outputs and self._one_sided else outputs

    patch.setattr(rx.Receiver, "_give_up", give_up)
    patch.setattr(rx.Receiver, "_quiet", lambda self: ())


def _doubles_delivered(patch: pytest.MonkeyPatch) -> None:
    honest = link.Link._received

    def received(self: link.Link, envelope: Any, now: float) -> tuple[link.Output, ...]:
        self._last_seq_seen = min(self._last_seq_seen, max(0, envelope.seq - 1))
        return honest(self, envelope, now)

    patch.setattr(link.Link, "_received", received)


def _ids_not_checked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prompts, "_check_ids", lambda *_: None)


FAULTS: list[tuple[str, Callable[[pytest.MonkeyPatch], None]]] = [
    ("codec", _lenient_codec),
    ("receiver", _pages_in_any_order),
    ("sender", _commit_before_the_pages_have_left),
    ("link", _doubles_delivered),
    ("link-pair", _doubles_delivered),
    ("transfer-pair", _commit_before_the_pages_have_left),
    ("one-sided-pair", _pages_free_at_once),
    ("bodies", _ids_not_checked),
]


@pytest.mark.parametrize(("name", "put_in"), FAULTS)
def test_a_fault_is_found(
    targets: dict[str, Target],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    put_in: Callable[[pytest.MonkeyPatch], None],
) -> None:
    put_in(monkeypatch)
    with pytest.raises(Found):
        begin(targets[name], []).go_on(RUNS[name], random.Random(3))
