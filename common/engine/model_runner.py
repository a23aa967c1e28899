"""Run a planned step on the device: resolve inputs, forward, sample, relay, copy back. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.device.pinned import to_device, to_host
from common.device.streams import Event, Stream, Streams
from common.engine.batch import ScheduleBatch
from common.engine.cuda_graphs import NO_GRAPHS, GraphSizes, StepGraphs
from common.engine.future_map import ForwardInputs, FutureMap, GraphBuffers, resolve_forward_inputs
from common.engine.grammar import GrammarStates
from common.engine.page_table import PageTableMirror
from common.engine.penalties import PenaltyState
from common.engine.prompt_logprobs import Scores, deliver, score
from common.engine.sampler import Sampled, sample
from common.kv.pages import Pages
from common.model.decoder import Decoder
from common.request import Request, SampledToken, TokenLogprobs


@dataclass(frozen=True, slots=True)
class StepForward:
    """A step whose tokens are not drawn yet."""

    batch: ScheduleBatch
    inputs: ForwardInputs
    logits: Tensor  # [samples, vocab], fewer where several samples are of the same
    scored: Tensor | None  # [tokens, hidden], of prompts that get log probabilities
    forward_done: Event


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A launched step. Owns its tensors until its result is processed: no stream reads what was dropped."""

    batch: ScheduleBatch
    inputs: ForwardInputs
    sampled: Sampled  # on the device
    sampled_cpu: Sampled  # valid after copy_done
    copy_done: Event
    scores: Scores | None = None  # of prompts, on the device
    scores_cpu: Scores | None = None

    def result(self) -> list[SampledToken]:
        """Return the tokens; `copy_done` has happened."""
        tokens: list[int] = self.sampled_cpu.tokens.tolist()
        logprobs = iter(self._logprobs())
        return [
            SampledToken(token, None if row.sampling.num_logprobs is None else next(logprobs))
            for token, row in zip(tokens, self.batch.sample_rows, strict=True)
        ]

    def deliver_scores(self) -> None:
        """Give prompts' log probabilities to their requests, once; `copy_done` has happened."""
        if self.scores_cpu is not None:
            deliver(self.batch.score_spans, self.scores_cpu)

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
        pages: the model's KV.
        graph_sizes: the steps to capture as CUDA graphs.
    """

    def __init__(
        self,
        decoder: Decoder,
        eos_token_ids: tuple[int, ...],
        *,
        num_rows: int,
        max_pages: int,
        pages: Pages,
        streams: Streams,
        graph_sizes: GraphSizes = NO_GRAPHS,
        debug: bool = False,
    ) -> None:
        device = streams.device
        self._decoder = decoder
        self._pages = pages
        self._eos_token_ids = eos_token_ids
        self._streams = streams
        self._device = device
        with streams.forward():
            self._future_map = FutureMap(num_rows, device, debug=debug)
            self._page_table = PageTableMirror(num_rows, max_pages, device)
            self._penalties = PenaltyState(num_rows, decoder.spec.vocab_size, device)
        self._grammars = GrammarStates(decoder.spec.vocab_size, device)
        self._graphs: StepGraphs | None = None
        if graph_sizes != NO_GRAPHS:
            self._graphs = StepGraphs(decoder, graph_sizes, streams)
            self._graphs.capture(self._resolve)
        self.num_launched = 0

    def grant(self, request: Request) -> None:
        """Mirror what a request was granted: its row of the page table, the start of penalties and grammar.

        Of one that was retracted the last output is seeded, for its first step after EXTEND. (One that was
        handed over may have its first token by now; that is seeded with its PREBUILT batch.)
        """
        with self._streams.forward():
            self._page_table.set_row(request.row, request.page_ids)
            self._penalties.prime(request)
        self._grammars.start(request)
        if request.resumed_ids is not None:
            self._seed((request.row,), (request,))

    def seed_first_tokens(self, batch: ScheduleBatch, requests: Sequence[Request]) -> None:
        """Stash the last outputs of a PREBUILT batch, on the forward stream, for the next step to gather."""
        self._seed(batch.req_pool_indices, requests)

    def launch(self, batch: ScheduleBatch) -> StepRecord:
        """Start a step; its tokens are in the relay for the next one, and on the host after `copy_done`."""
        return self.sample(self.forward(batch))

    @torch.inference_mode()
    def forward(self, batch: ScheduleBatch) -> StepForward:
        """Start a step's forward; it is to be sampled before the next one is started."""
        with self._streams.forward():
            if batch.page_copies:
                sources, targets = zip(*batch.page_copies, strict=True)
                self._pages.copy_from(targets, self._pages, sources)
            buffers = None if self._graphs is None else self._graphs.buffers_for(batch)
            inputs = self._resolve(batch, buffers)
            if self._graphs is not None and buffers is not None:
                logits, scored = self._graphs.replay(buffers, len(batch.sample_rows)), None
            else:
                logits, scored = self._forward(inputs)
            forward_done = self._streams.record(Stream.FORWARD)
        self.num_launched += 1
        return StepForward(batch, inputs, logits, scored, forward_done)

    @torch.inference_mode()
    def sample(self, forward: StepForward) -> StepRecord:
        """Draw the tokens of a step, behind its forward."""
        inputs, logits, scored = forward.inputs, forward.logits, forward.scored
        with self._streams.forward():
            masks = self._grammars.masks(forward.batch)  # while the forward runs; their copy is behind it
            if inputs.logits_of is not None:
                logits = logits.index_select(0, inputs.logits_of)
            scores = None if scored is None else score(scored, self._decoder.logits, inputs.scoring)
            sampled = sample(logits, inputs.sampling, self._penalties, masks)
            self._future_map.stash(inputs.sample_req_pool_indices, sampled.tokens)
        with self._streams.copy():
            sampled_cpu = Sampled(
                to_host(sampled.tokens),
                *(
                    None if tensor is None else to_host(tensor)
                    for tensor in (sampled.logprobs, sampled.top_logprobs, sampled.top_ids)
                ),
            )
            scores_cpu = None if scores is None else scores.to_host()
            copy_done = self._streams.record(Stream.COPY)
        return StepRecord(forward.batch, inputs, sampled, sampled_cpu, copy_done, scores, scores_cpu)

    def waits_for(self, batch: ScheduleBatch, before: ScheduleBatch) -> bool:
        """Say whether the tokens of one step are needed on the host to sample those of another."""
        rows = self._grammars.rows_of(batch)
        return bool(rows and rows & self._grammars.rows_of(before))

    def take(self, record: StepRecord) -> list[SampledToken]:
        """Return a step's tokens, once, after `copy_done`; grammars have seen them from now on."""
        record.deliver_scores()
        return self._grammars.accept(record.batch, record.result())

    def _forward(self, inputs: ForwardInputs) -> tuple[Tensor, Tensor | None]:
        """Return the logits to sample from, and the hidden states [tokens, hidden] that score prompts."""
        hidden = self._decoder.hidden(inputs.input_ids, inputs.attention, inputs.logits_indices)
        if inputs.scoring is None:
            return self._decoder.logits(hidden), None
        num_scored = len(inputs.scoring.targets)
        sampled, scored = hidden.split((len(hidden) - num_scored, num_scored))
        return self._decoder.logits(sampled), scored

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
        self._grammars.seed(rows, tokens)

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
