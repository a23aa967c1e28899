"""Knowing that a process ended, whatever the number of the descriptor."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys

from common.host import has_ended

HIGH_FD = 1500  # select takes numbers below 1,024 only


def test_the_end_of_a_process_is_seen_through_a_descriptor_of_a_high_number() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * HIGH_FD), hard))
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    low = os.pidfd_open(process.pid)
    high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, HIGH_FD)
    try:
        assert not has_ended(high)
        process.kill()
        process.wait()
        assert has_ended(high)
    finally:
        os.close(low)
        os.close(high)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert process.stdin is not None
        process.stdin.close()
