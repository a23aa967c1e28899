"""A server that a benchmark started ends with the benchmark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
SCRIPT = """
import sys
from pathlib import Path
from benchmarks import server
server._BATON = Path(sys.argv[1])
server._ready = lambda log: "http://127.0.0.1"
with server.running(Path("a-model")):
    print("up", flush=True)
    sys.stdin.read()
"""


def test_server_ends_with_a_benchmark_that_is_told_to(tmp_path: Path) -> None:
    said = tmp_path / "pid"
    os.mkfifo(said)
    baton = tmp_path / "baton"
    baton.write_text(f"#!/bin/sh\necho $$ > {said}\nexec sleep 1000\n")
    baton.chmod(0o700)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        with subprocess.Popen(
            [sys.executable, "-c", SCRIPT, baton], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as benchmark:
            assert benchmark.stdout is not None
            assert benchmark.stdout.readline() == b"up\n"
            pid = int(said.read_text())
            assert psutil.pid_exists(pid)
            benchmark.send_signal(signum)
            assert benchmark.wait(PATIENCE_S) == 128 + signum
            assert not psutil.pid_exists(pid)
