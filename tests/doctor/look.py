"""Run checks as the command does, in a worker, and collect what they find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from doctor.asked import Asked
from doctor.finding import Finding, Level
from doctor.groups import CHECKS

ROOT = Path(__file__).parents[2]


def asked(model: Path | str = "smollm2-135m", **values: Any) -> Asked:
    """What the command line makes of these options."""
    return Asked.of({"model": str(model), "device": "cpu", **values})


def find(check: str, model: Path | str = "smollm2-135m", **values: Any) -> list[Finding]:
    """Run a check in this process."""
    return list(CHECKS[check].run(asked(model, **values)))


def find_one(check: str, model: Path | str = "smollm2-135m", **values: Any) -> Finding:
    """Run a check that has one line to say."""
    [finding] = find(check, model, **values)
    return finding


def find_elsewhere(
    check: str,
    *before: str,
    prepare: Callable[[], None] | None = None,
    env: dict[str, str] | None = None,
    **values: Any,
) -> list[Finding]:
    """Run a check in a worker of its own.

    Args:
        before: a command to be put before the worker's own.
        prepare: called in the new process before anything else.
        env: variables that it gets beside ours.
    """
    request = {"values": {"model": "smollm2-135m", "device": "cpu", **values}, "checks": [check]}
    with subprocess.Popen(
        [*before, sys.executable, "-P", "-m", "doctor.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | (env or {}),
        start_new_session=True,  # a worker ends its whole process group
        preexec_fn=prepare,
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(json.dumps(request).encode() + b"\n")
        worker.stdin.flush()
        events = [json.loads(line) for line in worker.stdout]
    found = [event["finding"] for event in events if "finding" in event]
    return [Finding(**fields | {"level": Level(fields["level"])}) for fields in found]
