"""One end of hand-overs in a process of its own, to be stopped and killed.

`python -m tests.wire.plane_child prefill ADDRESS PLANE DEVICE`: a P. It sends as many pages of a prompt as
the prompt's first token says, its pages 1, 2, ...; the rest when a line comes on standard input.

`python -m tests.wire.plane_child decode ADDRESS PLANE DEVICE`: a D that wants two pages.

Both end when their standard input does.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import zmq

from common.messages import Choice, Prefill, Role, int32s
from common.request import PrefillStamps
from common.sockets import Pollable, wait
from tests.wire.endpoint_world import (
    CPU,
    P_NAME,
    SAMPLING,
    VERIFY,
    decode_endpoint,
    filled_pool,
    greeting_of,
    prefill_endpoint,
)
from tests.wire.hellos import LAYOUT, here
from transfer.planes.shm import SHM
from transfer.sender import FirstToken
from transfer.sender_endpoint import SenderEndpoint, TransferArrived, TransferKey


def input_or(pollables: list[Pollable]) -> bool:
    """Wait a while for either; True when there is something on standard input."""
    wait([*pollables, sys.stdin.fileno()], 0.1)
    return bool(zmq.select([sys.stdin.fileno()], [], [], 0)[0])


def run_prefill(p: SenderEndpoint) -> None:
    """Compute what arrives."""
    while not input_or(p.pollables()):
        for output in p.poll(time.monotonic()):
            if isinstance(output, TransferArrived):
                compute(p, output.key, output.prefill)


def compute(p: SenderEndpoint, key: TransferKey, prefill: Prefill) -> None:
    """Send the first pages; read no message, as in a long forward, until the others are to be sent."""
    first, num_pages = prefill.prompt_ids[0], len(prefill.page_ids)
    p.start(key)
    sent = p.counters()["pages_sent"]
    p.chunk(key, 0, range(1, first + 1), is_last=False)
    while p.counters()["pages_sent"] < sent + first:  # on a GPU they take a while
        p.poll(time.monotonic())
    sys.stdin.buffer.readline()
    p.chunk(key, first, range(first + 1, num_pages + 1), is_last=True)
    p.first_token(key, FirstToken((Choice(42, None),), PrefillStamps()))


def main(role: str, address: str, plane: str, device: str) -> None:
    """Run until standard input is closed."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    config = replace(VERIFY, transfer=plane)
    shared = role == "decode" and plane == SHM
    pool = filled_pool(LAYOUT, 32, seed=1, shared=shared, device=torch.device(device))
    local = here(greeting_of(Role(role), pool, config))
    if role == "prefill":
        run_prefill(prefill_endpoint(context, address, pool, config, local))
        return
    d = decode_endpoint(context, address, pool, config, local)
    asked = False
    while not input_or(d.pollables()):
        d.poll(time.monotonic())
        if not asked and d.ready_nodes():
            asked = True
            d.grant(P_NAME, int32s(range(8)), SAMPLING, [1, 2])


@contextmanager
def plane_child(
    role: str, address: str, plane: str, device: torch.device = CPU
) -> Iterator[subprocess.Popen[bytes]]:
    """A running child; killed and reaped at the end."""
    command = [sys.executable, "-m", "tests.wire.plane_child", role, address, plane, str(device)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        try:
            yield child
        finally:
            child.kill()


if __name__ == "__main__":
    main(*sys.argv[1:])
