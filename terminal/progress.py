"""Progress of what takes longer than two seconds: a bar, or a wait with its seconds, last on a terminal.

Only where the stream is a terminal: what programs read never has any of it. It must not know what it shows.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TextIO

_TICK_S = 0.5
_COLUMNS = 80  # of a terminal that does not say
_LOCK = threading.RLock()  # tqdm's own is one between processes, too
_BAR = "{desc}: {percentage:3.0f}% |{bar:30}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"
_WAIT = "{desc} [{elapsed}]"


class Progress:
    """What is shown of one piece of work; without a terminal nothing is."""

    def __init__(self, bar: Any = None) -> None:
        self._bar = bar

    def say(self, label: str) -> None:
        """Say what is done now."""
        if self._bar is not None:
            self._bar.set_description_str(label)

    def advance(self, count: int = 1) -> None:
        """Count what was done."""
        if self._bar is not None:
            self._bar.update(count)


@contextmanager
def progress(label: str, total: int | None = None, stream: TextIO | None = None) -> Iterator[Progress]:
    """Show progress inside: a bar where `total` says how much there is to do, else the seconds so far.

    Args:
        stream: where to; None: stderr.
    """
    stream = stream or sys.stderr
    if not stream.isatty():
        yield Progress()
        return
    from tqdm import tqdm  # imported here: few processes have a terminal
    from tqdm.contrib.logging import logging_redirect_tqdm

    tqdm.set_lock(_LOCK)
    shown = tqdm(
        total=total,
        desc=label,
        file=stream,
        bar_format=_WAIT if total is None else _BAR,
        leave=False,
        mininterval=_TICK_S,
        ncols=None if os.get_terminal_size(stream.fileno()).columns else _COLUMNS,
    )
    over = threading.Event()
    with logging_redirect_tqdm(), shown as bar:

        def tick() -> None:
            while not over.wait(_TICK_S):
                bar.refresh()

        ticking = threading.Thread(target=tick, daemon=True)
        ticking.start()
        try:
            yield Progress(bar)
        finally:
            over.set()
            ticking.join()


def beside_progress() -> AbstractContextManager[None]:
    """Write to the terminal inside: what is shown there goes away meanwhile, and comes back below."""
    if "tqdm" not in sys.modules or not sys.stderr.isatty():
        return nullcontext()
    from tqdm import tqdm

    shown: AbstractContextManager[None] = tqdm.external_write_mode(file=sys.stderr)
    return shown
