"""Any value of any message, derived from the annotations that are the schema."""

from __future__ import annotations

from array import array
from enum import Enum
from typing import Any, get_args, get_origin

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from common.codec import Envelope
from common.messages import MESSAGES, Begun, Finish, RequestLogprobs, Tokens, int32s
from common.request import TokenLogprobs
from tests.wire.schema import DEFAULT_RANGE, Shape, hints_of, shape_of

COUNTERS = st.integers(0, 2**63 - 1)


def values_of(hint: Any) -> SearchStrategy[Any]:
    """Values that an annotation allows, its bounds among them."""
    shape = shape_of(hint)
    kind = shape.kind
    if shape.takes_frames:
        return st.lists(st.binary(max_size=40), max_size=4).map(tuple)
    if shape.typecode is not None:
        return arrays(shape.typecode)
    if shape.optional is not None:
        return st.none() | values_of(shape.optional)
    if get_origin(kind) is tuple:
        return st.lists(values_of(get_args(kind)[0]), max_size=min(4, shape.max_len or 4)).map(tuple)
    if get_origin(kind) is dict:
        return st.dictionaries(st.text(max_size=8), values_of(get_args(kind)[1]), max_size=4)
    if issubclass(kind, Enum):
        return st.sampled_from(kind)
    if kind in (bool, int, float, str, bytes):
        return scalars(shape)
    return messages_of(kind)


def scalars(shape: Shape) -> SearchStrategy[Any]:
    """Values of a plain type."""
    if shape.kind is bool:
        return st.booleans()
    if shape.kind is int:
        bounds = shape.bounds or DEFAULT_RANGE
        return st.integers(int(bounds.low), int(bounds.high))
    if shape.kind is float:
        low, high = (None, None) if shape.bounds is None else (shape.bounds.low, shape.bounds.high)
        return st.floats(low, high, allow_nan=False, allow_infinity=False)
    return st.binary(max_size=shape.max_len) if shape.kind is bytes else st.text(max_size=20)


def arrays(typecode: str) -> SearchStrategy[Any]:
    """Arrays of the whole range of their item type; floats are finite."""
    if typecode == "f":
        floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
        return st.lists(floats, max_size=8).map(lambda items: array("f", items))
    bits = 8 * array(typecode).itemsize
    low, high = (0, 2**bits - 1) if typecode.isupper() else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return st.lists(st.integers(low, high), max_size=8).map(lambda items: array(typecode, items))


@st.composite
def tokens(draw: DrawFn) -> Tokens:
    """`Tokens`, whose fields are related."""
    counts = draw(st.lists(st.integers(0, 3), max_size=4))
    size = len(counts)
    ids = draw(st.lists(st.integers(1, 2**63 - 1), min_size=size, max_size=size, unique=True))
    int32 = st.integers(-(2**31), 2**31 - 1)
    values = messages_of(TokenLogprobs)
    logprobs = [
        RequestLogprobs(request_id, tuple(draw(st.lists(values, min_size=count, max_size=count))))
        for request_id, count in zip(ids, counts, strict=True)
        if draw(st.booleans())
    ]
    return Tokens(
        tuple(ids),
        tuple(draw(st.lists(messages_of(Finish), max_size=2))),
        int32s(draw(st.lists(int32, min_size=size, max_size=size))),
        int32s(counts),
        int32s(draw(st.lists(int32, min_size=sum(counts), max_size=sum(counts)))),
        tuple(logprobs),
        tuple(draw(st.lists(messages_of(Begun), max_size=2))),
    )


def messages_of(kind: type) -> SearchStrategy[Any]:
    """Instances of one message class, or of a dataclass inside one."""
    if kind is Tokens:
        return tokens()
    return st.builds(kind, **{name: values_of(hint) for name, hint in hints_of(kind).items()})


def envelopes() -> SearchStrategy[Envelope]:
    """Any message of the protocol on its way."""
    return st.builds(Envelope, COUNTERS, COUNTERS, st.one_of([messages_of(kind) for kind in MESSAGES]))
