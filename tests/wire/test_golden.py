"""The bytes of every message are what they were when the protocol's version was given out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.codec import PROTOCOL_VERSION, Envelope
from common.messages import CODEC, MESSAGES
from tests.wire.golden import EPOCH, GOLDEN, INSTANCES, SEQ, frames_of

GOLDEN_FILE = json.loads(GOLDEN.read_text())
HOW_TO_CHANGE = (
    "The bytes of a message changed. Processes of both commits would misunderstand each other: raise "
    "PROTOCOL_VERSION in common/codec.py (after the first release), and run `python -m tests.wire.golden`."
)
by_name = pytest.mark.parametrize("message", INSTANCES, ids=lambda m: type(m).__name__)


def test_every_message_has_golden_bytes() -> None:
    names = [kind.__name__ for kind in MESSAGES]
    assert [type(message).__name__ for message in INSTANCES] == names, (
        "give the message an instance in golden.py"
    )
    assert list(GOLDEN_FILE["messages"]) == names, "a message was added: run `python -m tests.wire.golden`"


def test_golden_bytes_are_of_this_version() -> None:
    assert GOLDEN_FILE["version"] == PROTOCOL_VERSION, "run `python -m tests.wire.golden`"


@by_name
def test_a_message_is_encoded_to_its_golden_bytes(message: Any) -> None:
    assert GOLDEN_FILE["messages"][type(message).__name__] == frames_of(message), HOW_TO_CHANGE


@by_name
def test_golden_bytes_are_decoded_to_the_message(message: Any) -> None:
    frames = [bytes.fromhex(frame) for frame in GOLDEN_FILE["messages"][type(message).__name__]]
    assert CODEC.decode(frames) == Envelope(EPOCH, SEQ, message)
