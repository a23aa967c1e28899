"""How every process writes its log: one line an event, to stderr.

It must not know where the lines go: under `baton serve` the supervisor puts the process's name before them.
"""

from __future__ import annotations

import logging

from common.config import LogConfig


def set_up_logging(config: LogConfig) -> None:
    """Send the log of this process to stderr; libraries speak from `warning` on."""
    logging.basicConfig(
        level=max(logging.WARNING, _level(config)),
        format="%(asctime)s %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.getLogger("baton").setLevel(_level(config))


def _level(config: LogConfig) -> int:
    return logging.getLevelNamesMapping()[config.log_level.upper()]
