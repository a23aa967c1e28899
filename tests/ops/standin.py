"""A stand-in for `baton`: the same subcommands and the real Lifeline, but no model behind them.

The variable STANDIN_<COMMAND> says how a process behaves: well (the default), fails, stubborn, hangs, busy
(after SIGTERM until SIGUSR1, or until SIGINT hurries it).
STANDIN_GPUS is the number of GPUs that `prepare` reports.
Its first line on stderr is `up PID`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from common.supervision.lifeline import Lifeline

BEAT_S = 0.1


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _option(name: str) -> str | None:
    places = [i for i, word in enumerate(sys.argv) if word == name]
    return sys.argv[places[-1] + 1] if places else None


def _on_notice(notice: dict[str, Any]) -> None:
    _say(f"told {json.dumps(notice, sort_keys=True)}")


def _listen(lifeline: Lifeline) -> None:
    """Make what a process has in the run folder, and, for the gateway, its port."""
    address = _option("--nodes") or _option("--listen")
    if address is not None:
        Path(address.removeprefix("ipc://")).touch()
    if sys.argv[1] != "gateway":
        lifeline.ready()
        return
    lifeline.subscribe(_on_notice)
    listener = socket.create_server(("127.0.0.1", int(_option("--port") or 8000)))
    port = listener.getsockname()[1]
    _say(f"port {port}")
    own = os.environ.get("STANDIN_OWN_FILE")
    if own is not None:
        lifeline.remove_at_exit(Path(own))
        Path(own).touch()
    lifeline.ready(port=port)
    lifeline.usable(True)


def _serve(lifeline: Lifeline, mode: str) -> None:
    end = threading.Event()

    def on_term(*_: object) -> None:
        _say(f"{os.getpid()} is busy" if mode == "busy" else "told to end")
        if mode not in ("stubborn", "busy"):
            end.set()

    def on_int(*_: object) -> None:
        if mode == "busy":
            _say("told to hurry")
            end.set()

    signal.signal(signal.SIGINT, on_int)
    signal.signal(signal.SIGUSR1, lambda *_: end.set())
    signal.signal(signal.SIGTERM, on_term)
    if mode == "stubborn":
        grandchild = subprocess.Popen(["sleep", "1000"])
        _say(f"grandchild {grandchild.pid}")
    if mode != "hangs":
        _listen(lifeline)
    while not end.wait(BEAT_S):
        lifeline.alive()


def main() -> None:
    """Behave as the subcommand and its mode say."""
    command = sys.argv[1]
    mode = os.environ.get(f"STANDIN_{command.upper()}", "well")
    lifeline = Lifeline(int(_option("--parent-fd") or -1))
    _say(f"up {os.getpid()}")
    if mode == "fails":
        _say("no such layer")
        sys.exit(3)
    if command == "prepare" and mode == "well":
        lifeline.ready(folder="/models/" + sys.argv[-1], gpus=int(os.environ.get("STANDIN_GPUS", "0")))
    elif command == "generate":
        sys.stdout.write(f"answer to {sys.argv[-1]}\n")
    else:
        _serve(lifeline, mode)
    lifeline.close()


if __name__ == "__main__":
    main()
