"""The relay of tokens from one step to the next on the device, and the one place where inputs come to be.

A sampled token is stashed under its request's row and gathered by the next step, without the host: that is
what lets a step be launched before the last one's tokens are read. The map exists always, overlapping or
not, so there is one input path. Row 0 is padding.

In debug mode every token is poisoned with -1 as it is gathered, so a gather without a stash before it is
found at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from common.attention.base import AttentionBackend, AttentionInputs
from common.device.packed import PackedBlock, join_int32
from common.engine.batch import ForwardMode, ScheduleBatch, pad_extend
from common.engine.page_table import PageTableMirror
from common.engine.prompt_logprobs import ScoreInputs, resolve_scores, scored_tokens
from common.engine.sampler import SamplingInputs, resolve_sampling
from common.errors import InvariantError, LocalError

POISON = -1


class FutureMap:
    """The last token of every row: [rows + 1] i64 on the device."""

    def __init__(self, num_rows: int, device: torch.device, *, debug: bool = False) -> None:
        self.output_tokens = torch.full((num_rows + 1,), POISON, dtype=torch.int64, device=device)
        self.output_tokens[0] = 0
        self._debug = debug

    def stash(self, rows: Tensor, tokens: Tensor) -> None:
        """Put tokens [n] under rows [n], on the forward stream."""
        self.output_tokens.index_copy_(0, rows, tokens)

    def gather(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Take the tokens of rows [n], on the forward stream; into `out` [n], where it is given.

        Raises:
            InvariantError: in debug mode, a row that nothing was stashed under since its last gather.
        """
        tokens = torch.index_select(self.output_tokens, 0, rows, out=out)
        if self._debug:
            # Reads the device from the host, as nothing outside debug mode may.
            if bool((tokens < 0).any()):
                raise InvariantError(f"rows {rows[tokens < 0].tolist()} were gathered before a stash")
            self.output_tokens.index_fill_(0, rows[rows != 0], POISON)
        return tokens


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """A step's inputs on the device."""

    input_ids: Tensor  # [tokens] i64
    attention: AttentionInputs
    # [samples] i64: which tokens' logits are wanted, and behind them padding in a captured step, or the
    # tokens that score prompts; None: all
    logits_indices: Tensor | None
    logits_of: Tensor | None  # [samples] i64: which of them a sample is of; None: each has its own
    sample_req_pool_indices: Tensor  # [samples] i64: rows that a token is sampled for
    sampling: SamplingInputs
    scoring: ScoreInputs | None


@dataclass(frozen=True, slots=True)
class GraphBuffers:
    """Where the inputs of a captured step lie: the same memory every time.

    What is behind the batch's own requests and tokens is padding: row 0, page 0.
    """

    mode: ForwardMode  # DECODE or EXTEND
    tokens: int
    requests: int  # as many as tokens in DECODE; in EXTEND more than any batch has
    block: Tensor  # [bytes] u8, the step's packed block
    input_ids: Tensor  # [requests] i64, for what DECODE gathers


def resolve_forward_inputs(
    batch: ScheduleBatch,
    future_map: FutureMap,
    page_table: PageTableMirror,
    attention: AttentionBackend,
    eos_token_ids: tuple[int, ...],
    device: torch.device,
    buffers: GraphBuffers | None = None,
) -> ForwardInputs:
    """Turn a plan into device tensors. Called on the forward stream; nowhere else do inputs come into being.

    The host's numbers go in one pinned block. In a captured step those that the graph reads come first, in
    an order and in sizes that only `buffers` decides.

    Raises:
        LocalError: a PREBUILT batch has no forward, and so no inputs.
    """
    if batch.mode is ForwardMode.PREBUILT:
        raise LocalError("a PREBUILT batch has no forward")
    if buffers is not None and batch.mode is ForwardMode.EXTEND:
        batch = pad_extend(batch, buffers.tokens, buffers.requests)
    requests = len(batch.req_pool_indices)
    pad = 0 if buffers is None else buffers.requests - requests
    tokens = batch.extend_num_tokens
    block = PackedBlock(device, None if buffers is None else buffers.block)
    rows = block.add(_padded(batch.req_pool_indices, pad), np.int64)
    positions = block.add(_padded(batch.positions(), pad), np.int64)
    cache_loc = block.add(_padded(batch.out_cache_loc(), pad), np.int64)
    seq_lens = block.add(_padded(batch.seq_lens, pad), np.int32)
    num_decode = batch.num_decode
    plan = attention.pack(block, batch.prefix_lens, batch.extend_lens, num_decode, pad)
    num_prompt = tokens - num_decode
    prompt_ids = None
    if batch.prefill_input_ids_cpu is not None:
        section, prompt_ids = block.reserve(num_prompt, np.int64)
        join_int32(batch.prefill_input_ids_cpu, section)
    logits_indices = logits_of = None
    if batch.mode is not ForwardMode.DECODE:
        sampled = list(dict.fromkeys(s.index for s in batch.sample_rows))
        last_tokens = (np.cumsum(batch.extend_lens) - 1)[sampled]
        unwanted = 0 if buffers is None else buffers.requests - len(last_tokens)
        if batch.score_spans:
            last_tokens = np.concatenate((last_tokens, *scored_tokens(batch)))
        logits_indices = block.add(_padded(last_tokens, unwanted), np.int64)
        if len(sampled) < len(batch.sample_rows):  # choices of one prompt
            place = {index: i for i, index in enumerate(sampled)}
            logits_of = block.add([place[s.index] for s in batch.sample_rows], np.int64)
    sampled_rows = [batch.req_pool_indices[sample.index] for sample in batch.sample_rows]
    sample_rows = block.add(sampled_rows, np.int64)
    sampling = resolve_sampling(batch.sample_rows, sampled_rows, eos_token_ids, block)
    scoring = resolve_scores(batch, block)
    new_pages = None
    if batch.new_pages:
        places, pages = page_table.places_of(batch.new_pages)
        new_pages = block.add(places, np.int64), block.add(pages, np.int64)
    block.ship()
    if new_pages is not None:
        page_table.set_places(*new_pages)
    match batch.mode:
        case ForwardMode.EXTEND:
            assert prompt_ids is not None
            input_ids = prompt_ids
        case ForwardMode.DECODE:
            input_ids = future_map.gather(rows, None if buffers is None else buffers.input_ids)
        case ForwardMode.MIXED:
            assert prompt_ids is not None
            input_ids = torch.cat((prompt_ids, future_map.gather(rows[requests - num_decode :])))
    return ForwardInputs(
        input_ids=input_ids,
        attention=AttentionInputs(
            rows=rows,
            page_table=page_table.table,
            seq_lens=seq_lens,
            positions=positions,
            out_cache_loc=cache_loc,
            prefix_lens_cpu=batch.prefix_lens,
            extend_lens_cpu=batch.extend_lens,
            num_decode=num_decode,
            plan=plan,
        ),
        logits_indices=logits_indices,
        logits_of=logits_of,
        sample_req_pool_indices=sample_rows,
        sampling=sampling,
        scoring=scoring,
    )


def _padded(values: ArrayLike, pad: int) -> ArrayLike:
    return np.pad(np.asarray(values), (0, pad)) if pad else values
