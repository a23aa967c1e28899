"""Tells a poller that an event on the device has happened: a thread waits for it, a descriptor gets readable.

So a node's loop waits for its sockets and for the device at once, in one poll, and nothing else in it waits.
Events of one watch happen in the order in which they were given (those of one stream do). On a CPU there is
nothing to wait for, and no thread.
"""

from __future__ import annotations

import os
import threading
from queue import SimpleQueue

import torch

from common.device.streams import Event


class EventWatch:
    """Events of one stream, awaited."""

    def __init__(self, device: torch.device, name: str) -> None:
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._fd: int | None = None
        self._thread: threading.Thread | None = None
        if device.type == "cuda":
            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._thread = threading.Thread(target=self._run, args=(device,), name=name, daemon=True)
            self._thread.start()

    def watch(self, event: Event) -> None:
        """Make the descriptor readable once this event, and those given before, have happened."""
        if self._thread is not None:
            self._events.put(event)

    def pollables(self) -> list[int]:
        """The descriptor, where there is one."""
        return [] if self._fd is None else [self._fd]

    def clear(self) -> None:
        """What happened so far is known: the descriptor is not readable until something else happens."""
        if self._fd is not None:
            try:
                os.eventfd_read(self._fd)
            except BlockingIOError:
                return

    def close(self) -> None:
        """End the thread, once the events that it was given have happened."""
        if self._thread is not None and self._fd is not None:
            self._events.put(None)
            self._thread.join()
            os.close(self._fd)
            self._thread = self._fd = None

    def _run(self, device: torch.device) -> None:
        assert self._fd is not None
        torch.cuda.set_device(device)  # a new thread is on GPU 0, and would make a context there
        while (event := self._events.get()) is not None:
            event.synchronize()
            os.eventfd_write(self._fd, 1)
