"""Run a planned step on the device: resolve inputs, forward, sample, relay, copy back. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.batch import ScheduleBatch
from common.engine.future_map import ForwardInputs, FutureMap, resolve_forward_inputs
from common.engine.page_table import PageTableMirror
from common.engine.pinned import is_pin_memory_available, to_device
from common.engine.sampler import sample
from common.engine.streams import Event, Streams
from common.model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A launched step. Owns its tensors until its result is processed: no stream reads what was dropped."""

    batch: ScheduleBatch
    inputs: ForwardInputs
    tokens: Tensor  # [samples] i64 on the device
    tokens_cpu: Tensor  # [samples] i64, valid after copy_done
    copy_done: Event

    def result(self) -> list[int]:
        """Wait for the tokens: the only place where the host waits for the device."""
        self.copy_done.synchronize()
        return [int(token) for token in self.tokens_cpu.tolist()]


class ModelRunner:
    """The model of a node, with its rows.

    Args:
        num_rows: rows beside the padding row 0.
        max_pages: pages of the longest request.
    """

    def __init__(
        self,
        decoder: Decoder,
        eos_token_ids: tuple[int, ...],
        *,
        num_rows: int,
        max_pages: int,
        device: torch.device,
        debug: bool = False,
    ) -> None:
        self._decoder = decoder
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._streams = Streams(device)
        self._future_map = FutureMap(num_rows, device, debug=debug)
        self._page_table = PageTableMirror(num_rows, max_pages, device)
        self._pin = is_pin_memory_available(device)
        self.num_launched = 0

    def grant_pages(self, row: int, page_ids: Sequence[int]) -> None:
        """Mirror a row's page table, when it is granted its pages."""
        with self._streams.forward():
            self._page_table.set_row(row, page_ids)

    def seed_first_tokens(self, batch: ScheduleBatch, first_tokens: Sequence[int]) -> None:
        """Stash the first tokens of a PREBUILT batch, on the forward stream, for the next step to gather."""
        with self._streams.forward():
            rows = to_device(batch.req_pool_indices, torch.int64, self._device)
            self._future_map.stash(rows, to_device(first_tokens, torch.int64, self._device))

    @torch.inference_mode()
    def launch(self, batch: ScheduleBatch) -> StepRecord:
        """Start a step; its tokens are in the relay for the next one, and on the host after `result`."""
        with self._streams.forward():
            inputs = resolve_forward_inputs(
                batch, self._future_map, self._page_table, self._eos_token_ids, self._device
            )
            logits = self._decoder.forward(
                inputs.input_ids, inputs.positions, inputs.attention, inputs.logits_indices
            )
            tokens = sample(logits, inputs.sampling)
            self._future_map.stash(inputs.sample_req_pool_indices, tokens)
        with self._streams.copy():
            tokens_cpu = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=self._pin)
            tokens_cpu.copy_(tokens, non_blocking=True)
            copy_done = self._streams.record_copy()
        self.num_launched += 1
        return StepRecord(batch, inputs, tokens, tokens_cpu, copy_done)
