"""The relay of tokens from one step to the next on the device, and the one place where inputs come to be.

A sampled token is stashed under its request's row and gathered by the next step, without the host: that is
what lets a step be launched before the last one's tokens are read. The map exists always, overlapping or
not, so there is one input path. Row 0 is padding.

In debug mode every token is poisoned with -1 as it is gathered, so a gather without a stash before it is
found at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.attention.base import AttentionInputs
from common.engine.batch import ForwardMode, ScheduleBatch
from common.engine.page_table import PageTableMirror
from common.engine.pinned import flatten_arrays_to_pinned_cpu, to_device
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

    def gather(self, rows: Tensor) -> Tensor:
        """Take the tokens of rows [n], on the forward stream.

        Raises:
            InvariantError: in debug mode, a row that nothing was stashed under since its last gather.
        """
        tokens = self.output_tokens.index_select(0, rows)
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
    positions: Tensor  # [tokens] i64
    attention: AttentionInputs
    logits_indices: Tensor  # [samples] i64: which tokens' logits are wanted
    sample_req_pool_indices: Tensor  # [samples] i64: rows that a token is sampled for
    sampling: SamplingInputs


def resolve_forward_inputs(
    batch: ScheduleBatch,
    future_map: FutureMap,
    page_table: PageTableMirror,
    eos_token_ids: tuple[int, ...],
    device: torch.device,
) -> ForwardInputs:
    """Turn a plan into device tensors. Called on the forward stream; nowhere else do inputs come into being.

    Raises:
        LocalError: a PREBUILT batch has no forward, and so no inputs.
    """
    rows = to_device(batch.req_pool_indices, torch.int64, device)
    match batch.mode:
        case ForwardMode.EXTEND:
            assert batch.prefill_input_ids_cpu is not None
            pinned = flatten_arrays_to_pinned_cpu(batch.prefill_input_ids_cpu, device)
            input_ids = pinned.to(device, non_blocking=True)
        case ForwardMode.DECODE:
            input_ids = future_map.gather(rows)
        case ForwardMode.PREBUILT:
            raise LocalError("a PREBUILT batch has no forward")
    last_token = 0
    last_tokens = []
    for length in batch.extend_lens:
        last_token += length
        last_tokens.append(last_token - 1)
    max_pages = max(-(-length // batch.page_size) for length in batch.seq_lens)
    sample_rows = [batch.req_pool_indices[sample.index] for sample in batch.sample_rows]
    return ForwardInputs(
        input_ids=input_ids,
        positions=to_device(batch.positions(), torch.int64, device),
        attention=AttentionInputs(
            page_table=page_table.take(rows, max_pages),
            seq_lens=to_device(batch.seq_lens, torch.int64, device),
            prefix_lens_cpu=batch.prefix_lens,
            extend_lens_cpu=batch.extend_lens,
            out_cache_loc=to_device(batch.out_cache_loc(), torch.int64, device),
        ),
        logits_indices=to_device(
            [last_tokens[sample.index] for sample in batch.sample_rows], torch.int64, device
        ),
        sample_req_pool_indices=to_device(sample_rows, torch.int64, device),
        sampling=resolve_sampling(batch.sample_rows, sample_rows, eos_token_ids, device),
    )
