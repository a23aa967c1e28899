"""Who a process is on its host, and how to know that it died.

A pidfd is readable 2 ms after a SIGKILL and silent for a stopped process, so on one host it is the only
death notice that is neither late nor wrong.
"""

from __future__ import annotations

import os
import select

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


def same_host(ours: HostIdentity, theirs: HostIdentity) -> bool:
    """Say whether their pid means something here."""
    return (ours.boot_id, ours.pid_namespace) == (theirs.boot_id, theirs.pid_namespace)


def open_pidfd(ours: HostIdentity, theirs: HostIdentity) -> int | None:
    """Open a descriptor that becomes readable when their process ends; the caller closes it.

    None when all four parts of the identity do not match a process here: it is on another host, or gone.
    The start time is compared after the open: before it, the pid could pass to another process in between.

    Raises:
        OSError: there is no descriptor left for it.
    """
    if not same_host(ours, theirs):
        return None
    try:
        fd = os.pidfd_open(theirs.pid)
    except ProcessLookupError:
        return None
    is_theirs = False
    try:
        is_theirs = _start_time(theirs.pid) == theirs.start_time
    except (FileNotFoundError, ProcessLookupError):
        pass
    finally:
        if not is_theirs:
            os.close(fd)
    return fd if is_theirs else None


def has_ended(pidfd: int) -> bool:
    """Say whether a pidfd's process has ended. By poll: select refuses descriptors from 1,024 on."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


class DeathWatch:
    """Waits for the end of processes on this host, each under the epoch that it greeted with."""

    def __init__(self, ours: HostIdentity) -> None:
        self._ours = ours
        self._identities: dict[int, HostIdentity] = {}
        self._pidfds: dict[int, int] = {}

    def watch(self, epoch: int, identity: HostIdentity) -> None:
        """Have `dead` report the process once it has ended, or at once when it has."""
        self._identities[epoch] = identity

    def forget(self, epoch: int) -> None:
        """Watch no longer."""
        self._identities.pop(epoch, None)
        fd = self._pidfds.pop(epoch, None)
        if fd is not None:
            os.close(fd)

    def pollables(self) -> list[int]:
        """What to wait for."""
        return list(self._pidfds.values())

    def dead(self) -> list[int]:
        """Return the epochs of processes that have ended, each once."""
        gone = [epoch for epoch in self._identities if self._is_gone(epoch)]
        for epoch in gone:
            self.forget(epoch)
        return gone

    def close(self) -> None:
        """Watch nobody."""
        for epoch in list(self._identities):
            self.forget(epoch)

    def _is_gone(self, epoch: int) -> bool:
        if epoch not in self._pidfds:
            try:
                fd = open_pidfd(self._ours, self._identities[epoch])
            except OSError:
                return False  # not known, and so not dead; asked again the next time
            if fd is None:
                return True
            self._pidfds[epoch] = fd
        return has_ended(self._pidfds[epoch])
