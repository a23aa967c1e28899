"""The codec lets every message through, and nothing else: RemoteProtocolError, whatever the bytes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.codec import (
    MAX_FRAME_BYTES,
    MAX_FRAMES,
    MAX_HEADER_BYTES,
    Codec,
    Envelope,
)
from common.errors import LocalProtocolError
from common.messages import (
    CODEC,
    Abort,
    Chunk,
    Credit,
    Failed,
    Prefill,
    Quiesced,
    int32s,
)
from tests.wire.golden import INSTANCES
from tests.wire.raw import ANYTHING, decodes_or_refuses, header_of, refuses, wire, with_header
from tests.wire.schema import conforms
from tests.wire.strategies import envelopes


@given(envelopes())
@settings(max_examples=400)
def test_a_message_survives_the_wire(envelope: Envelope) -> None:
    decoded = CODEC.decode([bytes(frame) for frame in CODEC.encode(envelope)])
    assert decoded == envelope
    assert conforms(type(envelope.message), decoded.message)


def test_fields_with_a_default_may_be_missing() -> None:
    raw = header_of(Failed(7, 503, "gone"))
    del raw["fields"]["retry_after_s"]
    assert CODEC.decode(with_header(Failed(7, 503, "gone"), raw)).message == Failed(7, 503, "gone")


def test_a_whole_number_may_stand_for_a_float() -> None:
    prefill = next(m for m in INSTANCES if isinstance(m, Prefill))
    raw = header_of(prefill)
    raw["fields"]["sampling"]["temperature"] = 2
    decoded = CODEC.decode(with_header(prefill, raw)).message.sampling.temperature
    assert (decoded, type(decoded)) == (2.0, float)


def test_arrays_of_the_largest_size_go_through() -> None:
    prefill = next(m for m in INSTANCES if isinstance(m, Prefill))
    largest = Prefill(1, prefill.sampling, int32s([5]) * (MAX_FRAME_BYTES // 4), int32s([1]))
    assert CODEC.decode(wire(largest)).message == largest


@given(st.lists(st.binary(max_size=200), max_size=4))
@settings(max_examples=500)
def test_arbitrary_bytes_are_refused(frames: list[bytes]) -> None:
    refuses(frames)


JSON_LIKE = st.recursive(
    st.sampled_from(ANYTHING) | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(INSTANCES), st.data())
@settings(max_examples=500)
def test_a_message_with_other_values_in_it_decodes_well_typed_or_not_at_all(
    message: Any, data: st.DataObject
) -> None:
    raw = header_of(message)
    at: Any = raw
    while isinstance(at, dict) and at:
        key = data.draw(st.sampled_from(sorted(at)))
        if not isinstance(at[key], dict) or data.draw(st.booleans()):
            at[key] = data.draw(JSON_LIKE)
            break
        at = at[key]
    decodes_or_refuses(with_header(message, raw))


@given(envelopes(), st.data())
@settings(max_examples=500)
def test_a_message_with_flipped_cut_or_moved_bytes_decodes_well_typed_or_not_at_all(
    envelope: Envelope, data: st.DataObject
) -> None:
    frames = [bytearray(frame) for frame in CODEC.encode(envelope)]
    for _ in range(data.draw(st.integers(1, 3))):
        if not frames:
            break
        which = data.draw(st.integers(0, len(frames) - 1))
        frame = frames[which]
        at = data.draw(st.integers(0, max(0, len(frame) - 1)))
        match data.draw(st.sampled_from(("flip", "cut", "insert", "drop", "double", "swap"))):
            case "flip" if frame:
                frame[at] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del frame[at:]
            case "insert":
                frame[at:at] = data.draw(st.binary(max_size=8))
            case "drop":
                del frames[which]
            case "double":
                frames.insert(which, bytearray(frame))
            case "swap":
                frames.reverse()
    decodes_or_refuses([bytes(frame) for frame in frames])


def test_what_is_no_message_is_our_own_bug() -> None:
    for thing in (object(), 7, "Abort", Envelope(1, 1, Abort(1))):
        with pytest.raises(LocalProtocolError, match="no message"):
            CODEC.encode(Envelope(1, 1, thing))


def test_a_message_beyond_the_limits_is_our_own_bug() -> None:
    for message in (
        Chunk(1, 0, 1, 1, frames=(bytes(MAX_FRAME_BYTES + 1),)),
        Chunk(1, 0, 1, 1, frames=(b"",) * MAX_FRAMES),
        Failed(1, 503, "x" * (MAX_HEADER_BYTES + 1)),
    ):
        with pytest.raises(LocalProtocolError, match="larger than the protocol's limits"):
            CODEC.encode(Envelope(1, 1, message))


def test_two_codecs_do_not_share_anything() -> None:
    small = Codec((Credit, Quiesced))
    assert small.decode([bytes(f) for f in small.encode(Envelope(1, 2, Credit(5)))]) == Envelope(
        1, 2, Credit(5)
    )
