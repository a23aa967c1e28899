"""How prompts' chunks are cut into blocks of query tokens, one a program. Host values in, a step's out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from common.device.packed import PackedBlock


@dataclass(frozen=True, slots=True)
class ExtendBlocks:
    """The blocks of a step on the device, as many as steps of so many tokens and requests can have at most.

    What is over begins behind the tokens of its request.
    """

    requests: Tensor  # [blocks] i32
    starts: Tensor  # [blocks] i32, token of the request's chunk
    token_starts: Tensor  # [requests + 1] i32, where each chunk begins among the step's tokens
    prefix_lens: Tensor  # [requests] i32


def pack_blocks(
    block: PackedBlock, prefix_lens: Sequence[int], extend_lens: Sequence[int], queries: int
) -> ExtendBlocks:
    """Add the blocks of a step to its metadata.

    Args:
        block: the step's host metadata.
        prefix_lens: tokens before each chunk.
        extend_lens: tokens of each chunk.
        queries: tokens of a block at the most.
    """
    lens = np.asarray(extend_lens)
    counts = -(-lens // queries)
    counts[-1] += int(lens.sum()) // queries + len(lens) - int(counts.sum())
    first_blocks = np.cumsum(counts) - counts
    starts = (np.arange(int(counts.sum())) - np.repeat(first_blocks, counts)) * queries
    return ExtendBlocks(
        requests=block.add(np.repeat(np.arange(len(lens)), counts), np.int32),
        starts=block.add(starts, np.int32),
        token_starts=block.add(np.concatenate(([0], np.cumsum(lens))), np.int32),
        prefix_lens=block.add(prefix_lens, np.int32),
    )
