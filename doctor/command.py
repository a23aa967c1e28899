"""`baton doctor`: run all checks, show what they find; the exit status says whether there is a problem."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import closing
from types import FrameType
from typing import Any, NoReturn

import click

from common.api_key import read_api_key
from common.supervision.serve import refuse_contradictions
from doctor.asked import Asked
from doctor.finding import Level, worst
from doctor.groups import CHECKS, GROUPS
from doctor.render import Lines, Row, as_json
from doctor.runner import Ended, Found, Waiting, run_checks
from doctor.software import own_version


def doctor(values: dict[str, Any]) -> int:
    """Look at this machine for a server with these options; 1 when there is a problem.

    Raises:
        ConfigError: the options contradict each other, or the API key cannot be read.
    """
    begun_s = time.monotonic()
    asked = Asked.of(values)
    refuse_contradictions(asked.config)
    read_api_key(asked.config.gateway.api_key)
    signal.signal(signal.SIGTERM, _exit)  # by an exception: the worker ends with us
    group_of = {check.name: group.name for group in GROUPS for check in group.checks}
    lines = Lines(name_chars=max(map(len, CHECKS)))
    rows: list[Row] = []
    try:
        with closing(run_checks(list(CHECKS.values()), _plain(values))) as events:
            for event in events:
                match event:
                    case Waiting(check, seconds):
                        lines.waiting(check, seconds)
                    case Ended():
                        lines.over()
                    case Found(check, finding):
                        rows.append(Row(group_of[check], check, finding))
                        if not asked.doctor.json:
                            lines.row(rows[-1])
    finally:
        lines.over()
    model = asked.config.model.model
    if asked.doctor.json:
        click.echo(as_json(rows, begun_s, {"version": own_version(), "model": model}))
    else:
        lines.summary(rows, model)
    return int(worst([row.finding for row in rows]) is Level.PROBLEM)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options as JSON can say them; the worker must not be told what is a secret."""
    cache = values.get("cache")
    return values | {"cache": None if cache is None else str(cache), "api_key": None}


def _exit(signum: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signum)
