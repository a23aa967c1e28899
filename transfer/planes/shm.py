"""The plane for two processes on one host without GPUs: how P maps D's pool (see one_sided.py for the rest).

D's pool is a memfd. D names the descriptor in its Hello, P opens it as /proc/PID/fd/N: the memory has no
name, so a kill leaves nothing behind. A page moves in one copy.
"""

from __future__ import annotations

import fcntl
import os

from common.errors import ConfigError
from common.host import open_pidfd, same_host
from common.kv.pool import KVPool
from common.messages import Hello
from transfer.planes.base import PlaneUnavailable

SHM = "shm"


def open_pool(local: Hello, peer: Hello) -> KVPool:
    """Map the pool that a decode node on this host offers in its Hello.

    The pid and start time of the Hello must be those of a living process *after* the descriptor was
    opened, or it could be another process's; the size must be what the layout says, and sealed: memory
    that shrinks would kill whoever writes there.

    Raises:
        PlaneUnavailable: it is not there, or not what the Hello says.
    """
    if peer.shm is None or peer.layout is None:
        raise PlaneUnavailable("it offers no shared pool")
    if not same_host(local.host, peer.host):
        raise PlaneUnavailable("it is on another host")
    try:
        fd = os.open(f"/proc/{peer.host.pid}/fd/{peer.shm.fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise PlaneUnavailable(f"its memory cannot be opened: {error.strerror}") from None
    try:
        pidfd = open_pidfd(local.host, peer.host)
        if pidfd is None:
            raise PlaneUnavailable("its process is gone")
        os.close(pidfd)
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise PlaneUnavailable("its memory is not sealed")
        return KVPool.map(peer.layout, peer.shm.num_pages, fd)
    except (ConfigError, OSError) as error:
        raise PlaneUnavailable(str(error)) from None
    finally:
        os.close(fd)
