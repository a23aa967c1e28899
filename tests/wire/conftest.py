"""Settings of the property tests, and sockets that are closed whatever happens."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
import zmq
from hypothesis import HealthCheck, settings

# No deadline: nothing here is timed, and a busy machine is no failure.
settings.register_profile("wire", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("wire")


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """A ZMQ context; sockets left open are closed with it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def address() -> Iterator[str]:
    """An ipc address that nobody uses (not under tmp_path: socket paths are short)."""
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        yield f"ipc://{folder}/p"
