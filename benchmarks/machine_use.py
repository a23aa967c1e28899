"""How much of the machine others took while we measured, from /proc (proc(5)). Knows no benchmark."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_IDLE, _IO_WAIT = 3, 4  # columns of /proc/stat
_USUAL = 8  # those after count guests, which are in the first two already


@dataclass(frozen=True, slots=True)
class MachineUse:
    """Processor seconds until a moment: of all programs on our cores (stolen time too), and of ours alone."""

    at_s: float
    all_s: float
    ours_s: float

    @classmethod
    def now(cls) -> MachineUse:
        """Look; ours are this process and all that descend from it."""
        return cls(time.monotonic(), _all_s(), _family_s(os.getpid()))

    def others_since(self, before: MachineUse) -> float:
        """Return the share of our cores that others took, 0 to 1."""
        cores_s = (self.at_s - before.at_s) * len(os.sched_getaffinity(0))
        others_s = (self.all_s - before.all_s) - (self.ours_s - before.ours_s)
        return min(1.0, max(0.0, others_s / cores_s)) if cores_s > 0 else 0.0


def _all_s() -> float:
    ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    busy = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name in ours:
            busy += sum(int(t) for i, t in enumerate(ticks[:_USUAL]) if i not in (_IDLE, _IO_WAIT))
    return busy * _TICK_S


def _family_s(root: int) -> float:
    """Return the processor seconds of a process and its descendants that live, all threads."""
    parents, seconds = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        pid = int(path.parent.name)
        parents[pid] = int(fields[1])
        seconds[pid] = (int(fields[11]) + int(fields[12])) * _TICK_S
    family, total = {root}, 0.0
    for pid in seconds:
        _join(pid, parents, family)
    for pid in family:
        total += seconds.get(pid, 0.0)
    return total


def _join(pid: int, parents: dict[int, int], family: set[int]) -> None:
    """Add a process to the family where one of its ancestors is in it."""
    line, at = [], pid
    while at in parents and at not in family:
        line.append(at)
        at = parents[at]
    if at in family:
        family.update(line)
