"""Frames <-> message: one msgpack header, then raw payload frames. Strict both ways.

A message is a frozen dataclass whose annotations are the schema. Scalars, tuples, enums and nested
dataclasses travel in the header by name; an `array` (token ids, page ids, checksums) travels as a raw frame
of its own, and a field annotated `Frames` takes all frames that are left (KV bytes).

This file knows no concrete message: `Codec` is given the classes. Whatever is not exactly a message of the
schema (unknown version, kind or field, missing field, wrong type or range, too large) raises
RemoteProtocolError; nothing on the wire names code, and nothing is imported, evaluated or unpickled.
"""

from __future__ import annotations

import math
import reprlib
import struct
import types
import typing
from array import array
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgpack

from common.errors import LocalProtocolError, OtherVersion, RemoteProtocolError

PROTOCOL_VERSION = 1
MAX_HEADER_BYTES = 1 << 20
MAX_FRAME_BYTES = 4 << 20
MAX_FRAMES = 4096
MAX_STR = 4096
DEFAULT_MAX_LEN = 65536

Buffer = bytes | bytearray | memoryview
if TYPE_CHECKING:
    IntArray = array[int]
    FloatArray = array[float]
else:  # Python 3.11 cannot subscript it
    IntArray = FloatArray = array


@dataclass(frozen=True, slots=True)
class Range:
    """Inclusive bounds of a number."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class MaxLen:
    """Most items of a tuple, an array or a dict, or characters of a string."""

    items: int


@dataclass(frozen=True, slots=True)
class ItemType:
    """Typecode of an array field, as in the `array` module: i (int32), f (float32) or Q (uint64)."""

    code: str


@dataclass(frozen=True, slots=True)
class Frames:
    """Marks the field that takes all remaining frames, as they are."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message as it travels: who sent it (epoch of the process) and its place in the sender's sequence."""

    epoch: int
    seq: int
    message: Any


def _bad(path: str, why: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"{path}: {why}")


def _show(value: Any) -> str:
    """Write a peer's value into an error: cut, because repr of deep nesting raises RecursionError."""
    return reprlib.repr(value)


def _are_finite(floats: Buffer) -> bool:
    import numpy as np  # by whom such arrays are read it is loaded anyway; the supervisor does without

    return bool(np.isfinite(np.frombuffer(floats, np.float32)).all())  # a million in 0.2 ms


@dataclass(frozen=True, slots=True)
class _Field:
    """How one field is written into a header and read from it."""

    write: Callable[[Any], Any]
    read: Callable[[Any, str], Any]
    # All items of a list at once, or None when one is wrong: `read` then says which.
    read_many: Callable[[list[Any]], tuple[Any, ...] | None] | None = None


def _scalar(kind: type[Any], bounds: Range | None, max_len: int | None) -> _Field:
    def read(value: Any, path: str) -> Any:
        if kind is float and type(value) is int:
            value = float(value)
        # `type is`, not isinstance: True is an int to isinstance.
        if type(value) is not kind:
            raise _bad(path, f"expected {kind.__name__}, got {type(value).__name__}")
        if kind is float and not math.isfinite(value):
            raise _bad(path, "not a finite number")
        if bounds is not None and not bounds.low <= value <= bounds.high:
            raise _bad(path, f"{value} is not within {bounds.low}..{bounds.high}")
        if kind in (str, bytes) and len(value) > (max_len or MAX_STR):
            raise _bad(path, f"longer than {max_len or MAX_STR}")
        return value

    def read_many(values: list[Any]) -> tuple[Any, ...] | None:
        if set(map(type, values)) <= {int} and (
            not values or bounds is None or (bounds.low <= min(values) and max(values) <= bounds.high)
        ):
            return tuple(values)
        return None

    return _Field(lambda value: value, read, read_many if kind is int else None)


def _enum(kind: type[Enum]) -> _Field:
    def read(value: Any, path: str) -> Enum:
        # The type first: Enum would put the repr of whatever came into its own error.
        try:
            if type(value) is str:
                return kind(value)
        except ValueError:
            pass
        raise _bad(path, f"{_show(value)} is no {kind.__name__}")

    return _Field(lambda value: value.value, read)


def _optional(inner: _Field) -> _Field:
    return _Field(
        lambda value: None if value is None else inner.write(value),
        lambda value, path: None if value is None else inner.read(value, path),
    )


def _tuple(inner: _Field, max_len: int) -> _Field:
    def read(value: Any, path: str) -> tuple[Any, ...]:
        if type(value) is not list:
            raise _bad(path, f"expected a list, got {type(value).__name__}")
        if len(value) > max_len:
            raise _bad(path, f"longer than {max_len}")
        if inner.read_many is not None and (items := inner.read_many(value)) is not None:
            return items
        return tuple(inner.read(item, f"{path}[{i}]") for i, item in enumerate(value))

    return _Field(lambda value: [inner.write(item) for item in value], read)


def _mapping(inner: _Field, max_len: int) -> _Field:
    key = _scalar(str, None, None)

    def read(value: Any, path: str) -> dict[str, Any]:
        if type(value) is not dict:
            raise _bad(path, f"expected a map, got {type(value).__name__}")
        if len(value) > max_len:
            raise _bad(path, f"longer than {max_len}")
        return {key.read(k, path): inner.read(v, f"{path}.{k}") for k, v in value.items()}

    return _Field(lambda value: {k: inner.write(v) for k, v in value.items()}, read)


def _struct(kind: type) -> _Field:
    table, required = _header_fields(kind)

    def write(value: Any) -> dict[str, Any]:
        return {name: field.write(getattr(value, name)) for name, field in table.items()}

    def read(value: Any, path: str) -> Any:
        return kind(**_read_fields(value, table, required, path))

    return _Field(write, read)


def _read_fields(value: Any, table: dict[str, _Field], required: frozenset[str], path: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise _bad(path, f"expected a map, got {type(value).__name__}")
    unknown = value.keys() - table.keys()
    if unknown:
        raise _bad(path, f"unknown field {_show(min(map(str, unknown)))}")
    missing = required - value.keys()
    if missing:
        raise _bad(path, f"missing field {min(missing)!r}")
    return {name: table[name].read(item, f"{path}.{name}") for name, item in value.items()}


def _field_for(hint: Any) -> _Field:
    """Build reader and writer from an annotation; an annotation that has no wire form is our own bug."""
    bounds: Range | None = None
    max_len: int | None = None
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
        for note in notes:
            if isinstance(note, Range):
                bounds = note
            elif isinstance(note, MaxLen):
                max_len = note.items
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        inner = [arg for arg in get_args(hint) if arg is not type(None)]
        if len(inner) != 1:
            raise LocalProtocolError(f"no wire form for {hint}")
        note = tuple(n for n in (bounds, MaxLen(max_len) if max_len else None) if n is not None)
        return _optional(_field_for(Annotated[inner[0], *note] if note else inner[0]))
    if origin is tuple:
        return _tuple(_field_for(get_args(hint)[0]), max_len or DEFAULT_MAX_LEN)
    if origin is dict:
        return _mapping(_field_for(get_args(hint)[1]), max_len or DEFAULT_MAX_LEN)
    if hint is int:
        return _scalar(int, bounds or Range(0, 2**63 - 1), None)
    if hint in (bool, float, str, bytes):
        return _scalar(hint, bounds, max_len)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum(hint)
    if is_dataclass(hint):
        return _struct(typing.cast(type, hint))
    raise LocalProtocolError(f"no wire form for {hint}")


def _is_payload(hint: Any) -> bool:
    return any(isinstance(note, ItemType | Frames) for note in getattr(hint, "__metadata__", ()))


def _header_fields(kind: type) -> tuple[dict[str, _Field], frozenset[str]]:
    hints = get_type_hints(kind, include_extras=True)
    table = {f.name: _field_for(hints[f.name]) for f in fields(kind) if not _is_payload(hints[f.name])}
    required = frozenset(
        f.name
        for f in fields(kind)
        if f.name in table and f.default is MISSING and f.default_factory is MISSING
    )
    return table, required


@dataclass(frozen=True, slots=True)
class _Kind:
    """The wire form of one message class."""

    cls: type
    table: dict[str, _Field]
    required: frozenset[str]
    arrays: tuple[tuple[str, str, int], ...]  # name, typecode, most items; one frame each, in this order
    rest: str | None  # the field that takes the remaining frames

    @staticmethod
    def of(cls: type) -> _Kind:
        hints = get_type_hints(cls, include_extras=True)
        arrays: list[tuple[str, str, int]] = []
        rest: str | None = None
        for field in fields(cls):
            for note in getattr(hints[field.name], "__metadata__", ()):
                if isinstance(note, ItemType):
                    arrays.append((field.name, note.code, MAX_FRAME_BYTES // array(note.code).itemsize))
                elif isinstance(note, Frames):
                    rest = field.name
        table, required = _header_fields(cls)
        return _Kind(cls, table, required, tuple(arrays), rest)


@dataclass(frozen=True, slots=True)
class Header:
    """A decoded header whose payload frames may still be on the socket."""

    epoch: int
    seq: int
    kind: str
    values: dict[str, Any]


class Codec:
    """Encode and decode the given message classes; the kind on the wire is the class's name."""

    def __init__(self, message_types: Sequence[type]) -> None:
        self._kinds = {cls.__name__: _Kind.of(cls) for cls in message_types}

    def encode(self, envelope: Envelope) -> list[Buffer]:
        """Return the frames of a message.

        Raises:
            LocalProtocolError: the message is none of ours, or larger than the limits.
        """
        message = envelope.message
        kind = self._kinds.get(type(message).__name__)
        if kind is None or type(message) is not kind.cls:
            raise LocalProtocolError(f"no message: {type(message).__name__}")
        body = {name: field.write(getattr(message, name)) for name, field in kind.table.items()}
        header = msgpack.packb(
            {
                "version": PROTOCOL_VERSION,
                "kind": type(message).__name__,
                "epoch": envelope.epoch,
                "seq": envelope.seq,
                "fields": body,
            }
        )
        frames: list[Buffer] = [header]
        for name, code, _ in kind.arrays:
            value = getattr(message, name)
            if value.typecode != code:
                raise LocalProtocolError(f"{name} is an array of {value.typecode!r}, not {code!r}")
            frames.append(memoryview(value).cast("B") if len(value) else b"")
        if kind.rest is not None:
            frames.extend(getattr(message, kind.rest))
        if (
            len(header) > MAX_HEADER_BYTES
            or len(frames) > MAX_FRAMES
            or any(memoryview(frame).nbytes > MAX_FRAME_BYTES for frame in frames[1:])
        ):
            raise LocalProtocolError(f"{type(message).__name__} is larger than the protocol's limits")
        return frames

    def decode_header(self, data: Buffer) -> Header:
        """Check and decode a header alone, so that a receiver can choose where its payload goes.

        Raises:
            RemoteProtocolError: it is not exactly a header of this protocol.
        """
        if memoryview(data).nbytes > MAX_HEADER_BYTES:
            raise RemoteProtocolError("header too large")
        try:
            raw = msgpack.unpackb(data, strict_map_key=True)
        except (ValueError, TypeError, msgpack.exceptions.UnpackException, struct.error, RecursionError) as e:
            raise RemoteProtocolError(f"header is not msgpack: {type(e).__name__}") from None
        if type(raw) is not dict:
            raise RemoteProtocolError("header is no map")
        if raw.get("version") != PROTOCOL_VERSION or type(raw["version"]) is not int:
            raise OtherVersion(
                f"protocol version {_show(raw.get('version'))}; this process speaks {PROTOCOL_VERSION}"
            )
        if raw.keys() != {"version", "kind", "epoch", "seq", "fields"}:
            raise RemoteProtocolError("header has missing or unknown entries")
        name = raw["kind"]
        kind = self._kinds.get(name) if type(name) is str else None
        if kind is None:
            raise RemoteProtocolError(f"unknown kind {_show(name)}")
        counter = _scalar(int, Range(0, 2**63 - 1), None)
        values = _read_fields(raw["fields"], kind.table, kind.required, name)
        return Header(
            counter.read(raw["epoch"], "epoch"),
            counter.read(raw["seq"], "seq"),
            name,
            values,
        )

    def decode_payload(self, header: Header, payload: Sequence[Buffer]) -> Envelope:
        """Join a header with its payload frames.

        Raises:
            RemoteProtocolError: the frames do not fit the message.
        """
        kind = self._kinds[header.kind]
        if len(payload) < len(kind.arrays) or (kind.rest is None and len(payload) > len(kind.arrays)):
            raise _bad(header.kind, f"{len(payload)} payload frames")
        if len(payload) > MAX_FRAMES or any(memoryview(f).nbytes > MAX_FRAME_BYTES for f in payload):
            raise _bad(header.kind, "payload too large")
        values = dict(header.values)
        for (name, code, _), frame in zip(kind.arrays, payload, strict=False):
            items = array(code)
            if memoryview(frame).nbytes % items.itemsize:
                raise _bad(f"{header.kind}.{name}", "not a whole number of items")
            items.frombytes(frame)
            if code == "f" and not _are_finite(frame):
                raise _bad(f"{header.kind}.{name}", "not a finite number")
            values[name] = items
        if kind.rest is not None:
            values[kind.rest] = tuple(payload[len(kind.arrays) :])
        try:
            message = kind.cls(**values)
        except ValueError as error:  # a message class may check what relates its fields
            raise _bad(header.kind, str(error)) from None
        return Envelope(header.epoch, header.seq, message)

    def decode(self, frames: Sequence[Buffer]) -> Envelope:
        """Decode a whole message.

        Raises:
            RemoteProtocolError: the frames are not exactly a message of this protocol.
        """
        if not frames:
            raise RemoteProtocolError("no frames")
        return self.decode_payload(self.decode_header(frames[0]), frames[1:])
