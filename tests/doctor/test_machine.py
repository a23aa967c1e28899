"""Cores, memory, shared memory, descriptors, clocks: on this machine, under limits, and as others are."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from doctor.finding import Level
from doctor.machine import (
    GIB,
    judge_clock,
    judge_cpu,
    judge_memory,
    judge_shared_memory,
    read_cpu,
    try_memfd,
)
from gateway.connections import OTHER_DESCRIPTORS, RESERVE
from tests.doctor.look import find, find_elsewhere, find_one

LEAST = RESERVE + OTHER_DESCRIPTORS
X86 = frozenset({"sse2", "avx2", "avx512_bf16"})


@pytest.mark.parametrize("check", ["cpu", "memory", "shared-memory", "descriptors", "clocks"])
def test_this_machine_serves(check: str) -> None:
    assert find_one(check).level in (Level.OK, Level.WARNING)


def test_cpuinfo_of_x86_and_arm_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(
        "processor\t: 0\nmodel name\t: A CPU\nflags\t\t: fpu avx2\n\nmodel name\t: Another\nflags\t: x\n"
    )
    assert read_cpu(path) == ("A CPU", frozenset({"fpu", "avx2"}))
    path.write_text("processor\t: 0\nFeatures\t: fp asimd bf16\n")
    assert read_cpu(path) == ("processor", frozenset({"fp", "asimd", "bf16"}))


@pytest.mark.parametrize(
    ("flags", "cores", "on_gpu", "level"),
    [
        (X86, 2, False, Level.OK),
        (X86, 1, False, Level.WARNING),  # two nodes take turns
        (frozenset({"sse2"}), 8, False, Level.WARNING),
        (frozenset({"sse2"}), 1, True, Level.OK),  # nodes compute elsewhere
        (frozenset({"asimd"}), 2, False, Level.OK),
    ],
)
def test_cores(flags: frozenset[str], cores: int, on_gpu: bool, level: Level) -> None:
    assert judge_cpu("A CPU", flags, cores, 2, on_gpu=on_gpu).level is level


def test_more_nodes_than_cores_is_a_warning() -> None:
    nodes = 10_000
    assert find_one("cpu", prefill=nodes, decode=nodes).level is Level.WARNING


def test_little_memory_is_a_warning() -> None:
    assert judge_memory(GIB // 2, None, 0).level is Level.WARNING
    plenty = judge_memory(8 * GIB, 16 * GIB, 2 * GIB)
    assert plenty.level is Level.OK
    assert "limit is 16.0 GiB, 2.0 GiB swap" in plenty.found


def test_memory_that_cannot_be_shared_is_a_problem_where_it_is_needed() -> None:
    # More than a file can have: the kernel refuses it, as one without memfd refuses all.
    why_not = try_memfd(1 << 63 - 1)
    assert why_not is not None
    assert judge_shared_memory(why_not, is_needed=True).level is Level.PROBLEM
    assert judge_shared_memory(why_not, is_needed=False).level is Level.OK
    assert "no /dev/shm" in judge_shared_memory(None, Path("/no/such/folder"), is_needed=True).found


def limited(soft: int, hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("soft", "hard", "level", "words"),
    [
        (LEAST - 1, LEAST - 1, Level.PROBLEM, f"has {LEAST} besides"),
        (LEAST + 50, LEAST + 50, Level.WARNING, f"--max-connections 51 needs {LEAST + 51}"),
        (LEAST + 50, LEAST + 51, Level.OK, "raises its own"),
        (LEAST + 51, LEAST + 51, Level.OK, "needs"),
    ],
)
def test_descriptors_under_a_limit(soft: int, hard: int, level: Level, words: str) -> None:
    [finding] = find_elsewhere("descriptors", prepare=lambda: limited(soft, hard), max_connections=51)
    assert finding.level is level
    assert words in finding.found
    if level is Level.WARNING:
        assert "--max-connections 50" in finding.remedy


def test_a_slow_clock_is_a_warning() -> None:
    assert judge_clock("tsc", 50.0).level is Level.OK
    slow = judge_clock("hpet", 1500.0)
    assert slow.level is Level.WARNING
    assert "hpet is read by the kernel" in slow.found
    assert "read by the kernel" not in judge_clock("tsc", 1500.0).found


def test_cores_are_those_that_this_process_may_use() -> None:
    one = min(os.sched_getaffinity(0))
    [finding] = find_elsewhere("cpu", prepare=lambda: os.sched_setaffinity(0, {one}))
    assert finding.found.startswith("1 core of ")
    assert finding.level is Level.WARNING
    assert find("cpu", colocated=True)[0].level is Level.OK
