"""Batches are metadata, PREBUILT ones above all. Inputs come to be in one place; reading before it fails."""

from __future__ import annotations

import random
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.attention.sdpa import SdpaAttention
from common.engine.batch import (
    ForwardMode,
    ScheduleBatch,
    pad_extend,
    prepare_for_decode,
    prepare_for_extend,
    prepare_for_mixed,
    prepare_for_prebuilt,
)
from common.engine.chunking import advance, plan_chunks
from common.engine.future_map import ForwardInputs, FutureMap, resolve_forward_inputs
from common.engine.page_table import PageTableMirror
from common.errors import InvariantError, LocalError
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.messages import int32s
from common.request import Request, SamplingParams

CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


class UnreadablePrompt:
    """A prompt that must not be read: every access raises."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise AssertionError("the prompt was read")

    __len__ = __iter__ = __getitem__ = __buffer__ = __array__ = __bool__ = _refuse


def request(prompt_len: int, page_ids: tuple[int, ...], row: int = 1, **lengths: Any) -> Request:
    return Request(int32s(range(prompt_len)), GREEDY, prompt_len, row=row, page_ids=page_ids, **lengths)


ATTENTION = SdpaAttention(KVPool(KVLayout(1, 4, 1, 2, "float32"), 4, CPU), 1)


def resolve(batch: ScheduleBatch, future_map: FutureMap, table: PageTableMirror) -> ForwardInputs:
    return resolve_forward_inputs(batch, future_map, table, ATTENTION, (), CPU)


def test_prebuilt_is_metadata_alone() -> None:
    prompt: Any = UnreadablePrompt()
    # Page 2 of size 5: token slots 10 to 14.
    arrived = Request(prompt, GREEDY, 5, computed_len=2, num_sampled=1, row=1, page_ids=(2,), outputs=[7])
    batch = prepare_for_prebuilt([arrived], page_size=5)
    assert batch.mode is ForwardMode.PREBUILT
    assert batch.input_ids is None
    assert batch.prefill_input_ids_cpu is None
    assert batch.req_pool_indices == (1,)
    assert batch.seq_lens == (5,)
    assert batch.prefix_lens == (2,)
    assert batch.extend_lens == (3,)
    assert batch.extend_num_tokens == 3
    assert batch.out_cache_loc().tolist() == [12, 13, 14]


def test_prebuilt_of_a_request_with_outputs_counts_all_but_the_last() -> None:
    resumed = request(5, (3, 4), num_sampled=3, outputs=[7, 8, 9])
    assert prepare_for_prebuilt([resumed], page_size=4).seq_lens == (7,)


def test_a_prebuilt_batch_has_no_inputs_to_resolve() -> None:
    batch = prepare_for_prebuilt([request(3, (1,), num_sampled=1, outputs=[5])], page_size=4)
    with pytest.raises(LocalError, match="no forward"):
        resolve(batch, FutureMap(2, CPU), PageTableMirror(2, 2, CPU))


@pytest.mark.parametrize("mode", ["extend", "decode", "mixed", "prebuilt"])
def test_reading_input_ids_before_resolution_fails_loudly(mode: str) -> None:
    ready = request(4, (1, 2), computed_len=4, num_sampled=1, outputs=[5])
    batch: Any = {
        "extend": lambda: prepare_for_extend(plan_chunks([request(4, (1,))], 8, 4), 4),
        "decode": lambda: prepare_for_decode([ready], 4),
        "mixed": lambda: prepare_for_mixed(plan_chunks([request(4, (1,))], 8, 4), [ready], 4),
        "prebuilt": lambda: prepare_for_prebuilt([ready], 4),
    }[mode]()
    with pytest.raises(TypeError):
        len(batch.input_ids)
    with pytest.raises(AttributeError):
        batch.input_ids.to("cpu")
    with pytest.raises((AttributeError, TypeError)):
        batch.input_ids = torch.zeros(4)


def test_decode_takes_its_input_from_the_relay_and_never_from_the_prompt() -> None:
    future_map, table = FutureMap(3, CPU, debug=True), PageTableMirror(3, 2, CPU)
    prompt: Any = UnreadablePrompt()
    running = Request(prompt, GREEDY, 4, computed_len=4, num_sampled=1, row=2, page_ids=(5, 6), outputs=[9])
    table.set_row(2, (5, 6))
    future_map.stash(torch.tensor([2]), torch.tensor([9]))
    inputs = resolve(prepare_for_decode([running], 4), future_map, table)
    assert inputs.input_ids.tolist() == [9]
    assert inputs.attention.positions.tolist() == [4]
    assert inputs.attention.out_cache_loc.tolist() == [6 * 4]
    assert inputs.attention.page_table[inputs.attention.rows].tolist() == [[5, 6]]
    assert inputs.attention.seq_lens.tolist() == [5]


def test_a_gather_without_a_stash_is_found_at_once() -> None:
    future_map = FutureMap(3, CPU, debug=True)
    rows = torch.tensor([2])
    with pytest.raises(InvariantError, match="before a stash"):
        future_map.gather(rows)
    future_map.stash(rows, torch.tensor([7]))
    assert future_map.gather(rows).tolist() == [7]
    with pytest.raises(InvariantError, match="before a stash"):
        future_map.gather(rows)  # poisoned by the first


def test_the_padding_row_can_always_be_gathered() -> None:
    future_map = FutureMap(1, CPU, debug=True)
    padding = torch.tensor([0, 0])
    assert future_map.gather(padding).tolist() == future_map.gather(padding).tolist() == [0, 0]


def test_a_request_with_nothing_to_decode_is_refused() -> None:
    done = request(4, (1, 2), computed_len=11, num_sampled=8)
    with pytest.raises(LocalError):
        prepare_for_decode([done], 4)


def test_extend_resolves_to_the_chunk_of_each_prompt() -> None:
    first, second = request(6, (1, 2), row=1), request(5, (3, 4), row=2)
    table = PageTableMirror(2, 4, CPU)
    table.set_row(1, first.page_ids)
    table.set_row(2, second.page_ids)
    plans = plan_chunks([first, second], 11, 4)
    batch = prepare_for_extend(plans, 4)
    inputs = resolve(batch, FutureMap(2, CPU), table)
    assert inputs.input_ids.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    assert inputs.attention.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    assert inputs.attention.out_cache_loc.tolist() == [4, 5, 6, 7, 8, 9, 12, 13, 14, 15, 16]
    assert inputs.logits_indices is not None
    assert inputs.logits_indices.tolist() == [5, 10]
    assert inputs.sample_req_pool_indices.tolist() == [1, 2]


def test_mixed_resolves_to_the_chunks_then_the_relay_s_tokens() -> None:
    ends, goes_on = request(3, (1,), row=3), request(9, (2, 3, 6), row=1)
    unread: Any = UnreadablePrompt()
    running = Request(unread, GREEDY, 4, computed_len=5, num_sampled=2, row=2, page_ids=(4, 5), outputs=[70])
    future_map, table = FutureMap(3, CPU, debug=True), PageTableMirror(3, 3, CPU)
    for r in (ends, goes_on, running):
        table.set_row(r.row, r.page_ids)
    future_map.stash(torch.tensor([2]), torch.tensor([71]))  # the host has not seen it yet
    batch = prepare_for_mixed(plan_chunks([ends, goes_on], 8, 4), [running], 4)
    assert batch.mode is ForwardMode.MIXED
    assert batch.mix_running_indices == (2,)
    assert batch.num_decode == 1
    inputs = resolve(batch, future_map, table)
    assert inputs.input_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 71]
    assert inputs.attention.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 5]
    assert inputs.attention.out_cache_loc.tolist() == [4, 5, 6, 8, 9, 10, 11, 21]
    assert inputs.attention.seq_lens.tolist() == [3, 4, 6]
    assert inputs.attention.num_decode == 1
    assert inputs.logits_indices is not None
    assert inputs.logits_indices.tolist() == [2, 7], "of the prompt that ends, and of the one that decodes"
    assert inputs.sample_req_pool_indices.tolist() == [3, 2]
    with pytest.raises(InvariantError):
        future_map.gather(torch.tensor([2]))  # it was taken, once


@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=6),
    page_size=st.sampled_from([1, 4, 16]),
    extra_budget=st.integers(0, 60),
)
def test_chunks_cover_every_prompt_once_in_order(
    lengths: list[int], page_size: int, extra_budget: int
) -> None:
    budget = page_size + extra_budget
    pages = iter(random.Random(0).sample(range(1, 1000), 500))
    requests = [
        request(n, tuple(next(pages) for _ in range(-(-n // page_size))), row=i + 1)
        for i, n in enumerate(lengths)
    ]
    covered: dict[int, list[int]] = {r.row: [] for r in requests}
    sent: dict[int, list[int]] = {r.row: [] for r in requests}
    while any(not r.is_prefilled for r in requests):
        chunks = plan_chunks([r for r in requests if not r.is_prefilled], budget, page_size)
        assert chunks, "a budget of a page or more always makes progress"
        assert sum(c.end - c.start for c in chunks) <= budget
        for chunk in chunks:
            assert chunk.is_last == (chunk.end == chunk.request.prompt_len)
            assert chunk.is_last or chunk.end % page_size == 0
            assert chunk.first_page == len(sent[chunk.request.row])
            covered[chunk.request.row] += range(chunk.start, chunk.end)
            sent[chunk.request.row] += chunk.page_ids
        advance(chunks, 0.0)
    for r in requests:
        assert covered[r.row] == list(range(r.prompt_len))
        assert sent[r.row] == list(r.page_ids)
        assert r.num_sampled == 1


def lengths_planned(lengths: list[int], budget: int) -> list[int]:
    pages = tuple(range(1, 2000))
    requests = [request(n, pages, row=i + 1) for i, n in enumerate(lengths)]
    return [chunk.end - chunk.start for chunk in plan_chunks(requests, budget, 16)]


def test_a_long_prompt_has_the_batch_for_itself_and_short_ones_share_it() -> None:
    assert lengths_planned([16000, 500], 16384) == [16000], "nobody waits for what makes nothing faster"
    assert lengths_planned([20000, 500], 16384) == [16384]
    assert lengths_planned([500, 700, 300], 16384) == [500, 700, 300]
    assert lengths_planned([500, 16000], 16384) == [500], "the long one comes alone, in one piece"
    assert lengths_planned([1500, 1500], 16384) == [1500]
    assert lengths_planned([2048, 1], 16384) == [2048]
    assert lengths_planned([100, 100], 128) == [100, 16]


def test_a_batch_is_plain_host_data() -> None:
    """What a scheduler returns can be compared and printed: no tensor hides in it."""
    plans = plan_chunks([request(4, (1,))], 8, 4)
    batch = prepare_for_extend(plans, 4)
    assert isinstance(batch, ScheduleBatch)
    assert not any(isinstance(getattr(batch, name), torch.Tensor) for name in ScheduleBatch.__slots__)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=5),
    st.integers(0, 40),
    st.integers(1, 4),
)
def test_padding_of_prompts_changes_nothing_of_theirs_and_goes_to_page_0(
    prompts: list[tuple[int, int]], tokens: int, more: int
) -> None:
    requests, page = [], 1
    for row, (extend, prefix) in enumerate(prompts, 1):
        count = -(-(extend + prefix) // 4)
        requests.append(
            request(extend + prefix, tuple(range(page, page + count)), row=row, computed_len=prefix)
        )
        page += count
    batch = prepare_for_extend(plan_chunks(requests, 10_000, 4), 4)
    own = batch.extend_num_tokens
    padded = pad_extend(batch, own + tokens, len(prompts) + more)
    table = PageTableMirror(len(prompts), 20, CPU)
    plain, wide = (resolve(b, FutureMap(len(prompts), CPU), table) for b in (batch, padded))
    n = len(prompts)
    for name in ("rows", "seq_lens"):
        ours, theirs = getattr(wide.attention, name), getattr(plain.attention, name)
        assert ours[:n].tolist() == theirs.tolist()
        assert len(ours) == n + more
    assert wide.attention.rows[n:].tolist() == [0] * more
    assert wide.input_ids.tolist() == plain.input_ids.tolist() + [0] * tokens
    assert wide.attention.positions[:own].tolist() == plain.attention.positions.tolist()
    assert wide.attention.positions[own:].tolist() == list(range(tokens))
    assert wide.attention.out_cache_loc[:own].tolist() == plain.attention.out_cache_loc.tolist()
    assert all(place < 4 for place in wide.attention.out_cache_loc[own:].tolist()), "page 0"
    assert wide.sample_req_pool_indices.tolist() == plain.sample_req_pool_indices.tolist()
