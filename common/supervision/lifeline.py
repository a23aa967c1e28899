"""The child's end of the line to its supervisor: says that it is ready and alive, ends when the parent ends.

The line is a socket pair of whole messages (SOCK_SEQPACKET), one JSON object each. Up: `{"event": "ready"}`
once, then `{"event": "status", "usable": bool}`. Down: `{"run_dir": path}` first, then what the supervisor
has to tell this role. A message that does not fit into the socket is dropped whole; each repeats the whole
state, so that the next one heals it.

It must not know what the process does: the node's own loop calls `alive`, so that a stopped or stuck loop is
missed by the supervisor.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import ConfigError

MAX_NOTICE_BYTES = 1 << 16


def remove(path: Path) -> None:
    """Remove a file or a folder, whether it is there or not."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


class Lifeline:
    """One process's line to `baton serve`; without one (`fd` None: started by hand) it only removes paths.

    A thread of its own reads the line, so that the end of the parent is seen while the main thread computes:
    it then removes the paths and ends the process on the spot, without a word to anybody.

    Raises:
        ConfigError: `fd` is no socket.
    """

    def __init__(self, fd: int | None) -> None:
        self._lock = threading.Lock()
        self._paths: list[Path] = []
        self._run_dir: Path | None = None
        self._is_usable = False
        self._on_notice: Callable[[dict[str, Any]], None] | None = None
        self._unheard: list[dict[str, Any]] = []
        self._socket: socket.socket | None = None
        if fd is None:
            return
        try:
            self._socket = socket.socket(fileno=fd)
        except OSError as error:
            raise ConfigError(f"--parent-fd {fd} is no socket: {error.strerror}") from None
        self._socket.set_inheritable(False)  # a grandchild that held it would hide our death
        threading.Thread(target=self._read, args=(self._socket,), name="lifeline", daemon=True).start()

    @property
    def is_supervised(self) -> bool:
        """There is somebody at the other end."""
        return self._socket is not None

    def ready(self, **info: Any) -> None:
        """Say that this process is up; `info` is what the supervisor cannot know (the gateway's `port`)."""
        self._send({"event": "ready", **info})

    def alive(self) -> None:
        """Give a sign of life; for the node's own loop, about once a second. Never blocks."""
        self._send({"event": "status", "usable": self._is_usable})

    def usable(self, usable: bool) -> None:
        """Say whether a pair of nodes can serve (the gateway alone knows)."""
        if usable != self._is_usable:
            self._is_usable = usable
            self.alive()

    def subscribe(self, on_notice: Callable[[dict[str, Any]], None]) -> None:
        """Hand what the supervisor says, and said before, to `on_notice`, in the line's thread."""
        with self._lock:
            self._on_notice = on_notice
            unheard, self._unheard = self._unheard, []
            for notice in unheard:
                on_notice(notice)

    def remove_at_exit(self, path: Path) -> None:
        """Take care that a file or folder of this process is gone when it ends or when its parent is gone."""
        with self._lock:
            self._paths.append(path)

    def close(self) -> None:
        """Remove the paths. The line stays watched until the process is really gone: its end may hang."""
        with self._lock:
            paths, self._paths = self._paths, []
        for path in paths:
            remove(path)

    def _send(self, message: dict[str, Any]) -> None:
        if self._socket is not None:
            # Full: a supervisor that is stopped. Closed: the reader thread sees it too, and acts on it.
            with contextlib.suppress(OSError):
                self._socket.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)

    def _read(self, line: socket.socket) -> None:
        while True:
            try:
                data = line.recv(MAX_NOTICE_BYTES)
            except OSError:
                data = b""  # ECONNRESET: the parent died with something of ours unread
            if not data:
                break
            self._take(json.loads(data))
        self.close()
        if self._run_dir is not None:
            remove(self._run_dir)  # every process in it is ending by itself right now
        os._exit(0)

    def _take(self, notice: dict[str, Any]) -> None:
        if "run_dir" in notice:
            self._run_dir = Path(notice["run_dir"])
            return
        with self._lock:
            if self._on_notice is None:
                self._unheard.append(notice)
            else:
                self._on_notice(notice)
