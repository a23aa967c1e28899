"""A socket that speaks to a process of the server as anybody could."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq


@contextmanager
def raw_socket(path: Path, wait_s: float) -> Iterator[zmq.Socket[bytes]]:
    """Have a DEALER that is connected there for a while; what does not come in time is an AssertionError."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.SNDTIMEO, int(wait_s * 1000))
        dealer.setsockopt(zmq.RCVTIMEO, int(wait_s * 1000))
        dealer.connect(f"ipc://{path}")
        yield dealer
    except zmq.Again:
        raise AssertionError(f"no answer from {path.name} within {wait_s:g} s") from None
    finally:
        context.destroy(linger=0)
