"""What the machine has: cores, memory, shared memory, descriptors, clocks. Knows no model and no GPU."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from common.gpus import wants_gpu
from common.supervision.small_machine import available_cores
from doctor.asked import Asked, Check
from doctor.finding import Fact, Finding, ok, problem, warning

GIB = 2**30
_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_tile",
    "asimd",
    "asimdhp",
    "bf16",
    "sve",
)
_LEAST_FLAGS = frozenset({"avx2", "asimd"})
_TIGHT_BYTES = GIB  # what the three processes take before they have a model
_QUICK_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")
_SLOW_READ_NS = 1000.0
_CLOCK_READS = 20_000
_MEMFD_BYTES = 1 << 20
_CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")


def read_cpu(path: Path = Path("/proc/cpuinfo")) -> tuple[str, frozenset[str]]:
    """Return the name of the first processor, and its flags as Linux names them."""
    facts: dict[str, str] = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    flags = facts.get("flags") or facts.get("Features") or ""
    return facts.get("model name", "processor"), frozenset(flags.split())


def judge_cpu(name: str, flags: frozenset[str], cores: int, num_nodes: int, *, on_gpu: bool) -> Finding:
    """Say what the cores are good for. `num_nodes` compute on them, unless they are on GPUs."""
    known = [flag for flag in _FLAGS if flag in flags]
    found = (
        f"{cores} core{'s' * (cores != 1)} of {name} ({', '.join(known) or 'no vector units that we know'})"
    )
    facts: dict[str, Fact] = {"cores": cores, "flags": " ".join(known)}
    if not on_gpu and not flags & _LEAST_FLAGS:
        return warning(
            f"{found}: without AVX2 or NEON products of matrices are many times slower",
            "use another machine, or a model of some million parameters",
            **facts,
        )
    if cores < num_nodes and not on_gpu:
        return warning(
            f"{found}: {num_nodes} nodes compute in turn on {cores}, so a prompt holds up what decodes",
            "start fewer nodes, with --colocated a single one, or give the container more cores",
            **facts,
        )
    return ok(found, **facts)


def judge_memory(available_bytes: int, limit_bytes: int | None, swap_bytes: int) -> Finding:
    """Say how much memory there is; whether a model fits is `room`'s business."""
    limit = "" if limit_bytes is None else f", the container's limit is {limit_bytes / GIB:.1f} GiB"
    swap = f", {swap_bytes / GIB:.1f} GiB swap" if swap_bytes else ", no swap"
    found = f"{available_bytes / GIB:.1f} GiB available{limit}{swap}"
    if available_bytes < _TIGHT_BYTES:
        return warning(
            f"{found}: three processes with torch take about {_TIGHT_BYTES / GIB:g} GiB without any model",
            "end other programs, or raise the container's limit",
            available_bytes=available_bytes,
        )
    return ok(found, available_bytes=available_bytes)


def try_memfd(num_bytes: int = _MEMFD_BYTES) -> str | None:
    """Make a pool as a decode node does: a sealed memfd, mapped and written. Returns why that fails."""
    try:
        fd = os.memfd_create("baton-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (OSError, AttributeError) as error:
        return f"memfd_create: {getattr(error, 'strerror', error)}"
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        with mmap.mmap(fd, num_bytes) as memory:
            memory[:] = bytes(num_bytes)
    except OSError as error:
        return f"memory of a memfd cannot be sealed or mapped: {error.strerror}"
    finally:
        os.close(fd)
    return None


def judge_shared_memory(why_not: str | None, shm: Path = Path("/dev/shm"), *, is_needed: bool) -> Finding:
    """Say whether processes can share a pool; `is_needed`: a decode node on the CPU, with prefill nodes."""
    room = "no /dev/shm (nothing of Baton's needs it)"
    if shm.is_dir():
        usage = shutil.disk_usage(shm)
        room = f"{shm} has {usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free (pools are not there)"
    if why_not is not None and not is_needed:
        return ok(f"{why_not}; no node here shares its memory so")
    if why_not is not None:
        return problem(
            f"a KV pool cannot be shared memory: {why_not}; {room}",
            "use --colocated, which shares none; or a kernel, or a seccomp profile, that permits "
            "memfd_create",
        )
    return ok(f"sealed memfd, mapped and written; {room}")


def judge_descriptors(soft: int, hard: int, needed: int, least: int, max_connections: int) -> Finding:
    """Hold the limit of open files against what the gateway needs, which raises its own as far as it may.

    Args:
        needed: for all connections.
        least: for none at all.
    """
    unlimited = resource.RLIM_INFINITY
    most = "unlimited" if hard == unlimited else str(hard)
    facts = {"hard_limit": hard, "needed": needed}
    if hard != unlimited and hard < least:
        return problem(
            f"a process may open {hard} files; the gateway has {least} besides its connections",
            f"raise the limit: ulimit -Hn {needed}, LimitNOFILE={needed} in systemd",
            **facts,
        )
    if hard != unlimited and hard < needed:
        return warning(
            f"a process may open {hard} files; --max-connections {max_connections} needs {needed}",
            f"raise the limit (ulimit -Hn {needed}, LimitNOFILE={needed} in systemd), or "
            f"--max-connections {hard - least}",
            **facts,
        )
    raised = "" if soft == unlimited or soft >= needed else ", and the gateway raises its own that far"
    return ok(f"{most} open files; --max-connections {max_connections} needs {needed}{raised}", **facts)


def judge_clock(source: str, read_ns: float) -> Finding:
    """Say whether time costs anything: nodes look at the clock some times a step, the gateway a chunk."""
    found = f"{source}; a look at the clock takes {read_ns:.0f} ns"
    if read_ns > _SLOW_READ_NS:
        more = "" if source in _QUICK_CLOCKS else f": {source} is read by the kernel, not in the process"
        return warning(
            found + more,
            "where the machine has a steady tsc, boot with clocksource=tsc; in a virtual machine ask its "
            "host",
            read_ns=round(read_ns),
        )
    return ok(found, read_ns=round(read_ns))


def read_clock_ns() -> float:
    """Measure a look at the clock; the best of some tries, as others use this machine too."""
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter_ns()
        for _ in range(_CLOCK_READS // 5):
            time.monotonic()
        best = min(best, (time.perf_counter_ns() - started) / (_CLOCK_READS // 5))
    return best


def _cpu(asked: Asked) -> Iterator[Finding]:
    on_gpu = wants_gpu(asked.config.engine)
    num_nodes = len(asked.config.node_names)
    yield judge_cpu(*read_cpu(), available_cores(), num_nodes, on_gpu=on_gpu)


def _memory(asked: Asked) -> Iterator[Finding]:
    from common.kv.pool import available_memory_bytes  # with torch

    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    swap_bytes = next((int(words[1]) * 1024 for words in lines if words[0] == "SwapFree:"), 0)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        limit = ""
    yield judge_memory(available_memory_bytes(), int(limit) if limit.isdecimal() else None, swap_bytes)


def _shared_memory(asked: Asked) -> Iterator[Finding]:
    config = asked.config
    is_needed = not config.decode.colocated and not wants_gpu(config.engine)
    yield judge_shared_memory(try_memfd(), is_needed=is_needed)


def _descriptors(asked: Asked) -> Iterator[Finding]:
    from gateway.connections import OTHER_DESCRIPTORS, RESERVE

    least = RESERVE + OTHER_DESCRIPTORS
    most = asked.config.gateway.max_connections
    yield judge_descriptors(*resource.getrlimit(resource.RLIMIT_NOFILE), most + least, least, most)


def _clocks(asked: Asked) -> Iterator[Finding]:
    source = _CLOCK_SOURCE.read_text().strip() if _CLOCK_SOURCE.exists() else "unknown clock source"
    yield judge_clock(source, read_clock_ns())


CHECKS = (
    Check(
        "cpu",
        "Cores that this process may use (affinity, the container's quota), and what they multiply with.",
        "Nodes on the CPU: fewer cores than nodes, or neither AVX2 nor NEON.",
        "",
        _cpu,
    ),
    Check(
        "memory",
        "Memory that a process may still take, the container's limit, swap.",
        "Less than the processes take without a model.",
        "",
        _memory,
        limit_s=60.0,  # torch is loaded here
    ),
    Check(
        "shared-memory",
        "A sealed memfd, as a KV pool is one, really made and written; and /dev/shm.",
        "",
        "It cannot be made: a decode node beside prefill nodes on the CPU does not start.",
        _shared_memory,
    ),
    Check(
        "descriptors",
        "The limit of open files, against `--max-connections`.",
        "Fewer connections than `--max-connections` are possible.",
        "The gateway could not serve a single one.",
        _descriptors,
    ),
    Check(
        "clocks",
        "The kernel's clock source, and how long a look at the clock takes.",
        "It takes more than 1 microsecond.",
        "",
        _clocks,
    ),
)
