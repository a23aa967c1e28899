"""Attention over pages equals torch's own over whole keys; decoding requests are grouped by length."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st

from common.attention.base import AttentionInputs
from common.attention.sdpa import SdpaAttention, group_by_length
from common.kv.layout import KVLayout
from common.kv.pool import KVPool

HEADS, KV_HEADS, HEAD_DIM, PAGE = 8, 2, 8, 16


def test_a_long_prompt_is_computed_in_blocks() -> None:
    prefix, extend = 1500, 2000
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(prefix + extend, HEADS, HEAD_DIM, generator=draw)
    k, v = torch.randn(2, prefix + extend, KV_HEADS, HEAD_DIM, generator=draw)
    num_pages = -(-(prefix + extend) // PAGE)
    pool = KVPool(KVLayout(1, PAGE, KV_HEADS, HEAD_DIM, "float32"), num_pages, torch.device("cpu"))
    attention = SdpaAttention(pool, HEADS)
    pages = 1 + torch.randperm(num_pages, generator=draw)
    outputs = []
    for start, end in ((0, prefix), (prefix, prefix + extend)):
        positions = torch.arange(start, end)
        loc = pages[positions // PAGE] * PAGE + positions % PAGE
        attention.plan(AttentionInputs(pages[None], torch.tensor([end]), (start,), (end - start,), loc))
        outputs.append(attention.forward(0, q[start:end], k[start:end], v[start:end]))
    expected = F.scaled_dot_product_attention(
        *(t.transpose(0, 1)[None] for t in (q, k, v)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(torch.cat(outputs), expected[0].transpose(0, 1), rtol=0, atol=1e-5)


@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=64))
def test_every_request_is_in_one_group_and_little_is_padded(lens: list[int]) -> None:
    groups = group_by_length(lens)
    assert sorted(index for group in groups for index in group) == list(range(len(lens)))
    for group in groups:
        longest = max(lens[index] for index in group)
        assert sum(longest - lens[index] for index in group) <= 1024
        assert len(group) == 1 or longest * len(group) <= 16384


def test_requests_of_one_length_are_one_group() -> None:
    assert [sorted(group) for group in group_by_length([100] * 64)] == [list(range(64))]
