"""Fault points: what is to go wrong in this process, asked for at its start by `BATON_FAULTS`. For tests.

    drop:Commit@2; decode-0/delay:Prefill:2s; stall:plane@3:5s; barrier:merge:until=/tmp/go

A rule is `[NODE/]ACTION:POINT[@N][*TIMES][:ARGUMENT]`; docs/fault_points.md has all of them. With `@/FILE`
they are in a file, and are others as soon as the file is.

Here are the language and the counting. What a rule does is done by classes that stand in for a socket, a
plane, an allocator: they are chosen when a node is built, and without rules nothing of this is there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from common.clock import Clock
from common.errors import ConfigError
from common.messages import MESSAGES

log = logging.getLogger("baton.faults")

VARIABLE = "BATON_FAULTS"
LOOK_AGAIN_S = 0.02  # at what is held
ANY = "any"
KINDS = (ANY, *sorted(cls.__name__ for cls in MESSAGES))
POINTS: dict[str, tuple[str, ...]] = {
    "drop": KINDS,
    "double": KINDS,
    "reorder": KINDS,
    "delay": KINDS,
    "stall": ("plane", *KINDS),
    "fail": ("plane",),
    "cut": ("plane",),
    "corrupt": ("page",),
    "swap": ("pages",),
    "refuse": ("allocation", "growth"),
    "barrier": ("after-prefill", "before-commit", "arrived", "merge"),
}
HOLDING = ("delay", "stall", "barrier")  # they need to know for how long
FOR_EVER = 1 << 62
_RULE = re.compile(
    r"(?:(?P<node>[\w.-]+)/)?(?P<action>[a-z]+):(?P<point>[\w-]+)"
    r"(?:@(?P<nth>[1-9]\d*))?(?P<times>\*[1-9]\d*|\*)?(?::(?P<argument>.+))?"
)
_SECONDS = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")


@dataclass(eq=False, slots=True)
class Rule:
    """Something that goes wrong at the `nth` occasion, and at those behind it, `times` in all."""

    text: str
    node: str  # empty: every node
    action: str
    point: str
    nth: int = 1
    times: int = 1
    hold_s: float = 0.0
    until: Path | None = None  # it is held while this file is not there
    seen: int = 0
    fired: int = 0

    def is_for(self, node_id: str) -> bool:
        """Say whether a node obeys it: `decode` means all of decode-0, decode-1."""
        return self.node in ("", node_id) or node_id.startswith(self.node + "-")

    def happens(self) -> bool:
        """Count an occasion; say whether it is one of those."""
        self.seen += 1
        if not self.nth <= self.seen < self.nth + self.times:
            return False
        self.fired += 1
        if self.fired & (self.fired - 1) == 0:  # 1, 2, 4, 8, ...: some fire for ever
            log.warning("fault %s fired, no. %d", self.text, self.fired)
        return True


def parse(text: str) -> tuple[Rule, ...]:
    """Read rules.

    Raises:
        ConfigError: one of them is none.
    """
    return tuple(_rule(part.strip()) for part in text.split(";") if part.strip())


def _rule(text: str) -> Rule:
    found = _RULE.fullmatch(text)
    if found is None:
        raise ConfigError(f"{VARIABLE}: {text!r} is no [NODE/]ACTION:POINT[@N][*TIMES][:ARGUMENT]")
    action, point, argument = found["action"], found["point"], found["argument"]
    if action not in POINTS:
        raise ConfigError(f"{VARIABLE}: no action {action!r}: use {', '.join(POINTS)}")
    if point not in POINTS[action]:
        raise ConfigError(f"{VARIABLE}: nothing to {action} at {point!r}: use {', '.join(POINTS[action])}")
    rule = Rule(text, found["node"] or "", action, point, int(found["nth"] or 1))
    if found["times"]:
        rule.times = int(found["times"][1:] or FOR_EVER)
    if (argument is not None) is not (action in HOLDING):
        needs = "needs" if action in HOLDING else "has no"
        raise ConfigError(f"{VARIABLE}: {text!r}: {action} {needs} time, as 2s, 500ms or until=/FILE")
    if argument is None:
        return rule
    if argument.startswith("until=/"):
        rule.until = Path(argument.removeprefix("until="))
    elif (seconds := _SECONDS.fullmatch(argument)) is not None:
        rule.hold_s = float(seconds[1]) / (1000 if seconds[2] == "ms" else 1)
    else:
        raise ConfigError(f"{VARIABLE}: {argument!r} is no time: use 2s, 500ms or until=/FILE")
    return rule


class Hold:
    """Something that a rule holds until it is over, or the rule is there no more."""

    def __init__(self, rule: Rule, faults: Faults) -> None:
        self._faults = faults
        self._rule = rule
        self._end_s = faults.clock() + rule.hold_s
        self.is_over()  # so that somebody looks again

    def is_over(self) -> bool:
        """Say whether it goes on; if not, the node's loop is woken soon to ask again."""
        until = self._rule.until
        over = self._faults.clock() >= self._end_s if until is None else until.exists()
        over = over or not self._faults.has(self._rule)
        if not over:
            self._faults.look_again()
        return over


class Faults:
    """The rules of one process, and what wakes its loop while something is held.

    Args:
        text: the rules of all nodes, or the file that has them.
        node_id: of this one.

    Raises:
        ConfigError: they are no rules.
    """

    def __init__(self, text: str, node_id: str, clock: Clock = time.monotonic) -> None:
        self.node_id = node_id
        self.clock = clock
        self._file = Path(text[1:]) if text.startswith("@/") else None
        self._said = ""
        self._take("" if self._file else text)
        self._read_file()
        self._timer: threading.Timer | None = None
        self.wake_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def find(self, point: str, *actions: str) -> Rule | None:
        """Count an occasion; return the first rule that fires at it."""
        self._read_file()
        fired = [
            rule
            for rule in self.rules
            if rule.action in actions and self._is_at(rule, point) and rule.happens()
        ]
        return fired[0] if fired else None

    @staticmethod
    def _is_at(rule: Rule, point: str) -> bool:
        return rule.point == point or (rule.point == ANY and point in KINDS)

    def hold(self, point: str, action: str) -> Hold | None:
        """Count an occasion; return what is held there, if it is."""
        rule = self.find(point, action)
        return None if rule is None else Hold(rule, self)

    def has(self, rule: Rule) -> bool:
        """Say whether a rule is still there."""
        self._read_file()
        return rule in self.rules

    def look_again(self) -> None:
        """Wake the loop soon."""
        if self._timer is None:
            self._timer = threading.Timer(LOOK_AGAIN_S, self._wake)
            self._timer.daemon = True
            self._timer.start()

    def woken(self) -> None:
        """The loop is awake."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_fd, 4096)

    def _take(self, text: str) -> None:
        self.rules = tuple(rule for rule in parse(text) if rule.is_for(self.node_id))
        self._said = text
        if self.rules:
            said = "; ".join(rule.text for rule in self.rules)
            log.warning("%s: FAULTS ARE ON, this is no server to rely on: %s", self.node_id, said)

    def _read_file(self) -> None:
        text = self._said if self._file is None or not self._file.exists() else self._file.read_text()
        if text != self._said:
            self._take(text)

    def _wake(self) -> None:
        self._timer = None
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_fd, b".")


_active: Faults | None = None


def active() -> Faults | None:
    """Return the faults of this process, or None. For constructors: nothing asks while it works."""
    return _active


def begin(node_id: str, text: str | None = None, clock: Clock = time.monotonic) -> None:
    """Have what is built from now on obey the rules; by default those of the environment.

    Raises:
        ConfigError: they are no rules.
    """
    global _active
    text = os.environ.get(VARIABLE, "") if text is None else text
    _active = Faults(text, node_id, clock) if text else None
    if _active is not None and not _active.rules:
        log.warning("%s: FAULT POINTS ARE ON, this is no server to rely on", node_id)
