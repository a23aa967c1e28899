"""Who a process is on its host, and how to know that it died.

A pidfd is readable 2 ms after a SIGKILL and silent for a stopped process, so on one host it is the only
death notice that is neither late nor wrong.
"""

from __future__ import annotations

import os

from common.messages import HostIdentity


def _start_time(pid: int | str) -> int:
    """Field 22 of /proc/PID/stat: clock ticks from boot to the process's start (proc(5))."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
        # The command name, in parentheses, may hold blanks and parentheses of its own.
        return int(stat.read().rpartition(")")[2].split()[19])


def this_process() -> HostIdentity:
    """Describe this process."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot_id:
        return HostIdentity(
            boot_id=boot_id.read().strip(),
            pid_namespace=os.stat("/proc/self/ns/pid").st_ino,
            pid=os.getpid(),
            start_time=_start_time("self"),
        )


def open_pidfd(ours: HostIdentity, theirs: HostIdentity) -> int | None:
    """Open a descriptor that becomes readable when their process ends; the caller closes it.

    None when all four parts of the identity do not match a process here: it is on another host, or gone.
    The start time is compared after the open: before it, the pid could pass to another process in between.
    """
    if (ours.boot_id, ours.pid_namespace) != (theirs.boot_id, theirs.pid_namespace):
        return None
    identity = theirs
    try:
        fd = os.pidfd_open(identity.pid)
    except OSError:
        return None
    try:
        if _start_time(identity.pid) == identity.start_time:
            return fd
    except (FileNotFoundError, ProcessLookupError):
        pass
    os.close(fd)
    return None
