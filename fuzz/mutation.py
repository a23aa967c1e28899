"""Random changes of bytes, and of what JSON or msgpack can say."""

from __future__ import annotations

import random
from typing import Any

from tests.wire.raw import ANYTHING

_BYTES = (
    b"\x00",
    b"\xff",
    b"\xc0",
    b"\xc1",
    b"\x7f",
    b"\x80",
    b"\xdf\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
)
_NUMBERS = (0, 1, -1, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
_MOST_COPIES = 200


def changed_bytes(data: bytes, draw: random.Random) -> bytes:
    """Flip, cut, insert, replace or double some bytes, one to three times."""
    new = bytearray(data)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(new) + 1)
        end = min(len(new), at + draw.randint(1, 8))
        match draw.randrange(6):
            case 0 if at < len(new):
                new[at] ^= 1 << draw.randrange(8)
            case 1 if at < len(new):
                new[at] = draw.randrange(256)
            case 2:
                del new[at:end]
            case 3:
                new[at:at] = draw.choice(_BYTES)
            case 4:
                new[at:at] = new[at:end]
            case _:
                new[at:end] = draw.randbytes(draw.randint(0, 8))
    return bytes(new)


def changed_tree(tree: Any, draw: random.Random, values: tuple[Any, ...] = ANYTHING) -> Any:
    """Change one value somewhere in lists and maps: another one, none, one more, or under another name."""
    if isinstance(tree, dict) and tree and draw.random() < 0.9:
        key = draw.choice(list(tree))
        new = dict(tree)
        match draw.randrange(12):
            case 0:
                del new[key]
            case 1:
                new[draw.choice(("x", "", f"{key}_", b"x", "kind"))] = tree[key]
            case 2:
                new[key] = tree[draw.choice(list(tree))]
            case _:
                new[key] = changed_tree(tree[key], draw, values)
        return new
    if isinstance(tree, list | tuple) and tree and draw.random() < 0.8:
        items = list(tree)
        at = draw.randrange(len(items))
        match draw.randrange(6):
            case 0:
                del items[at]
            case 1:
                items[at:at] = items[at : at + 1] * draw.randint(1, _MOST_COPIES)
            case _:
                items[at] = changed_tree(items[at], draw, values)
        return items
    return _changed_leaf(tree, draw, values)


def _changed_leaf(leaf: Any, draw: random.Random, values: tuple[Any, ...]) -> Any:
    if draw.random() < 0.5:
        if type(leaf) is int:
            return max(
                -(2**63), min(2**64 - 1, draw.choice((leaf + 1, leaf - 1, -leaf, draw.choice(_NUMBERS))))
            )
        if type(leaf) is float:
            return draw.choice((-leaf, leaf * 1e300, leaf / 1e300, int(leaf) if abs(leaf) < 1e15 else 0.0))
        if type(leaf) is str:
            return leaf[: draw.randint(0, len(leaf))] + draw.choice(("", "x", "\0", "é", "\U0001f600", leaf))
        if type(leaf) is bytes:
            return changed_bytes(leaf, draw)
    if draw.random() < 0.1:
        return [leaf] if draw.random() < 0.5 else {"a": leaf}
    return draw.choice(values)
