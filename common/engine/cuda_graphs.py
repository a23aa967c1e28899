"""Decode steps as CUDA graphs: one launch instead of hundreds, one graph a padded batch size.

A batch is padded up to the next size with row 0, whose page is the padding page, so that what the padding
computes goes nowhere. All graphs read their inputs from the same buffers and write their logits to the same
one; the largest is captured first, so that the others fit into its memory. Knows no request.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

from common.device.streams import Streams
from common.engine.batch import ForwardMode, ScheduleBatch
from common.engine.future_map import ForwardInputs, GraphBuffers
from common.engine.warm_up import decode_batch
from common.model.decoder import Decoder

log = logging.getLogger("baton.engine")

BLOCK_BYTES = 1 << 18  # of a step's host metadata; what does not fit goes in a block of its own
_EXACT_SIZES = (1, 2, 4)
_STEPS = ((64, 8), (256, 16), (4096, 64))  # (up to, padded to a multiple of)

Resolve = Callable[[ScheduleBatch, GraphBuffers], ForwardInputs]


def padded_sizes(max_running: int) -> tuple[int, ...]:
    """Return the batch sizes to capture, the last one not below `max_running`."""
    sizes = [size for size in _EXACT_SIZES if size < max_running]
    at = 0
    for up_to, multiple in _STEPS:
        while at < up_to and (not sizes or sizes[-1] < max_running):
            at += multiple
            sizes.append(at)
    return tuple(sorted(set(sizes)))


class DecodeGraphs:
    """The captured decode steps of a model."""

    def __init__(self, decoder: Decoder, max_running: int, streams: Streams) -> None:
        self._decoder = decoder
        self._streams = streams
        self._sizes = padded_sizes(max_running)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        largest, device = self._sizes[-1], streams.device
        with streams.forward():
            self._block = torch.zeros(BLOCK_BYTES, dtype=torch.uint8, device=device)
            self._input_ids = torch.zeros(largest, dtype=torch.int64, device=device)
            shape = (largest, decoder.spec.vocab_size)
            self._logits = torch.empty(shape, dtype=decoder.dtype, device=device)

    def buffers_for(self, batch: ScheduleBatch) -> GraphBuffers | None:
        """Return where the inputs of a batch go, or None where it has to run without a graph."""
        if batch.mode is not ForwardMode.DECODE:
            return None
        index = bisect_left(self._sizes, len(batch.req_pool_indices))
        return self._buffers(self._sizes[index]) if index < len(self._sizes) else None

    def replay(self, size: int, requests: int) -> Tensor:
        """Run a captured step on the current stream; returns [requests, vocab] logits, until the next run."""
        self._graphs[size].replay()
        return self._logits[:requests]

    @torch.inference_mode()
    def capture(self, resolve: Resolve) -> None:
        """Capture all sizes; `resolve` is `resolve_forward_inputs` of this node."""
        started_s = time.monotonic()
        pool = torch.cuda.graph_pool_handle()
        with self._streams.forward():
            for size in reversed(self._sizes):
                inputs = resolve(decode_batch(1, 1), self._buffers(size))
                self._forward(inputs, size)  # kernels are built and chosen now, not in the capture
                torch.cuda.current_stream().synchronize()
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=pool)
                self._forward(inputs, size)
                graph.capture_end()
                self._graphs[size] = graph
        log.info("captured %d CUDA graphs in %.1f s", len(self._sizes), time.monotonic() - started_s)

    def _forward(self, inputs: ForwardInputs, size: int) -> None:
        self._decoder.forward(inputs.input_ids, inputs.attention, None, self._logits[:size])

    def _buffers(self, size: int) -> GraphBuffers:
        return GraphBuffers(size, self._block, self._input_ids[:size])
