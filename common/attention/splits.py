"""How the reading of a decode step is cut into splits, so that every multiprocessor has the same share.

A split is a request and a range of its tokens; all have the same number of tokens, but the last of a request.
Their number is bounded by the padded batch alone, so that a CUDA graph of that batch holds for any lengths:
the smallest split that keeps within the bound is taken. Host values in, a step's block out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from common.device.packed import PackedBlock

SPLIT_UNIT_TOKENS = 64  # what the kernel reads at once


@dataclass(frozen=True, slots=True)
class DecodeSplits:
    """The splits of a step on the device."""

    requests: Tensor  # [splits] i32, -1: none
    starts: Tensor  # [splits] i32, token
    tokens: Tensor  # [1] i32, of a split
    indptr: Tensor  # [requests + 1] i32: request i has the splits indptr[i] to indptr[i + 1]


def split_tokens(seq_lens: Sequence[int], most: int) -> int:
    """Return the fewest tokens a split (a multiple of the unit) that make `most` splits or fewer.

    `most` is not below the number of requests.
    """
    lens = np.asarray(seq_lens)
    low, high = 1, -(-int(lens.max()) // SPLIT_UNIT_TOKENS)
    while low < high:
        middle = (low + high) // 2
        if int(np.sum(-(-lens // (middle * SPLIT_UNIT_TOKENS)))) <= most:
            high = middle
        else:
            low = middle + 1
    return low * SPLIT_UNIT_TOKENS


def pack_splits(block: PackedBlock, seq_lens: Sequence[int], padded: int, spare: int) -> DecodeSplits:
    """Add the splits of a step to its block.

    Args:
        block: the step's host metadata.
        seq_lens: tokens to read, a request.
        padded: requests on the device; the ones over are padding and have no splits.
        spare: splits beyond one for each request.
    """
    size = split_tokens(seq_lens, padded + spare)
    counts = -(-np.asarray(seq_lens) // size)
    indptr = np.zeros(padded + 1, np.int32)
    np.cumsum(counts, out=indptr[1 : len(counts) + 1])
    total = int(indptr[len(counts)])
    indptr[len(counts) + 1 :] = total
    requests = np.full(padded + spare, -1, np.int32)
    requests[:total] = np.repeat(np.arange(len(counts)), counts)
    starts = np.zeros(padded + spare, np.int32)
    starts[:total] = (np.arange(total) - np.repeat(indptr[: len(counts)], counts)) * size
    return DecodeSplits(
        requests=block.add(requests, np.int32),
        starts=block.add(starts, np.int32),
        tokens=block.add([size], np.int32),
        indptr=block.add(indptr, np.int32),
    )
