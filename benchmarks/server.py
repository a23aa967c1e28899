"""A real server for a benchmark: `baton serve` as a user starts it, or one that runs already."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import httpx

from benchmarks.server_process import stop
from common.errors import ConfigError
from terminal.progress import progress

_BATON = Path(sys.executable).parent / "baton"
_LISTENING = re.compile(r"listening on (http://\S+?);?\s")
_START_S = 900.0  # on GPUs a first one builds kernels for some minutes; one that fails ends by itself
_END_S = 15.0
_POLL_S = 0.1
_LOOKUP_S = 10.0


@contextmanager
def running(model: Path, *options: str) -> Iterator[str]:
    """Serve a model folder for a while; gives the address.

    Raises:
        ConfigError: it did not come up.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    with _signals_raise(), tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [_BATON, "serve", model, "--port", "0", *options],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,
        )

        def said() -> str:
            # Not by seek and read: the server writes where that leaves the offset, which both share.
            return os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).decode(errors="replace")

        try:
            give_up_s = time.monotonic() + _START_S
            with progress("starting a server"):
                while (url := _ready(said())) is None:
                    if process.poll() is not None or time.monotonic() > give_up_s:
                        raise ConfigError(f"the server did not come up:\n{said()}")
                    time.sleep(_POLL_S)
            yield url
        finally:
            stop(process, _END_S)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Have what ends us raise inside, so that a server, in a process group of its own, ends with us."""
    # Not what another server has set already, nor what nohup ignores.
    ending = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]
    for signum in ending:
        signal.signal(signum, _exit)
    try:
        yield
    finally:
        for signum in ending:
            signal.signal(signum, signal.SIG_DFL)


def _exit(signum: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signum)


def _ready(log: str) -> str | None:
    """Return the address of a server that is ready for requests."""
    if (found := _LISTENING.search(log)) is None:
        return None
    try:
        return found[1] if httpx.get(found[1] + "/ready", trust_env=False).is_success else None
    except httpx.TransportError:
        return None


def first_model(url: str, api_key: str | None) -> str:
    """Return the model that a server has.

    Raises:
        ConfigError: it cannot be asked.
    """
    try:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        answer = httpx.get(url + "/v1/models", headers=headers, timeout=_LOOKUP_S, trust_env=False)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError) as error:
        raise ConfigError(f"{url} does not name its models: {error}") from None
