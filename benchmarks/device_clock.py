"""How long the steps of a node take on its device: events around a launch, or a clock around the forward.

On a GPU a step is everything that its launch gave to the forward stream. Where the device waits for the host
in the middle of a step, that is in it; where it waits between two steps, it is not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from common.attention.base import AttentionInputs
from common.engine.loader import Engine
from common.model.decoder import Decoder


class _TimedDecoder(Decoder):
    """The decoder, with a clock around its forward."""

    def __init__(self, inner: Decoder) -> None:
        self.spec = inner.spec
        self.attention = inner.attention
        self.inner = inner
        self.forward_s = 0.0

    @property
    def dtype(self) -> torch.dtype:
        """See Decoder."""
        return self.inner.dtype

    def hidden(self, input_ids: Tensor, inputs: AttentionInputs, logits_indices: Tensor | None) -> Tensor:
        """See Decoder."""
        started_s = time.perf_counter()
        hidden = self.inner.hidden(input_ids, inputs, logits_indices)
        self.forward_s = time.perf_counter() - started_s
        return hidden

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See Decoder; the time counts as part of the forward's."""
        started_s = time.perf_counter()
        logits = self.inner.logits(hidden, out)
        self.forward_s += time.perf_counter() - started_s
        return logits


class DeviceClock:
    """The steps of an engine, as long as it is not closed."""

    def __init__(self, engine: Engine) -> None:
        self._streams = engine.streams
        self._runner = engine.runner
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._forwards_s: list[float] = []
        self._decoder: _TimedDecoder | None = None
        if engine.streams.device.type == "cpu":
            self._decoder = engine.runner._decoder = _TimedDecoder(engine.runner._decoder)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time what is launched inside."""
        if self._decoder is not None:
            yield
            self._forwards_s.append(self._decoder.forward_s)
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with self._streams.forward():
            begin.record()
        yield
        with self._streams.forward():
            end.record()
        self._events.append((begin, end))

    @property
    def host_forward_s(self) -> float:
        """Seconds of the last step that were the model's, on the host: 0 where a device computes it."""
        return 0.0 if self._decoder is None else self._decoder.forward_s

    def forget(self) -> None:
        """Drop the steps so far; waits for none of them."""
        self._events.clear()
        self._forwards_s.clear()

    def take_s(self) -> list[float]:
        """Return the seconds of the steps since the last call, or since those dropped; waits for them."""
        events, self._events = self._events, []
        forwards_s, self._forwards_s = self._forwards_s, []
        for _, end in events[-1:]:
            end.synchronize()
        return forwards_s + [begin.elapsed_time(end) / 1000 for begin, end in events]

    def close(self) -> None:
        """Give the engine its decoder back."""
        if self._decoder is not None:
            self._runner._decoder = self._decoder.inner
