"""Captured sizes hold every step that may use them, and warm-up reaches what serving will."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.attention.base import SHORT_TOKENS, is_short
from common.attention.sdpa import SdpaAttention
from common.engine.batch import ForwardMode, ScheduleBatch, prepare_for_extend
from common.engine.chunking import plan_chunks
from common.engine.cuda_graphs import decode_sizes, extend_sizes
from common.engine.future_map import ForwardInputs, FutureMap, GraphBuffers, resolve_forward_inputs
from common.engine.page_table import PageTableMirror
from common.engine.warm_up import largest_steps
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.messages import int32s
from common.request import Request, SamplingParams

CPU = torch.device("cpu")


@given(st.integers(1, 4096))
def test_decode_sizes(max_running: int) -> None:
    sizes = decode_sizes(max_running)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] >= max_running
    assert len(sizes) == 1 or sizes[-2] < max_running


@given(st.integers(1, 20_000), st.integers(1, 200_000))
def test_extend_sizes(budget: int, context_length: int) -> None:
    sizes = extend_sizes(budget, context_length)
    assert all(size <= min(context_length, SHORT_TOKENS) for size in sizes), "rotary table, page table"
    if context_length >= SHORT_TOKENS:
        assert sizes[-1] >= min(budget, SHORT_TOKENS)
        assert len(sizes) == 1 or sizes[-2] < budget


@given(
    st.integers(1, 20_000),
    st.sampled_from([16, 300, 512, 1024, 1030, 2048, 131_072]),
    st.sampled_from([1, 16, 64]),
    st.integers(1, 300),
    st.booleans(),
)
def test_warm_up_reaches_what_serving_will(
    budget: int, context_length: int, page_size: int, max_running: int, decodes: bool
) -> None:
    budget = max(budget, page_size)
    steps = largest_steps(
        decodes=decodes,
        budget=budget,
        max_running=max_running,
        context_length=context_length,
        page_size=page_size,
    )
    extends = [step for step in steps if step.mode is ForwardMode.EXTEND]
    for step in steps:
        assert max(step.seq_lens) <= context_length
        assert step.extend_num_tokens <= max(budget, page_size) + max_running
        assert len(step.req_pool_indices) <= max_running + 1
    # As full as a step can be, so that its memory is taken.
    most = min(budget, context_length * max_running)
    assert max(step.extend_num_tokens for step in extends) == most
    assert any(is_short(step.seq_lens, step.extend_num_tokens) for step in extends)
    # Long steps have kernels of their own, with and without prefixes.
    if most > SHORT_TOKENS:
        assert any(
            not is_short(step.seq_lens, step.extend_num_tokens) and not any(step.prefix_lens)
            for step in extends
        )
    if context_length > SHORT_TOKENS + page_size:
        assert any(
            not is_short(step.seq_lens, step.extend_num_tokens) and any(step.prefix_lens) for step in extends
        )
    assert any(step.mode is ForwardMode.MIXED for step in steps) is decodes


def resolve(batch: ScheduleBatch, tokens: int, requests: int) -> ForwardInputs:
    table, attention = (
        PageTableMirror(9, 64, CPU),
        SdpaAttention(KVPool(KVLayout(1, 4, 1, 2, "float32"), 4, CPU), 1),
    )
    buffers = GraphBuffers(ForwardMode.EXTEND, tokens, requests, torch.zeros(0), torch.zeros(0))
    return resolve_forward_inputs(batch, FutureMap(9, CPU), table, attention, (), CPU, buffers)


def batch_of(*chunks: tuple[int, int]) -> ScheduleBatch:
    """Chunks of prompts of 40 tokens: how many are there, and how many this step computes."""
    requests = []
    for row, (there, tokens) in enumerate(chunks, 1):
        prompt = int32s(range(there + tokens if row % 2 else 40))
        requests.append(
            Request(
                prompt,
                SamplingParams(max_tokens=1, temperature=0.0),
                len(prompt),
                computed_len=there,
                row=row,
                page_ids=tuple(range(1, 41)),
            )
        )
    plans = [
        plan
        for request, (_, tokens) in zip(requests, chunks, strict=True)
        for plan in plan_chunks([request], tokens, 1)
    ]
    return prepare_for_extend(plans, 1)


@pytest.mark.parametrize("chunks", [((0, 20),), ((0, 5), (3, 7), (8, 1)), ((0, 3), (1, 4), (0, 4))])
def test_what_a_graph_reads_lies_where_it_did(chunks: tuple[tuple[int, int], ...]) -> None:
    batch = batch_of(*chunks)
    inputs, other = resolve(batch, 32, 5), resolve(batch_of((0, 32)), 32, 5)
    for name in ("rows", "positions", "out_cache_loc", "seq_lens"):
        ours, theirs = getattr(inputs.attention, name), getattr(other.attention, name)
        assert (ours.storage_offset(), ours.shape) == (theirs.storage_offset(), theirs.shape)
    for ours, theirs in ((inputs.input_ids, other.input_ids), (inputs.logits_indices, other.logits_indices)):
        assert ours is not None
        assert theirs is not None
        assert (ours.storage_offset(), ours.shape) == (theirs.storage_offset(), theirs.shape)
    # The logits of those that sample come first, in their order.
    ends = [sum(tokens for _, tokens in chunks[: i + 1]) - 1 for i in range(len(chunks))]
    assert inputs.logits_indices is not None
    sampling = [ends[sample.index] for sample in batch.sample_rows]
    assert inputs.logits_indices.tolist() == sampling + [0] * (5 - len(sampling))
    assert inputs.sample_req_pool_indices.tolist() == [s.index + 1 for s in batch.sample_rows]
