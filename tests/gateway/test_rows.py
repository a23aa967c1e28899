"""Long lists are written in slices, and the bytes are those of a plain list."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.rows import SLICE_ROWS, Rows, to_json, to_json_in_slices

SCALARS = st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5)
PARTS = st.lists(st.lists(SCALARS, max_size=3), max_size=3)
# In the place of a list of lists, `Rows` of these lists one after the other.
VALUES = st.recursive(
    SCALARS | PARTS.map(lambda parts: ("rows", parts)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def plain(value: Any) -> Any:
    """What it is without rows."""
    match value:
        case ("rows", parts):
            return [item for part in parts for item in part]
        case list():
            return [plain(item) for item in value]
        case dict():
            return {key: plain(item) for key, item in value.items()}
    return value


def with_rows(value: Any) -> Any:
    """The same with rows."""
    match value:
        case ("rows", parts):
            return Rows(*parts)
        case list():
            return [with_rows(item) for item in value]
        case dict():
            return {key: with_rows(item) for key, item in value.items()}
    return value


@given(VALUES)
def test_either_way_it_is_the_same_json(value: Any) -> None:
    expected = json.dumps(plain(value), ensure_ascii=False, separators=(",", ":")).encode()
    assert to_json(with_rows(value)) == expected
    assert asyncio.run(to_json_in_slices(with_rows(value))) == expected


@pytest.mark.parametrize("num", [0, 1, SLICE_ROWS - 1, SLICE_ROWS, SLICE_ROWS + 1, 10 * SLICE_ROWS])
def test_others_get_their_turns_between(num: int) -> None:
    made = 0

    def rows() -> Any:
        nonlocal made
        for i in range(num):
            made += 1
            yield {"i": i}

    async def story() -> None:
        seen = []

        async def other() -> None:
            while True:
                seen.append(made)
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        data = await to_json_in_slices({"a": Rows((None,), rows()), "b": 7})
        beside.cancel()
        assert json.loads(data) == {"a": [None, *({"i": i} for i in range(num))], "b": 7}
        steps = [after - before for before, after in zip([0, *seen], [*seen, made], strict=True)]
        assert max(steps) <= SLICE_ROWS

    asyncio.run(story())


def test_what_is_no_json_is_none() -> None:
    for value in ({1, 2}, object(), b"a"):
        with pytest.raises(TypeError):
            to_json({"a": value})
