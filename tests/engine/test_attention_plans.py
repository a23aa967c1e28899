"""Every token of a step is read or computed by one program, whatever the lengths."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from common.attention.blocks import pack_blocks
from common.attention.splits import SPLIT_UNIT_TOKENS, pack_splits
from common.device.packed import PackedBlock

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40), st.integers(0, 9), st.integers(0, 80))
def test_splits_read_every_token_once_and_keep_their_bound(lens: list[int], pad: int, spare: int) -> None:
    padded = len(lens) + pad
    splits = pack_splits(PackedBlock(CPU), lens, padded, spare)
    assert len(splits.requests) == len(splits.starts) == padded + spare, "by the padded batch alone"
    size = int(splits.tokens)
    assert size % SPLIT_UNIT_TOKENS == 0
    read: dict[int, list[int]] = {i: [] for i in range(len(lens))}
    indptr = splits.indptr.tolist()
    for at, (request, start) in enumerate(zip(splits.requests.tolist(), splits.starts.tolist(), strict=True)):
        if request < 0:
            continue
        assert indptr[request] <= at < indptr[request + 1]
        read[request] += range(start, min(start + size, lens[request]))
    assert all(read[i] == list(range(n)) for i, n in enumerate(lens))
    assert indptr[len(lens) :] == [indptr[len(lens)]] * (pad + 1), "padding has none"
    if size > SPLIT_UNIT_TOKENS:  # smaller ones would be too many
        smaller = size - SPLIT_UNIT_TOKENS
        assert sum(-(-n // smaller) for n in lens) > padded + spare


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=12),
    st.sampled_from([1, 8, 16, 64]),
)
def test_blocks_cover_every_token_of_every_chunk_once_and_keep_their_number(
    chunks: list[tuple[int, int]], queries: int
) -> None:
    prefix_lens, extend_lens = zip(*chunks, strict=True)
    blocks = pack_blocks(PackedBlock(CPU), prefix_lens, extend_lens, queries)
    assert len(blocks.requests) == len(blocks.starts) == sum(extend_lens) // queries + len(chunks)
    token_starts = blocks.token_starts.tolist()
    covered = [
        token_starts[request] + offset
        for request, start in zip(blocks.requests.tolist(), blocks.starts.tolist(), strict=True)
        for offset in range(start, min(start + queries, extend_lens[request]))
    ]
    assert covered == list(range(sum(extend_lens)))
    assert blocks.prefix_lens.tolist() == list(prefix_lens)
