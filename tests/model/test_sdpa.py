"""Attention over pages equals torch's own over whole keys; decoding requests are grouped by length."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
        pool.data[0, loc // PAGE, 0, loc % PAGE] = k[start:end]
        pool.data[0, loc // PAGE, 1, loc % PAGE] = v[start:end]
        row, ends = torch.tensor([0]), torch.tensor([end])
        attention.plan(AttentionInputs(row, pages[None], ends, positions, loc, (start,), (end - start,)))
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


class CountProducts(TorchDispatchMode):
    """Counts the matrix products that are computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.bmm.default
        return func(*args, **(kwargs or {}))


def attend_step(spans: list[tuple[int, int]], num_decode: int) -> tuple[Tensor, Tensor, int]:
    """Attend to requests with (prefix, tokens) in one step over shuffled pages that hold NaN at first.

    Returns:
        The outputs, those of torch's own attention, and the matrix products that it took.
    """
    draw = torch.Generator().manual_seed(0)
    counts = [-(-(prefix + n) // PAGE) for prefix, n in spans]
    pool = KVPool(KVLayout(1, PAGE, KV_HEADS, HEAD_DIM, "float32"), sum(counts), torch.device("cpu"))
    pool.data[:, 1:] = torch.nan
    attention = SdpaAttention(pool, HEADS)
    shuffled = (1 + torch.randperm(sum(counts), generator=draw)).split(counts)
    table = torch.zeros(len(spans) + 1, max(counts) + 1, dtype=torch.int64)
    steps, positions, locs, expected = [], [], [], []
    for row, ((prefix, n), pages) in enumerate(zip(spans, shuffled, strict=True), 1):
        table[row, : len(pages)] = pages
        q = torch.randn(prefix + n, HEADS, HEAD_DIM, generator=draw)
        k, v = torch.randn(2, prefix + n, KV_HEADS, HEAD_DIM, generator=draw)
        at = torch.arange(prefix + n)
        pool.data[0, pages[at // PAGE], 0, at % PAGE] = k
        pool.data[0, pages[at // PAGE], 1, at % PAGE] = v
        whole = F.scaled_dot_product_attention(
            *(t.transpose(0, 1)[None] for t in (q, k, v)), is_causal=True, enable_gqa=True
        )
        expected.append(whole[0].transpose(0, 1)[prefix:])
        steps.append((q[prefix:], k[prefix:], v[prefix:]))
        positions.append(at[prefix:])
        locs.append(pages[at[prefix:] // PAGE] * PAGE + at[prefix:] % PAGE)
    prefix_lens, extend_lens = zip(*spans, strict=True)
    seq_lens = torch.tensor([prefix + n for prefix, n in spans])
    inputs = AttentionInputs(
        torch.arange(1, len(spans) + 1),
        table,
        seq_lens,
        torch.cat(positions),
        torch.cat(locs),
        prefix_lens,
        extend_lens,
        num_decode,
    )
    attention.plan(inputs)
    q, k, v = (torch.cat(parts) for parts in zip(*steps, strict=True))
    with CountProducts() as products:
        out = attention.forward(0, q, k, v)
    return out, torch.cat(expected), products.count


@given(
    prompts=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=3),
    decoding=st.lists(st.integers(1, 3000), min_size=1, max_size=6),
)
def test_prompts_and_decoding_requests_in_one_step(
    prompts: list[tuple[int, int]], decoding: list[int]
) -> None:
    spans = prompts + [(prefix, 1) for prefix in decoding]
    out, expected, _ = attend_step(spans, len(decoding))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


def test_beside_prompts_too_the_decoding_requests_are_one_group() -> None:
    _, _, products = attend_step([(16, 20), (0, 5), *[(100 + i, 1) for i in range(16)]], 16)
    assert products == 2 * 3
