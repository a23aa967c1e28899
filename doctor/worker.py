"""The process that looks: runs the checks that it is told, one after the other, and writes what each finds.

`python -m doctor.worker`: one line on standard input says what was asked and which checks to run; standard
output gets a line for each begin, finding and end. What libraries print goes to standard error. A check may
crash or hang here: `runner.py`, at the other end, sees it and goes on with another worker.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from common.errors import ConfigError
from doctor.asked import Asked, Check
from doctor.finding import Finding, problem
from doctor.groups import CHECKS


def findings_of(check: Check, asked: Asked) -> Iterator[Finding]:
    """Yield what a check finds; what it raises is a problem, too."""
    try:
        yield from check.run(asked)
    except ConfigError as error:
        yield problem(str(error), "change what the message names")
    except Exception as error:  # whatever this machine makes of it
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        yield problem(f"the check itself failed: {reason}", "see what the message names; else report it")


def _end_with_parent() -> None:
    """End this process and all that it started when standard input ends: whoever asked is gone."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def main(known: Mapping[str, Check] = CHECKS) -> None:
    """Run the checks that are asked for, by their names."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def say(**event: Any) -> None:
        lines.write(json.dumps(event) + "\n")

    asked = Asked.of(request["values"])
    for name in request["checks"]:
        say(begin=name)
        for finding in findings_of(known[name], asked):
            say(finding=asdict(finding) | {"level": finding.level.value})
        say(end=name)
    os._exit(0)  # torch takes seconds to tear down


if __name__ == "__main__":
    main()
