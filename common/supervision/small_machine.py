"""What each role's process asks of cores that it shares with the others: threads, how they wait, its nice.

It must not import torch: OpenMP reads its variables when torch loads it, so `share_cores` comes before. A
variable that the user has set is left alone.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

from common.messages import Role


@dataclass(frozen=True, slots=True)
class CoreShare:
    """One role's settings; None leaves a variable as it is."""

    nice: int = 0
    omp_wait_policy: str | None = None
    gomp_spincount: int | None = None  # rounds that a thread spins before it sleeps; GNU's default: 300,000


# Times are of a decode step on 2 cores (SmolLM2, bfloat16): 16 ms alone, 35 ms beside a prefill node of the
# same settings.
SHARES: dict[Role, CoreShare] = {
    # It stands between every token and its reader, and needs little.
    Role.GATEWAY: CoreShare(),
    # A token that somebody waits for comes before a prompt: threads without work sleep instead of spinning on
    # a core that decode could use, and the kernel prefers the others. A decode step beside it: 19 to 23 ms.
    Role.PREFILL: CoreShare(nice=5, omp_wait_policy="PASSIVE"),
    # Its threads meet some hundred times a step, and spin for the next time: asleep, a step takes 25 ms. But
    # a spinning thread holds the core that the other one needs: beside other busy processes a step took 100
    # to 390 ms with the default, 47 with this, and 15 to 18 with either on a quiet machine.
    Role.DECODE: CoreShare(gomp_spincount=3000),
}


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
_KEPT_BYTES = 32 << 20  # the largest threshold that glibc takes


def keep_freed_memory() -> None:
    """Have malloc keep buffers of some MiB for the next one, instead of giving them back to the system.

    Every message of the plane `frames` is gathered into fresh memory and received into fresh memory: half of
    its cost was the page faults of memory that had just been given back.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, 8 * _KEPT_BYTES)
    except (OSError, AttributeError):
        pass  # another C library than glibc


def available_cores() -> int:
    """Return the cores that this process may use: its affinity, and its container's quota (cgroup v2).

    Source: cgroup v2's cpu.max holds "QUOTA PERIOD" in microseconds, or "max PERIOD".
    """
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return min(cores, max(1, round(int(quota) / int(period)))) if quota.isdecimal() else cores


def num_threads(cores: int, local_nodes: int, *, colocated: bool) -> int:
    """Return the threads with which a node computes.

    The nodes of one phase divide the cores: with a thread a core in each, those that spin would hold up those
    that work. The other phase counts as idle, which SHARES sees to; colocated nodes are all of one phase.
    """
    phases = 1 if colocated else 2
    return max(1, min(cores, phases * cores // local_nodes))


def share_cores(
    role: Role, local_nodes: int | None = None, *, colocated: bool = False, on_gpu: bool = False
) -> None:
    """Set up this process; `local_nodes` None is a pair, or a single colocated node.

    A node on a GPU (`on_gpu`) computes nothing on the cores that could hold up another one, and its host work
    is what its GPU waits for: it keeps its priority and torch's own threads.
    """
    keep_freed_memory()
    if on_gpu:
        return
    share = SHARES[role]
    if share.omp_wait_policy is not None:
        os.environ.setdefault("OMP_WAIT_POLICY", share.omp_wait_policy)
    if share.gomp_spincount is not None and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(share.gomp_spincount))
    cores = available_cores()
    threads = num_threads(cores, local_nodes or (1 if colocated else 2), colocated=colocated)
    # Where a node may use every core, torch's own choice is better: it knows which ones are hyperthreads.
    if threads < len(os.sched_getaffinity(0)):
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.nice(share.nice)
