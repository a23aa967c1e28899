"""A decode node's process with nothing but a link: greets, asks for one prefill, and stays until killed.

Started by tests as `python -m tests.wire.child_node ADDRESS`; ends when its standard input does.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from common.connector import Connector
from common.messages import Prefill, Status, int32s
from common.peer import PeerUp, new_epoch
from common.request import SamplingParams
from common.sockets import wait
from tests.wire.hellos import DECODE, here


def main(address: str) -> None:
    """Run until standard input is closed."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    connector = Connector(
        context, address, here(DECODE), new_epoch(), lambda _: Status(0, ()), now=time.monotonic()
    )
    while True:
        for event in connector.poll(time.monotonic()):
            if isinstance(event, PeerUp):
                event.peer.send(Prefill(1, SamplingParams(max_tokens=1), int32s([5]), int32s([1])))
        wait([*connector.pollables(), sys.stdin.fileno()], 0.2)
        if zmq.select([sys.stdin.fileno()], [], [], 0)[0]:
            return


@contextmanager
def child_node(address: str) -> Iterator[subprocess.Popen[bytes]]:
    """A running child; killed and reaped at the end."""
    child = subprocess.Popen([sys.executable, "-m", "tests.wire.child_node", address], stdin=subprocess.PIPE)
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stdin is not None
        child.stdin.close()


if __name__ == "__main__":
    main(sys.argv[1])
