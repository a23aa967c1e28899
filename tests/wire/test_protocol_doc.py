"""docs/protocol.md is true: its tables hold the messages, fields and transitions of the code, no others."""

from __future__ import annotations

import re
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from common.codec import PROTOCOL_VERSION, Frames, ItemType
from common.kv.layout import KVLayout
from common.link import TRANSITIONS, LinkEvent, LinkState
from common.messages import MESSAGES, Choice, Finish, HostIdentity, PageLedger, PeerInfo, Timings
from common.peering import LINK_COUNTERS
from common.request import SamplingParams
from tests.wire.schema import hints_of
from transfer.states import (
    RECEIVER_TABLE,
    SENDER_TABLE,
    ReceiverEvent,
    ReceiverState,
    SenderEvent,
    SenderState,
)

TEXT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
STRUCTURES = (HostIdentity, KVLayout, SamplingParams, PeerInfo, Finish, Timings, PageLedger, Choice)


def rows_of(first_cell: str) -> list[list[str]]:
    """The rows of the table whose first heading is this; the headings are the first row."""
    lines = TEXT.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_cell} |"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return [rows[0], *rows[2:]]


def form_of(hint: Any) -> str:
    notes = getattr(hint, "__metadata__", ())
    if any(isinstance(note, Frames) for note in notes):
        return " (frames)"
    return " (frame)" if any(isinstance(note, ItemType) for note in notes) else ""


def described(kind: type) -> str:
    return " ".join(f"`{f.name}`{form_of(hints_of(kind)[f.name])}" for f in fields(kind))


def test_every_message_and_its_fields_are_described() -> None:
    assert {row[0]: row[1] for row in rows_of("message")[1:]} == {
        f"`{kind.__name__}`": described(kind) for kind in MESSAGES
    }


def test_every_structure_and_its_fields_are_described() -> None:
    assert {row[0]: row[1] for row in rows_of("structure")[1:]} == {
        f"`{kind.__name__}`": described(kind) for kind in STRUCTURES
    }


@pytest.mark.parametrize(
    ("name", "table", "states", "events"),
    [
        ("link", TRANSITIONS, LinkState, LinkEvent),
        ("receiver", RECEIVER_TABLE, ReceiverState, ReceiverEvent),
        ("sender", SENDER_TABLE, SenderState, SenderEvent),
    ],
)
def test_transition_tables_are_those_of_the_code(
    name: str, table: dict[Any, Enum], states: type[Enum], events: type[Enum]
) -> None:
    head, *rows = rows_of(name)
    assert head[1:] == [event.name for event in events]
    assert [row[0] for row in rows] == [state.name for state in states]
    for state, row in zip(states, rows, strict=True):
        for event, cell in zip(events, row[1:], strict=True):
            after = table.get((state, event))
            assert cell == ("·" if after is None else after.name), f"{state.name}, {event.name}"


def test_version_and_counters_are_those_of_the_code() -> None:
    assert f"version {PROTOCOL_VERSION}." in TEXT
    counters = {name for row in rows_of("counter")[1:] for name in re.findall(r"`(\w+)`", row[0])}
    assert set(LINK_COUNTERS) <= counters
