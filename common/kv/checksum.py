"""The checksum of a KV page, equal on both ends of a hand-over exactly when the bytes are.

Knows no message: who computes it, and what a mismatch means, is the transfer's business.

    checksum(page, index) = B(index) * sum over positions of word[position] * A(position)   mod 2^64

`word` are the page's int32 words in the order [layers, 2, page_size, kv_heads, head_dim], `index` is the
page's logical index in its request, A and B are odd pseudo-random weights. An odd weight is invertible
mod 2^64, so no flipped bit can go unseen; A differs between positions, so words that moved are seen; B
differs between pages, so pages that changed places are seen.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from common.kv.pool import KVPool

_MASK = 2**64 - 1
_BATCH_BYTES = 16 << 20


def page_checksums(pool: KVPool, page_ids: Sequence[int], first_index: int) -> array[int]:
    """Return one unsigned 64-bit checksum a page; the first page has logical index `first_index`.

    On a GPU it is computed on the current stream, and waited for.
    """
    if not page_ids:
        return array("Q")
    layers, page_bytes = pool.layout.layers, pool.layout.page_bytes
    weights = _position_weights(page_bytes // 4, pool.device).view(layers, 1, -1)
    most = max(1, _BATCH_BYTES // page_bytes)
    sums: list[int] = []
    for at in range(0, len(page_ids), most):
        pages = pool.gather(page_ids[at : at + most]).view(torch.int32).view(layers, -1, weights.shape[-1])
        # int32 * int64 is int64, which wraps; twice the size of the pages, so not of all at once.
        sums += (pages * weights).sum((0, 2)).tolist()
    return array("Q", (s * _index_weight(first_index + i) & _MASK for i, s in enumerate(sums)))


@lru_cache(maxsize=4)
def _position_weights(num_words: int, device: torch.device) -> Tensor:
    """Return A: [num_words] i64, odd.

    SplitMix64's finalizer (Steele et al., "Fast splittable pseudorandom number generators", 2014).
    """
    x = torch.arange(1, num_words + 1, dtype=torch.int64, device=device) * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return (x ^ _shift(x, 31)) | 1


def _index_weight(index: int) -> int:
    """Return B: the same function of another counter."""
    x = (index + 1) * 0xD1342543DE82EF95 & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31 | 1


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right without the sign."""
    return torch.bitwise_and(torch.bitwise_right_shift(x, bits), 2 ** (64 - bits) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
