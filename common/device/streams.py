"""The streams of a node, and events in them.

    forward   inputs of a step, the model, sampling, the relay: everything in order
    copy      results to the host; starts behind what forward was given so far
    transfer  KV pages to and from other nodes, behind an event of forward

The schedule thread has no device work of its own. On a CPU a stream does nothing: work runs when it is
called, and an event has always happened; schedulers and loops are written as if it had not.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import Enum

import torch


class Stream(Enum):
    """A queue of device work."""

    FORWARD = "forward"
    COPY = "copy"
    TRANSFER = "transfer"


class Event:
    """A point in a stream's work."""

    def __init__(self, cuda_event: torch.cuda.Event | None = None) -> None:
        self._cuda_event = cuda_event

    def is_done(self) -> bool:
        """Say whether the work before it is done; never waits."""
        return self._cuda_event is None or self._cuda_event.query()

    def synchronize(self) -> None:
        """Wait until the work before it is done, asleep: not for the thread that schedules."""
        if self._cuda_event is not None:
            self._cuda_event.synchronize()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Have a stream wait for it, on the device."""
        if self._cuda_event is not None:
            stream.wait_event(self._cuda_event)


DONE = Event()


class Streams:
    """The streams of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda: dict[Stream, torch.cuda.Stream] = (
            {stream: torch.cuda.Stream(device) for stream in Stream} if device.type == "cuda" else {}
        )

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Give what follows to this stream."""
        if not self._cuda:
            return nullcontext()
        return torch.cuda.stream(self._cuda[stream])

    def forward(self) -> AbstractContextManager[object]:
        """Work of the step: its inputs, the model, sampling and the relay, in order."""
        return self.on(Stream.FORWARD)

    def copy(self) -> AbstractContextManager[object]:
        """Copies of results to the host; starts behind what forward was given so far."""
        if self._cuda:
            self._cuda[Stream.COPY].wait_stream(self._cuda[Stream.FORWARD])
        return self.on(Stream.COPY)

    def transfer(self) -> AbstractContextManager[object]:
        """Pages to and from other nodes; what they wait for is said with `wait`."""
        return self.on(Stream.TRANSFER)

    def record(self, stream: Stream) -> Event:
        """Mark the end of what a stream was given so far."""
        if not self._cuda:
            return DONE
        # Blocking: who waits for it sleeps, and leaves the core to the thread that schedules.
        event = torch.cuda.Event(blocking=True)
        event.record(self._cuda[stream])
        return Event(event)

    def wait(self, stream: Stream, event: Event) -> None:
        """Have what a stream is given from now on start behind an event; the host goes on."""
        if self._cuda:
            event.hold(self._cuda[stream])
