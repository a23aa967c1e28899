"""The streams of a node: forward (inputs, model, sampling, relay) and copy (results to the host).

The schedule thread has no device work of its own. On a CPU a stream does nothing: work runs when it is
called, and an event has always happened; schedulers and loops are written as if it had not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Event:
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Wait until the work before it is done."""


class Streams:
    """The streams of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Work of the step: its inputs, the model, sampling and the relay, in order."""
        yield

    @contextmanager
    def copy(self) -> Iterator[None]:
        """Copies of results to the host; starts behind what forward was given so far."""
        yield

    def record_copy(self) -> Event:
        """Mark the end of what copy was given so far."""
        return Event()
