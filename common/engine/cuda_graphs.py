"""Steps as CUDA graphs: one launch instead of hundreds, one graph a padded size.

A decode step is padded up to the next number of requests, a step of short prompts up to the next number of
tokens. Padding is of row 0, whose page is the padding page, so that what it computes goes nowhere. All graphs
read their inputs from the same buffers and write their logits to the same one; the largest is captured
first, so that the others fit into its memory. Knows no request.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from common.attention.base import SHORT_TOKENS
from common.device.streams import Streams
from common.engine.batch import ForwardMode, ScheduleBatch
from common.engine.future_map import ForwardInputs, GraphBuffers
from common.engine.warm_up import decode_batch, extend_batch
from common.model.decoder import Decoder

log = logging.getLogger("baton.engine")

BLOCK_BYTES = 1 << 18  # of a step's host metadata; what does not fit goes in a block of its own
_MAX_PROMPTS = 16  # of a captured step
_EXACT_SIZES = (1, 2, 4)
_STEPS = ((64, 8), (256, 16), (4096, 64))  # (up to, padded to a multiple of)
_EXTEND_SIZES = (16, 32, *range(64, SHORT_TOKENS + 1, 64))

Resolve = Callable[[ScheduleBatch, GraphBuffers], ForwardInputs]


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Which steps are captured."""

    decode: tuple[int, ...] = ()  # requests of a step, ascending
    extend: tuple[int, ...] = ()  # tokens of a step, ascending

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest captured step."""
        return max((*self.decode, *self.extend), default=0)


NO_GRAPHS = GraphSizes()


def decode_sizes(max_running: int) -> tuple[int, ...]:
    """Return the batch sizes to capture, the last one not below `max_running`."""
    sizes = [size for size in _EXACT_SIZES if size < max_running]
    at = 0
    for up_to, multiple in _STEPS:
        while at < up_to and (not sizes or sizes[-1] < max_running):
            at += multiple
            sizes.append(at)
    return tuple(sorted(set(sizes)))


def extend_sizes(budget: int, context_length: int) -> tuple[int, ...]:
    """Return the tokens of steps of prompts to capture: up to a budget, and no prompt beyond the context."""
    upto = bisect_left(_EXTEND_SIZES, budget) + 1
    return tuple(size for size in _EXTEND_SIZES[:upto] if size <= context_length)


class StepGraphs:
    """The captured steps of a model."""

    def __init__(self, decoder: Decoder, sizes: GraphSizes, streams: Streams) -> None:
        self._decoder = decoder
        self._streams = streams
        self._sizes = sizes
        self._graphs: dict[tuple[ForwardMode, int], torch.cuda.CUDAGraph] = {}
        device = streams.device
        prompts = _MAX_PROMPTS + 1 if sizes.extend else 0  # the last is padding
        largest = max((*sizes.decode, prompts))
        with streams.forward():
            self._block = torch.zeros(BLOCK_BYTES, dtype=torch.uint8, device=device)
            self._input_ids = torch.zeros(largest, dtype=torch.int64, device=device)
            shape = (largest, decoder.spec.vocab_size)
            self._logits = torch.empty(shape, dtype=decoder.dtype, device=device)

    def buffers_for(self, batch: ScheduleBatch) -> GraphBuffers | None:
        """Return where the inputs of a batch go, or None where it has to run without a graph."""
        requests, tokens = len(batch.req_pool_indices), batch.extend_num_tokens
        if batch.score_spans:
            return None  # it wants logits of any number of tokens
        match batch.mode:
            case ForwardMode.DECODE:
                sizes, wanted = self._sizes.decode, requests
            case ForwardMode.EXTEND if requests <= _MAX_PROMPTS and self._decoder.attention.can_capture(
                batch.seq_lens, tokens
            ):
                sizes, wanted = self._sizes.extend, tokens
            case _:
                return None
        index = bisect_left(sizes, wanted)
        return self._buffers(batch.mode, sizes[index]) if index < len(sizes) else None

    def replay(self, buffers: GraphBuffers, samples: int) -> Tensor:
        """Run a captured step on the current stream; returns [samples, vocab] logits, until the next run.

        Fewer, where several samples are of the same logits.
        """
        self._graphs[buffers.mode, buffers.tokens].replay()
        return self._logits[:samples]

    @torch.inference_mode()
    def capture(self, resolve: Resolve) -> None:
        """Capture all sizes; `resolve` is `resolve_forward_inputs` of this node."""
        started_s = time.monotonic()
        pool = torch.cuda.graph_pool_handle()
        shapes = [
            (extend_batch(0, (size,), 1), self._buffers(ForwardMode.EXTEND, size))
            for size in self._sizes.extend
        ] + [(decode_batch(1, 1), self._buffers(ForwardMode.DECODE, size)) for size in self._sizes.decode]
        with self._streams.forward():
            for batch, buffers in sorted(shapes, key=lambda shape: -shape[1].tokens):
                inputs = resolve(batch, buffers)
                # Kernels are built and chosen now, not in the capture.
                self._forward(inputs, buffers.requests)
                torch.cuda.current_stream().synchronize()
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=pool)
                self._forward(inputs, buffers.requests)
                graph.capture_end()
                self._graphs[buffers.mode, buffers.tokens] = graph
        log.info("captured %d CUDA graphs in %.1f s", len(self._graphs), time.monotonic() - started_s)

    def _forward(self, inputs: ForwardInputs, requests: int) -> None:
        logits = self._logits[:requests]
        self._decoder.forward(inputs.input_ids, inputs.attention, inputs.logits_indices, logits)

    def _buffers(self, mode: ForwardMode, size: int) -> GraphBuffers:
        requests = size if mode is ForwardMode.DECODE else _MAX_PROMPTS + 1
        return GraphBuffers(mode, size, requests, self._block, self._input_ids[:requests])
