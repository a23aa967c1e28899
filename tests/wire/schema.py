"""Reads the annotations of messages, independently of the codec: is this a value of that field?"""

from __future__ import annotations

import math
import types
from array import array
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from common.codec import Frames, ItemType, MaxLen, Range

DEFAULT_RANGE = Range(0, 2**63 - 1)


@dataclass(frozen=True)
class Shape:
    """An annotation taken apart: the plain type and its notes."""

    kind: Any
    bounds: Range | None = None
    max_len: int | None = None
    typecode: str | None = None
    takes_frames: bool = False

    @property
    def optional(self) -> Any | None:
        """The T of `T | None`, with the notes of the whole, or None."""
        if get_origin(self.kind) not in (Union, types.UnionType):
            return None
        (inner,) = (arg for arg in get_args(self.kind) if arg is not type(None))
        notes = tuple(n for n in (self.bounds, MaxLen(self.max_len) if self.max_len else None) if n)
        return Annotated[inner, *notes] if notes else inner


def shape_of(hint: Any) -> Shape:
    """Take an annotation apart."""
    notes: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *rest = get_args(hint)
        notes = tuple(rest)
    return Shape(
        hint,
        next((n for n in notes if isinstance(n, Range)), None),
        next((n.items for n in notes if isinstance(n, MaxLen)), None),
        next((n.code for n in notes if isinstance(n, ItemType)), None),
        any(isinstance(n, Frames) for n in notes),
    )


def hints_of(kind: type) -> dict[str, Any]:
    """Name and annotation of every field."""
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name] for f in fields(kind)}


def conforms(hint: Any, value: Any) -> bool:
    """Say whether a value is exactly what the annotation allows."""
    shape = shape_of(hint)
    kind = shape.kind
    if shape.takes_frames:
        return type(value) is tuple and all(isinstance(f, bytes | bytearray | memoryview) for f in value)
    if shape.typecode is not None:
        is_right = isinstance(value, array) and value.typecode == shape.typecode
        return is_right and (shape.typecode != "f" or all(map(math.isfinite, value)))
    if shape.optional is not None:
        return value is None or conforms(shape.optional, value)
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        return (
            type(value) is tuple
            and len(value) <= (shape.max_len or 65536)
            and all(conforms(item, v) for v in value)
        )
    if get_origin(kind) is dict:
        return type(value) is dict and all(
            type(k) is str and conforms(get_args(kind)[1], v) for k, v in value.items()
        )
    if is_dataclass(kind):
        return type(value) is kind and all(
            conforms(hint, getattr(value, name)) for name, hint in hints_of(kind).items()
        )
    return _conforms_scalar(shape, value)


def _conforms_scalar(shape: Shape, value: Any) -> bool:
    if type(value) is not shape.kind:
        return False
    if isinstance(value, Enum | bool):
        return True
    if isinstance(value, str | bytes):
        return len(value) <= (shape.max_len or 4096)
    bounds = shape.bounds or (DEFAULT_RANGE if shape.kind is int else Range(-math.inf, math.inf))
    return math.isfinite(value) and bounds.low <= value <= bounds.high
