"""Run a planned step on the device: resolve inputs, forward, sample, relay, copy back. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.device.pinned import to_device, to_host
from common.device.streams import Event, Stream, Streams
from common.engine.batch import ScheduleBatch
from common.engine.cuda_graphs import NO_GRAPHS, GraphSizes, StepGraphs
from common.engine.future_map import ForwardInputs, FutureMap, GraphBuffers, resolve_forward_inputs
from common.engine.page_table import PageTableMirror
from common.engine.penalties import PenaltyState
from common.engine.sampler import Sampled, sample
from common.model.decoder import Decoder
from common.request import Request, SampledToken, TokenLogprobs


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A launched step. Owns its tensors until its result is processed: no stream reads what was dropped."""

    batch: ScheduleBatch
    inputs: ForwardInputs
    sampled: Sampled  # on the device
    sampled_cpu: Sampled  # valid after copy_done
    forward_done: Event
    copy_done: Event

    def result(self) -> list[SampledToken]:
        """Return the tokens; `copy_done` has happened."""
        tokens: list[int] = self.sampled_cpu.tokens.tolist()
        logprobs = iter(self._logprobs())
        return [
            SampledToken(token, None if row.sampling.num_logprobs is None else next(logprobs))
            for token, row in zip(tokens, self.batch.sample_rows, strict=True)
        ]

    def _logprobs(self) -> list[TokenLogprobs]:
        cpu = self.sampled_cpu
        if cpu.logprobs is None or cpu.top_logprobs is None or cpu.top_ids is None:
            return []
        wanted = [row.sampling.num_logprobs for row in self.batch.sample_rows]
        columns = (cpu.logprobs.tolist(), cpu.top_ids.tolist(), cpu.top_logprobs.tolist())
        return [
            TokenLogprobs(logprob, tuple(ids[:num]), tuple(values[:num]))
            for num, logprob, ids, values in zip((n for n in wanted if n is not None), *columns, strict=True)
        ]


class ModelRunner:
    """The model of a node, with its rows.

    Args:
        num_rows: rows beside the padding row 0.
        max_pages: pages of the model's context.
        graph_sizes: the steps to capture as CUDA graphs.
    """

    def __init__(
        self,
        decoder: Decoder,
        eos_token_ids: tuple[int, ...],
        *,
        num_rows: int,
        max_pages: int,
        streams: Streams,
        graph_sizes: GraphSizes = NO_GRAPHS,
        debug: bool = False,
    ) -> None:
        device = streams.device
        self._decoder = decoder
        self._eos_token_ids = eos_token_ids
        self._streams = streams
        self._device = device
        with streams.forward():
            self._future_map = FutureMap(num_rows, device, debug=debug)
            self._page_table = PageTableMirror(num_rows, max_pages, device)
            self._penalties = PenaltyState(num_rows, decoder.spec.vocab_size, device)
        self._graphs: StepGraphs | None = None
        if graph_sizes != NO_GRAPHS:
            self._graphs = StepGraphs(decoder, graph_sizes, streams)
            self._graphs.capture(self._resolve)
        self.num_launched = 0

    def grant(self, request: Request) -> None:
        """Mirror what a request was granted: its row of the page table, and its penalties' start.

        Of one that was retracted the last output is seeded, for its first step after EXTEND. (One that was
        handed over may have its first token by now; that is seeded with its PREBUILT batch.)
        """
        with self._streams.forward():
            self._page_table.set_row(request.row, request.page_ids)
            self._penalties.prime(request)
        if request.resumed_ids is not None:
            self._seed((request.row,), (request,))

    def seed_first_tokens(self, batch: ScheduleBatch, requests: Sequence[Request]) -> None:
        """Stash the last outputs of a PREBUILT batch, on the forward stream, for the next step to gather."""
        self._seed(batch.req_pool_indices, requests)

    @torch.inference_mode()
    def launch(self, batch: ScheduleBatch) -> StepRecord:
        """Start a step; its tokens are in the relay for the next one, and on the host after `copy_done`."""
        with self._streams.forward():
            buffers = None if self._graphs is None else self._graphs.buffers_for(batch)
            inputs = self._resolve(batch, buffers)
            if self._graphs is not None and buffers is not None:
                logits = self._graphs.replay(buffers, len(batch.sample_rows))
            else:
                logits = self._decoder.forward(inputs.input_ids, inputs.attention, inputs.logits_indices)
            forward_done = self._streams.record(Stream.FORWARD)
            sampled = sample(logits, inputs.sampling, self._penalties)
            self._future_map.stash(inputs.sample_req_pool_indices, sampled.tokens)
        with self._streams.copy():
            sampled_cpu = Sampled(
                to_host(sampled.tokens),
                *(
                    None if tensor is None else to_host(tensor)
                    for tensor in (sampled.logprobs, sampled.top_logprobs, sampled.top_ids)
                ),
            )
            copy_done = self._streams.record(Stream.COPY)
        self.num_launched += 1
        return StepRecord(batch, inputs, sampled, sampled_cpu, forward_done, copy_done)

    def warm_up(self, batches: Sequence[ScheduleBatch]) -> None:
        """Run steps of the padding row, one after the other (see warm_up.py)."""
        for batch in batches:
            self.launch(batch).copy_done.synchronize()
        self.num_launched = 0

    def _seed(self, rows: Sequence[int], requests: Sequence[Request]) -> None:
        tokens = [request.outputs[-1] for request in requests]
        with self._streams.forward():
            self._future_map.stash(
                to_device(rows, torch.int64, self._device), to_device(tokens, torch.int64, self._device)
            )
            self._penalties.count_seeded(rows, tokens, [request.sampling for request in requests])

    def _resolve(self, batch: ScheduleBatch, buffers: GraphBuffers | None) -> ForwardInputs:
        return resolve_forward_inputs(
            batch,
            self._future_map,
            self._page_table,
            self._decoder.attention,
            self._eos_token_ids,
            self._device,
            buffers,
        )
