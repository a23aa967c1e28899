"""What a step computes, as plain host values: the schedulers' product. No tensor is made here.

`resolve_forward_inputs` (future_map.py) turns a batch into device inputs, and is the only place that does:
`input_ids` is None in every mode until then. Field names are SGLang's.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

import numpy as np
from numpy.typing import ArrayLike, NDArray

from common.engine.chunking import ChunkPlan
from common.errors import LocalError
from common.request import LogprobArrays, Request, SamplingParams

Int64s = NDArray[np.int64]


class ForwardMode(Enum):
    """Where a batch's input ids come from."""

    EXTEND = auto()  # prompt ids, copied to the device on the forward stream
    DECODE = auto()  # the FutureMap, by row
    MIXED = auto()  # both: prompts that this node computes itself, beside those that decode
    PREBUILT = auto()  # nowhere: the KV arrived, there is no forward


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A request of the batch that samples a token in this step."""

    index: int  # in the batch
    sampling: SamplingParams
    position: int  # of the token to sample, from the start of the prompt
    may_stop: bool  # False: fewer than min_tokens so far


@dataclass(frozen=True, slots=True)
class ScoreSpan:
    """A chunk of a prompt whose tokens get log probabilities: those behind the chunk's own, by one."""

    index: int  # in the batch
    targets: memoryview  # int32 ids of the tokens that get them: of a last chunk one less than it has
    num_top: int
    into: LogprobArrays  # appended to when the step's result is read


@dataclass(frozen=True, slots=True)
class ScheduleBatch:
    """One step. Tuples run over the batch's requests.

    `seq_lens` are the tokens in KV after the step, `prefix_lens` before it, `extend_lens` those of it.
    """

    mode: ForwardMode
    page_size: int
    req_pool_indices: tuple[int, ...]  # rows
    seq_lens: tuple[int, ...]
    prefix_lens: tuple[int, ...]
    extend_lens: tuple[int, ...]
    extend_num_tokens: int
    page_ids: tuple[tuple[int, ...], ...]
    sample_rows: tuple[SampleRow, ...]
    # EXTEND and MIXED: int32 ids, one view a prompt; the prompts come first in the batch.
    prefill_input_ids_cpu: tuple[memoryview, ...] | None = None
    mix_running_indices: tuple[int, ...] = ()  # MIXED: the rows that decode, last in the batch
    # Pages that requests got since their grant, for the page table's mirror: (row, column, page).
    new_pages: tuple[tuple[int, int, int], ...] = ()
    score_spans: tuple[ScoreSpan, ...] = ()
    page_copies: tuple[tuple[int, int], ...] = ()  # before the forward: (page, page that gets what it holds)

    @property
    def input_ids(self) -> None:
        """None, in every mode: who reads it before resolution has a bug.

        It is a property without a setter so that nobody can put anything else here.
        """
        return

    @property
    def num_decode(self) -> int:
        """Requests, the last of the batch, whose one token comes from the FutureMap."""
        return (
            len(self.req_pool_indices) if self.mode is ForwardMode.DECODE else len(self.mix_running_indices)
        )

    def out_cache_loc(self) -> Int64s:
        """Where the step's KV goes, a number a token: page * page_size + offset. Made when asked for."""
        size = self.page_size
        spans: list[ArrayLike] = []
        for pages, prefix, end in zip(self.page_ids, self.prefix_lens, self.seq_lens, strict=True):
            if end - prefix == 1:  # decoding, mostly: cheaper without arrays
                spans.append([pages[prefix // size] * size + prefix % size])
                continue
            first_page = prefix // size
            touched = np.asarray(pages[first_page : -(-end // size)], np.int64)
            places = (touched[:, None] * size + np.arange(size)).reshape(-1)
            spans.append(places[prefix - first_page * size : end - first_page * size])
        return np.concatenate(spans, dtype=np.int64)

    def positions(self) -> Int64s:
        """Position of each of the step's tokens in its request."""
        if self.mode is ForwardMode.DECODE:
            return np.asarray(self.prefix_lens, np.int64)
        spans = zip(self.prefix_lens, self.seq_lens, strict=True)
        return np.concatenate([np.arange(prefix, end) for prefix, end in spans], dtype=np.int64)


def _sample_row(index: int, request: Request) -> SampleRow:
    return SampleRow(
        index=index,
        sampling=request.sampling,
        position=request.prompt_len + request.num_sampled,
        may_stop=request.num_sampled >= request.sampling.min_tokens,
    )


def _first_sample_rows(index: int, request: Request) -> Iterator[SampleRow]:
    """One for each choice of a prompt, all from the same logits."""
    row = _sample_row(index, request)
    if request.sampling.num_choices == 1:
        yield row
        return
    for i in range(request.sampling.num_choices):
        yield replace(row, sampling=replace(request.sampling, choice=request.sampling.choice + i))


def _score_span(index: int, chunk: ChunkPlan) -> ScoreSpan | None:
    request = chunk.request
    if request.prompt_logprobs is None:
        return None
    targets = memoryview(request.prompt_ids)[chunk.start + 1 : chunk.end + 1]
    num_top = request.sampling.num_prompt_logprobs or 0
    return ScoreSpan(index, targets, num_top, request.prompt_logprobs) if len(targets) else None


def prepare_for_extend(chunks: Sequence[ChunkPlan], page_size: int) -> ScheduleBatch:
    """Batch the chunks of several prompts; those that end their prompt for the first time sample a token."""
    requests = [chunk.request for chunk in chunks]
    spans = (_score_span(index, chunk) for index, chunk in enumerate(chunks))
    return ScheduleBatch(
        mode=ForwardMode.EXTEND,
        page_size=page_size,
        req_pool_indices=tuple(request.row for request in requests),
        seq_lens=tuple(chunk.end for chunk in chunks),
        prefix_lens=tuple(chunk.start for chunk in chunks),
        extend_lens=tuple(chunk.end - chunk.start for chunk in chunks),
        extend_num_tokens=sum(chunk.end - chunk.start for chunk in chunks),
        page_ids=tuple(request.page_ids for request in requests),
        sample_rows=tuple(
            row
            for index, chunk in enumerate(chunks)
            if chunk.samples
            for row in _first_sample_rows(index, chunk.request)
        ),
        prefill_input_ids_cpu=tuple(
            memoryview(chunk.request.fill_ids)[chunk.start : chunk.end] for chunk in chunks
        ),
        score_spans=tuple(span for span in spans if span is not None),
    )


def pad_extend(batch: ScheduleBatch, tokens: int, requests: int) -> ScheduleBatch:
    """Return an EXTEND batch of so many tokens and requests: what is added is of row 0, and samples nothing.

    `requests` is more than the batch has; the first that is added gets all the tokens.
    """
    missing, more = tokens - batch.extend_num_tokens, requests - len(batch.req_pool_indices)
    assert missing >= 0
    assert more > 0
    assert batch.prefill_input_ids_cpu is not None
    added = (missing, *(0,) * (more - 1))
    pages = (0,) * -(-missing // batch.page_size)
    return replace(
        batch,
        req_pool_indices=batch.req_pool_indices + (0,) * more,
        seq_lens=batch.seq_lens + added,
        prefix_lens=batch.prefix_lens + (0,) * more,
        extend_lens=batch.extend_lens + added,
        extend_num_tokens=tokens,
        page_ids=batch.page_ids + (pages,) * more,
        prefill_input_ids_cpu=(*batch.prefill_input_ids_cpu, memoryview(array("i", bytes(4 * missing)))),
    )


def prepare_for_decode(requests: Sequence[Request], page_size: int) -> ScheduleBatch:
    """One token for each request: its last one, which is in the FutureMap under its row."""
    for request in requests:
        if not request.wants_decode:
            raise LocalError(f"row {request.row} has nothing to decode")
    prefix_lens = tuple(request.computed_len for request in requests)
    return ScheduleBatch(
        mode=ForwardMode.DECODE,
        page_size=page_size,
        req_pool_indices=tuple(request.row for request in requests),
        seq_lens=tuple(length + 1 for length in prefix_lens),
        prefix_lens=prefix_lens,
        extend_lens=(1,) * len(requests),
        extend_num_tokens=len(requests),
        page_ids=tuple(request.page_ids for request in requests),
        sample_rows=tuple(_sample_row(index, request) for index, request in enumerate(requests)),
    )


def prepare_for_mixed(
    chunks: Sequence[ChunkPlan], running: Sequence[Request], page_size: int
) -> ScheduleBatch:
    """Chunks of prompts, and one token for each request that runs, in one forward."""
    extend, decode = prepare_for_extend(chunks, page_size), prepare_for_decode(running, page_size)
    decode_rows = (replace(row, index=len(chunks) + row.index) for row in decode.sample_rows)
    return ScheduleBatch(
        mode=ForwardMode.MIXED,
        page_size=page_size,
        req_pool_indices=extend.req_pool_indices + decode.req_pool_indices,
        seq_lens=extend.seq_lens + decode.seq_lens,
        prefix_lens=extend.prefix_lens + decode.prefix_lens,
        extend_lens=extend.extend_lens + decode.extend_lens,
        extend_num_tokens=extend.extend_num_tokens + decode.extend_num_tokens,
        page_ids=extend.page_ids + decode.page_ids,
        sample_rows=(*extend.sample_rows, *decode_rows),
        prefill_input_ids_cpu=extend.prefill_input_ids_cpu,
        mix_running_indices=decode.req_pool_indices,
        score_spans=extend.score_spans,
    )


def prepare_for_prebuilt(requests: Sequence[Request], page_size: int) -> ScheduleBatch:
    """Requests whose KV came from another node: metadata alone.

    Only lengths, rows and page ids are read; the prompt is not, so the cost does not grow with it. The
    last output (the first token, for a request that was just handed over) has no KV yet: it is the next
    step's input. `computed_len` is what was here before the hand-over.
    """
    seq_lens = tuple(request.prompt_len + max(0, len(request.outputs) - 1) for request in requests)
    prefix_lens = tuple(request.computed_len for request in requests)
    extend_lens = tuple(end - start for start, end in zip(prefix_lens, seq_lens, strict=True))
    return ScheduleBatch(
        mode=ForwardMode.PREBUILT,
        page_size=page_size,
        req_pool_indices=tuple(request.row for request in requests),
        seq_lens=seq_lens,
        prefix_lens=prefix_lens,
        extend_lens=extend_lens,
        extend_num_tokens=sum(extend_lens),
        page_ids=tuple(request.page_ids for request in requests),
        sample_rows=(),
    )
