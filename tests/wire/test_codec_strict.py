"""Each way in which bytes can miss the schema is refused, and the error names what is wrong."""

from __future__ import annotations

import pickle
from dataclasses import MISSING, fields
from typing import Any

import msgpack
import pytest

from common.codec import (
    MAX_FRAME_BYTES,
    MAX_FRAMES,
    MAX_HEADER_BYTES,
    PROTOCOL_VERSION,
    Codec,
)
from common.errors import RemoteProtocolError
from common.messages import (
    CODEC,
    Abort,
    Chunk,
    Hello,
    Prefill,
    PromptLogprobs,
    Status,
    Tokens,
    float32s,
    int32s,
)
from tests.wire.golden import INSTANCES
from tests.wire.raw import ANYTHING, decodes_or_refuses, header_of, refuses, wire, with_header
from tests.wire.schema import conforms, hints_of, shape_of


def with_field(message: Any) -> list[tuple[Any, str]]:
    return [(message, name) for name in header_of(message)["fields"]]


header_fields = pytest.mark.parametrize(
    ("message", "name"),
    [pair for message in INSTANCES for pair in with_field(message)],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)


@pytest.mark.parametrize("version", [0, 2, -1, True, 1.0, "1", None, [1]])
def test_another_version_is_refused_by_name(version: Any) -> None:
    raw = header_of(Abort(7)) | {"version": version}
    refuses(with_header(Abort(7), raw), match=f"this process speaks {PROTOCOL_VERSION}")


@pytest.mark.parametrize("entry", ["version", "kind", "epoch", "seq", "fields"])
def test_every_entry_of_the_header_is_needed(entry: str) -> None:
    raw = header_of(Abort(7))
    del raw[entry]
    refuses(with_header(Abort(7), raw))


def test_a_header_has_no_other_entries() -> None:
    refuses(with_header(Abort(7), header_of(Abort(7)) | {"trace": 1}))


@pytest.mark.parametrize("kind", ["", "abort", "Object", "__class__", 7, None, ["Abort"]])
def test_an_unknown_kind_is_refused(kind: Any) -> None:
    refuses(with_header(Abort(7), header_of(Abort(7)) | {"kind": kind}), match="unknown kind")


@pytest.mark.parametrize("entry", ["epoch", "seq"])
@pytest.mark.parametrize("value", [-1, 2**63, True, 1.0, None, "1"])
def test_epoch_and_sequence_number_are_counters(entry: str, value: Any) -> None:
    refuses(with_header(Abort(7), header_of(Abort(7)) | {entry: value}), match=entry)


def test_a_kind_that_another_codec_knows_is_unknown_here() -> None:
    with pytest.raises(RemoteProtocolError, match="unknown kind"):
        Codec((Hello,)).decode(wire(Abort(7)))


@header_fields
def test_a_missing_field_is_refused_unless_it_has_a_default(message: Any, name: str) -> None:
    field = next(f for f in fields(message) if f.name == name)
    raw = header_of(message)
    del raw["fields"][name]
    if field.default is MISSING and field.default_factory is MISSING:
        refuses(with_header(message, raw), match=f"missing field '{name}'")
    else:
        decodes_or_refuses(with_header(message, raw))


@pytest.mark.parametrize("message", INSTANCES, ids=lambda m: type(m).__name__)
def test_an_unknown_field_is_refused(message: Any) -> None:
    raw = header_of(message)
    raw["fields"]["surprise"] = 1
    refuses(with_header(message, raw), match="unknown field 'surprise'")


def test_an_unknown_field_is_refused_inside_a_structure() -> None:
    hello = next(m for m in INSTANCES if isinstance(m, Hello))
    raw = header_of(hello)
    raw["fields"]["host"]["surprise"] = 1
    refuses(with_header(hello, raw), match="unknown field 'surprise'")


@header_fields
def test_every_field_takes_its_own_type_and_range_only(message: Any, name: str) -> None:
    hint = hints_of(type(message))[name]
    for value in ANYTHING:
        raw = header_of(message)
        raw["fields"][name] = value
        decodes_or_refuses(with_header(message, raw))
        shape = shape_of(hint)
        if shape.kind in (int, bool, str) and not conforms(hint, value):
            refuses(with_header(message, raw), match=name)


@pytest.mark.parametrize("value", [True, 1.0, "1", b"1", None, [1], 2**63, 0, -1])
def test_an_id_is_a_positive_integer(value: Any) -> None:
    refuses(with_header(Abort(7), header_of(Abort(7)) | {"fields": {"id": value}}), match=r"Abort\.id")


def test_a_list_that_is_too_long_is_refused() -> None:
    status = Status(1, (1,))
    raw = header_of(status)
    raw["fields"]["open_ids"] = [1] * 100_001
    refuses(with_header(status, raw), match="longer than 100000")


def test_a_float_is_a_finite_number() -> None:
    prefill = next(m for m in INSTANCES if isinstance(m, Prefill))
    for value in (float("nan"), float("inf"), float("-inf")):
        raw = header_of(prefill)
        raw["fields"]["sampling"]["temperature"] = value
        refuses(with_header(prefill, raw), match="not a finite number")


@pytest.mark.parametrize("depth", [10, 400, 1000, 1020, 5000])
@pytest.mark.parametrize("entry", ["version", "kind", "epoch", "fields", "id"])
def test_deep_nesting_is_refused(depth: int, entry: str) -> None:
    raw = header_of(Abort(7))
    marker = "here it goes"
    (raw["fields"] if entry == "id" else raw)[entry] = marker
    head, tail = msgpack.packb(raw).split(msgpack.packb(marker))
    refuses([head + b"\x91" * depth + b"\x01" + tail])


@pytest.mark.parametrize("depth", [10, 1000])
def test_deep_nesting_in_an_enum_is_refused(depth: int) -> None:
    hello = next(m for m in INSTANCES if isinstance(m, Hello))
    head, tail = wire(hello)[0].split(msgpack.packb(hello.role.value))
    refuses([head + b"\x91" * depth + b"\x01" + tail])


def test_a_long_foreign_value_is_cut_in_the_error() -> None:
    raw = header_of(Abort(7)) | {"version": "x" * 100_000}
    with pytest.raises(RemoteProtocolError) as caught:
        CODEC.decode(with_header(Abort(7), raw))
    assert len(str(caught.value)) < 200


def test_no_frames_are_no_message() -> None:
    refuses([])


def test_surplus_frames_are_refused() -> None:
    for message in INSTANCES:
        if not isinstance(message, Chunk):
            refuses([*wire(message), b""], match="payload frames")


def test_missing_frames_are_refused() -> None:
    for message in INSTANCES:
        if len(wire(message)) > 1 and not isinstance(message, Chunk):
            refuses(wire(message)[:-1], match="payload frames")


def test_an_array_of_a_broken_number_of_bytes_is_refused() -> None:
    prefill = next(m for m in INSTANCES if isinstance(m, Prefill))
    refuses([*wire(prefill)[:-1], b"\0" * 7], match="not a whole number of items")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_float_in_an_array_is_a_finite_number(value: float, place: int) -> None:
    values = float32s([-0.5, 3e38, 3e38])
    CODEC.decode(wire(PromptLogprobs(1, values)))  # the largest, though their sum is none
    values[place] = value
    refuses(wire(PromptLogprobs(1, values)), match=r"PromptLogprobs\.logprobs: not a finite number")
    refuses(wire(PromptLogprobs(1, top_logprobs=values)), match=r"top_logprobs: not a finite number")


def test_frames_and_headers_beyond_the_limits_are_refused() -> None:
    chunk = Chunk(1, 0, 1, 1)
    refuses([wire(chunk)[0], bytes(MAX_FRAME_BYTES + 1)], match="too large")
    refuses([wire(chunk)[0], *[b""] * (MAX_FRAMES + 1)], match="too large")
    refuses([bytes(MAX_HEADER_BYTES + 1)], match="header too large")


def test_tokens_that_do_not_add_up_are_refused() -> None:
    tokens = Tokens((7,), (), int32s([0]), int32s([2]), int32s([1, 2]))
    header, first, counts, token_ids = wire(tokens)
    refuses([header, first, counts, token_ids[:4]], match="do not add up")
    refuses([header, b"", counts, token_ids], match="differ in length")
    refuses([header, first, bytes(int32s([-2])), token_ids], match="do not add up")


@pytest.mark.parametrize("value", [Abort(7), {"a": 1}, [1, 2], print])
def test_a_pickle_is_refused(value: Any) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        refuses([pickle.dumps(value, protocol)])


def test_a_truncated_header_is_refused() -> None:
    for message in INSTANCES:
        header, *payload = wire(message)
        for length in range(len(header)):
            refuses([header[:length], *payload])
