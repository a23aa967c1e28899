"""A D in a process of its own, with a pool that is most of a GPU, which wants pages again and again.

`python -m tests.gpu.ipc_child ADDRESS GPU NUM_PAGES`: writes a line when its pool is there, and one for each
transfer that is done. Ends when its standard input does.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import zmq

from common.device.memory import wait_for_memory
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.messages import Role, int32s
from common.sockets import wait
from tests.wire.endpoint_world import P_NAME, SAMPLING, VERIFY, decode_endpoint, greeting_of
from tests.wire.hellos import here
from transfer.planes.cuda_ipc import CUDA_IPC
from transfer.receiver_endpoint import TransferDone

LAYOUT = KVLayout(layers=32, page_size=16, kv_heads=8, head_dim=128, dtype="bfloat16")  # 2 MiB a page
WANTED = 64  # pages of a transfer


def main(address: str, gpu: str, num_pages: int) -> None:
    """Run until standard input is closed."""
    device = torch.device("cuda", int(gpu))
    torch.cuda.set_device(device)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    wait_for_memory(device, (num_pages + 1) * LAYOUT.page_bytes)
    pool = KVPool(LAYOUT, num_pages, device)
    config = type(VERIFY)(transfer=CUDA_IPC, verify_pages=True)
    d = decode_endpoint(context, address, pool, config, here(greeting_of(Role.DECODE, pool, config)))
    print("ready", flush=True)  # noqa: T201
    # From both ends of the pool: a page far up is in reach, too.
    pages = [*range(1, WANTED // 2 + 1), *range(num_pages - WANTED // 2 + 1, num_pages + 1)]
    waits = False
    while not zmq.select([sys.stdin.fileno()], [], [], 0)[0]:
        wait([*d.pollables(), sys.stdin.fileno()], 0.1)
        for output in d.poll(time.monotonic()):
            assert isinstance(output, TransferDone), output  # its checksums were right
            print("done", flush=True)  # noqa: T201
            waits = False
        if not waits and d.ready_nodes():
            waits = True
            d.grant(P_NAME, int32s(range(WANTED * LAYOUT.page_size)), SAMPLING, pages)


@contextmanager
def ipc_child(address: str, gpu: torch.device, num_pages: int) -> Iterator[subprocess.Popen[bytes]]:
    """A running child; killed and reaped at the end."""
    command = [sys.executable, "-m", "tests.gpu.ipc_child", address, str(gpu.index), str(num_pages)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            yield child
        finally:
            child.kill()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
