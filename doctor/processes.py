"""What processes may know of each other: deaths by pidfd, the PID namespace, memory by /proc/PID/fd.

All of it is really tried, with small processes of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from common.gpus import wants_gpu
from common.host import has_ended
from doctor.asked import Asked, Check
from doctor.finding import Finding, ok, problem, warning

_PATIENCE_MS = 10_000
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_YAMA_MEANING = {
    "0": "processes of a user may trace each other",
    "1": "a process may trace its children",
    "2": "only root may trace",
    "3": "nobody may trace",
}
# A decode node: memory that has no name, but for the descriptor.
OFFER = textwrap.dedent(
    """
    import os, sys
    fd = os.memfd_create("baton-doctor")
    os.ftruncate(fd, 4096)
    print(os.getpid(), fd, flush=True)
    sys.stdin.read()
    print(os.pread(fd, 5, 0).decode(), flush=True)
    """
)
# A prefill node: opens it by the decode node's pid, and writes.
OPEN = textwrap.dedent(
    """
    import os, sys
    pid, fd = sys.argv[1:]
    try:
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    except OSError as error:
        sys.exit(f"/proc/{pid}/fd/{fd} cannot be opened: {error.strerror}")
    os.pwrite(opened, b"baton", 0)
    """
)


def try_pidfd(pidfd_open: Callable[[int], int] = os.pidfd_open) -> str | None:
    """Kill a process, and see that its pidfd tells. Returns why that fails."""
    import select

    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        try:
            pidfd = pidfd_open(child.pid)
        except OSError as error:
            return f"pidfd_open: {error.strerror}"
        try:
            if has_ended(pidfd):
                return "the pidfd of a living process says that it has ended"
            child.send_signal(signal.SIGKILL)
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            return None if poller.poll(_PATIENCE_MS) else "a pidfd does not tell that its process ended"
        finally:
            os.close(pidfd)
    finally:
        child.kill()
        child.communicate()


def judge_namespace(own_pid: int, proc_self: str, namespace: int, init_name: str) -> Finding:
    """Hold the pid that a process has against the one that its /proc shows."""
    if proc_self != str(own_pid):
        return problem(
            f"this process is {own_pid}, but /proc says {proc_self}: it shows another PID namespace",
            "mount /proc anew in the namespace (unshare --mount-proc), as container runtimes do",
        )
    return ok(
        f"PID namespace {namespace}, its first process is {init_name}; nodes must share it for shm and "
        "cuda-ipc"
    )


def try_process_memory(offer: str = OFFER, opener: str = OPEN) -> str | None:
    """Have a process write into a sibling's memfd, as P does into D's pool. Returns why that fails.

    Args:
        offer: what the one with the memory runs.
        opener: what the other one runs.
    """
    command = [sys.executable, "-S", "-c"]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, offer], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as owner:
        assert owner.stdout is not None
        try:
            offered = owner.stdout.readline().split()
            if not offered:
                _, said = owner.communicate(timeout=_PATIENCE_MS / 1000)
                reason = " ".join(said.split()[-20:])
                return f"a process has no memory to offer: {reason}"
            writer = subprocess.run([*command, opener, *offered], capture_output=True, text=True, check=False)
            written, _ = owner.communicate(timeout=_PATIENCE_MS / 1000)
        finally:
            owner.kill()
    if writer.returncode:
        return writer.stderr.strip().splitlines()[-1]
    return None if written.strip() == "baton" else "what one process wrote did not arrive at the other"


def judge_process_memory(why_not: str | None, transfer: str, yama: str | None, *, on_gpu: bool) -> Finding:
    """Say whether the plane shm can work; nodes on GPUs do not need it."""
    scope = f"; ptrace_scope {yama}: {_YAMA_MEANING.get(yama, 'unknown')}" if yama is not None else ""
    if why_not is None:
        return ok(f"a process writes into the memory of another by /proc/PID/fd{scope}")
    found = f"{why_not}{scope}"
    if on_gpu:
        return ok(f"{found}; nodes on GPUs do not need it")
    remedy = (
        "run all nodes as the same user, without hidepid on /proc, and without a profile (AppArmor, seccomp) "
        "that forbids it"
    )
    if transfer == "shm":
        return problem(f"{found}: --transfer shm cannot work", remedy)
    if transfer == "frames":
        return ok(f"{found}; --transfer frames does not need it")
    return warning(f"{found}: pages travel as frames, at about a third of the speed", remedy)


def _pidfd(asked: Asked) -> Iterator[Finding]:
    why_not = try_pidfd()
    if why_not is None:
        yield ok("the death of a process is known at once, by its pidfd")
    else:
        yield problem(
            why_not,
            "a kernel from 5.3 on has pidfds; in a container, a seccomp profile may forbid pidfd_open",
        )


def _pid_namespace(asked: Asked) -> Iterator[Finding]:
    try:
        init_name = Path("/proc/1/comm").read_text().strip()
    except OSError:
        init_name = "hidden"
    yield judge_namespace(
        os.getpid(), os.readlink("/proc/self"), os.stat("/proc/self/ns/pid").st_ino, init_name
    )


def _process_memory(asked: Asked) -> Iterator[Finding]:
    yama = _YAMA.read_text().strip() if _YAMA.exists() else None
    transfer, on_gpu = asked.config.transfer.transfer, wants_gpu(asked.config.engine)
    yield judge_process_memory(try_process_memory(), transfer, yama, on_gpu=on_gpu)


CHECKS = (
    Check(
        "pidfd",
        "A process is started and killed, and its pidfd must tell.",
        "",
        "It cannot be opened, or does not tell: the supervisor does not start.",
        _pidfd,
    ),
    Check(
        "pid-namespace",
        "Whether /proc shows this process under its own pid.",
        "",
        "It shows another PID namespace: nodes take each other for dead.",
        _pid_namespace,
    ),
    Check(
        "process-memory",
        "Two processes are started; one writes into memory of the other, opened as `/proc/PID/fd/N`. Says "
        "`ptrace_scope`, too.",
        "It may not: pages between nodes on the CPU travel as frames.",
        "It may not, and `--transfer shm` was asked for.",
        _process_memory,
    ),
)
