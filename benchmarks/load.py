"""Puts load on a server: requests as they are due or as others end, or streams that are held beside others.

Reads nothing but whether a stream began and ended; knows neither prompts nor figures.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from benchmarks.answers import read_answer
from benchmarks.token_streams import StreamClient, TokenStream
from common.errors import ConfigError

_SETTLE_S = 0.5  # from the last held stream's first token until it counts


@dataclass(slots=True)
class Effort:
    """How busy the client itself was: near 1, it is what was measured."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    late_s: float = 0.0  # the most that a request was begun after it was due

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count what happens inside; the garbage collector does not walk over what was noted meanwhile."""
        gc.collect()
        gc.disable()
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.wall_s += time.perf_counter() - wall_s
            self.cpu_s += time.process_time() - cpu_s
            gc.enable()


def run_load(
    client: StreamClient,
    requests: Sequence[bytes],
    due_s: Sequence[float] | None,
    most_open: int | None,
    patience_s: float,
    effort: Effort,
    done: Callable[[int], None] = lambda count: None,
) -> list[TokenStream]:
    """Send all requests and read their answers to the end.

    Args:
        due_s: when each is due, seconds from the begin; None: at once.
        most_open: requests that may be open together.
        patience_s: of silence, after which what is open has failed.
        done: is told how many ended, each time that some do.
    """
    streams: list[TokenStream] = []
    with effort.measured():
        begin_s = client.last_read_s = time.perf_counter()
        while client.num_open or len(streams) < len(requests):
            wait_s = patience_s
            while len(streams) < len(requests) and (most_open is None or client.num_open < most_open):
                if due_s is not None:
                    wait_s = begin_s + due_s[len(streams)] - time.perf_counter()
                    if wait_s > 0:
                        break
                    effort.late_s = max(effort.late_s, -wait_s)
                streams.append(client.start(requests[len(streams)]))
            if ended := client.poll(wait_s):
                done(len(ended))
            if not client.num_open:
                client.last_read_s = time.perf_counter()
            elif time.perf_counter() - client.last_read_s > patience_s:
                client.leave(f"nothing came for {patience_s:g} s")
    return streams


@dataclass(slots=True)
class Hold:
    """Streams that are kept decoding, alone or beside long prompts; used inside `effort.measured`.

    Args:
        requests: one for each stream; a stream that ends begins again.
        patience_s: for the first token of all streams, and in the end of all long prompts.

    Raises:
        ConfigError: a stream did not begin.
    """

    client: StreamClient
    requests: Sequence[bytes]
    patience_s: float
    effort: Effort = field(default_factory=Effort)
    streams: list[TokenStream] = field(default_factory=list)
    long: list[TokenStream] = field(default_factory=list)
    ended: list[TokenStream] = field(default_factory=list)  # held streams that ended before we left
    again: int = 0  # those that began again
    _held: set[TokenStream] = field(default_factory=set)

    def begin(self) -> None:
        """Start the streams, and wait until all decode."""
        for request in self.requests:
            self._hold(request)
        self.client.read_until(lambda: all(s.has_event or s.is_done for s in self.streams), self.patience_s)
        for stream in self.streams:
            if error := stream.is_done and read_answer(stream).error:
                raise ConfigError(f"the server did not begin a stream: {error}")
        self.watch(_SETTLE_S)

    def watch(
        self, seconds: float, long: Sequence[bytes] = (), due_s: Sequence[float] = ()
    ) -> tuple[float, float]:
        """Let the streams decode for so long, beside long prompts as they are due; returns begin and end."""
        begin_s = time.perf_counter()
        due_s = [at_s for at_s in due_s if at_s < seconds]  # all of these are sent, the last perhaps late
        sent = 0
        while (now_s := time.perf_counter()) < begin_s + seconds or sent < len(due_s):
            next_s = begin_s + (due_s[sent] if sent < len(due_s) else seconds)
            if sent < len(due_s) and now_s >= next_s:
                self.effort.late_s = max(self.effort.late_s, now_s - next_s)
                self.long.append(self.client.start(long[sent]))
                sent += 1
                continue
            for ended in self.client.poll(next_s - now_s):
                self._begin_again(ended)
        return begin_s, begin_s + seconds

    def drain(self) -> None:
        """Wait for the long prompts that are still open."""
        begin_s = time.perf_counter()
        while not all(s.is_done for s in self.long) and time.perf_counter() - begin_s < self.patience_s:
            for ended in self.client.poll(self.patience_s):
                self._begin_again(ended)

    def end(self) -> None:
        """Leave."""
        self.ended = [s for s in self.streams if s.is_done]
        self.client.leave()

    def _hold(self, request: bytes) -> None:
        stream = self.client.start(request)
        self.streams.append(stream)
        self._held.add(stream)

    def _begin_again(self, ended: TokenStream) -> None:
        """Replace a held stream that decoded to its end; one that failed is missed, and counted later."""
        if ended in self._held and ended.has_event and not ended.failure:
            self._hold(self.requests[self.again % len(self.requests)])
            self.again += 1
