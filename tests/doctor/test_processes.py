"""What processes may know of each other: as it is here, and where it is forbidden."""

from __future__ import annotations

import errno
import os
import subprocess

import pytest

from doctor.finding import Level
from doctor.processes import OFFER, OPEN, judge_namespace, judge_process_memory, try_pidfd, try_process_memory
from tests.doctor.look import find_elsewhere, find_one

# As another user than root, who may do everything; and as a process that nobody of that user may look into.
_NOBODY = "import os\nif os.geteuid() == 0:\n    os.setuid(65534)\n"
_CLOSED = "import ctypes\n{then}ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n"  # PR_SET_DUMPABLE


@pytest.mark.parametrize("check", ["pidfd", "pid-namespace", "process-memory"])
def test_this_machine_serves(check: str) -> None:
    assert find_one(check).level is Level.OK


def test_a_pidfd_that_is_refused_or_tells_nothing_is_said() -> None:
    def refused(pid: int) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    assert try_pidfd(refused) == "pidfd_open: Operation not permitted"
    reading, writing = os.pipe()  # readable at once, as of a process that ended
    os.close(writing)
    assert try_pidfd(lambda pid: reading) == "the pidfd of a living process says that it has ended"


def unshared() -> bool:
    command = ["unshare", "--pid", "--fork", "--kill-child", "true"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not unshared(), reason="no PID namespaces here")
def test_proc_of_another_namespace_is_a_problem() -> None:
    [finding] = find_elsewhere("pid-namespace", "unshare", "--pid", "--fork", "--kill-child")
    assert finding.level is Level.PROBLEM
    assert "it shows another PID namespace" in finding.found


def test_own_proc_is_well() -> None:
    assert judge_namespace(7, "7", 1, "init").level is Level.OK
    assert judge_namespace(7, "4711", 1, "init").level is Level.PROBLEM


@pytest.fixture(scope="module")
def forbidden() -> str:
    """Why a process that is closed to others cannot be looked into; really tried."""
    why = try_process_memory(_CLOSED.format(then=_NOBODY) + OFFER, _NOBODY + OPEN)
    assert why is not None
    return why


def test_memory_of_a_closed_process_is_a_warning(forbidden: str) -> None:
    assert "Permission denied" in forbidden
    finding = judge_process_memory(forbidden, "auto", "1", on_gpu=False)
    assert finding.level is Level.WARNING
    assert "ptrace_scope 1: a process may trace its children" in finding.found


def test_with_shm_asked_for_it_is_a_problem_and_elsewhere_nothing(forbidden: str) -> None:
    assert judge_process_memory(forbidden, "shm", None, on_gpu=False).level is Level.PROBLEM
    assert judge_process_memory(forbidden, "frames", None, on_gpu=False).level is Level.OK
    assert judge_process_memory(forbidden, "auto", None, on_gpu=True).level is Level.OK


def test_memory_of_an_open_process_of_the_same_user_is_written() -> None:
    assert try_process_memory() is None
