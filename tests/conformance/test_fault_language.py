"""The language of fault points, and how occasions are counted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.faults import KINDS, POINTS, Faults, parse

T0 = 100.0


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = T0

    def __call__(self) -> float:
        return self.now


def make(text: str, node_id: str = "decode-0") -> tuple[Faults, Clock]:
    clock = Clock()
    return Faults(text, node_id, clock), clock


def fired(faults: Faults, point: str, action: str, occasions: int) -> list[int]:
    """At which occasions, from 1, something happens."""
    return [n for n in range(1, occasions + 1) if faults.find(point, action) is not None]


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("drop:Commit", [1]),
        ("drop:Commit@3", [3]),
        ("drop:Commit*2", [1, 2]),
        ("drop:Commit@2*3", [2, 3, 4]),
        ("drop:Commit@4*", [4, 5, 6]),
        ("drop:Commit*", [1, 2, 3, 4, 5, 6]),
        ("drop:any@6", [6]),
        ("drop:Chunk*", []),
        ("double:Commit*", []),
        ("decode-0/drop:Commit", [1]),
        ("decode/drop:Commit", [1]),
        ("prefill/drop:Commit", []),
        ("decode-01/drop:Commit", []),
        ("drop:Commit; drop:Commit@5", [1, 5]),
    ],
)
def test_occasions(text: str, at: list[int]) -> None:
    faults, _ = make(text)
    assert fired(faults, "Commit", "drop", 6) == at
    assert sum(rule.fired for rule in faults.rules if rule.point != "Chunk") == len(at)


def test_the_page_has_every_action_and_point() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "fault_points.md").read_text()
    named = {
        (action, point)
        for action, points in re.findall(r"^\| `(\w+)`[^|]*\| ([^|]*) \|", page, re.MULTILINE)
        for point in re.findall(r"`([\w-]+)`", points)
    }
    own = {(action, point) for action, points in POINTS.items() for point in points if point not in KINDS}
    assert {(action, point) for action, point in named if point != "any"} == own
    of_messages = re.findall(r"^\| `(\w+)`[^|]*\| (?:a message|the same)", page, re.MULTILINE)
    assert {action for action, points in POINTS.items() if "any" in points} == set(of_messages)


def test_any_message_is_no_plane() -> None:
    faults, _ = make("stall:any:1s")
    assert fired(faults, "plane", "stall", 3) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lose:Commit", "no action 'lose': use drop, "),
        ("drop:Comit", "nothing to drop at 'Comit': use any, Abort, "),
        ("drop", "'drop' is no [NODE/]ACTION:POINT"),
        ("drop:Commit@0", "is no [NODE/]"),
        ("delay:Commit", "delay needs time, as 2s, 500ms or until=/FILE"),
        ("drop:Commit:2s", "drop has no time"),
        ("stall:plane:soon", "'soon' is no time"),
        ("barrier:lunch:1s", "use after-prefill, before-commit, arrived, merge"),
    ],
)
def test_what_is_no_rule_is_said(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match="BATON_FAULTS: ") as error:
        parse(f"drop:Chunk; {text}")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_hold_is_over_when_its_time_is() -> None:
    faults, clock = make("barrier:merge:1500ms")
    hold = faults.hold("merge", "barrier")
    assert hold is not None
    assert faults.hold("merge", "barrier") is None
    clock.now = T0 + 1.4
    assert not hold.is_over()
    clock.now = T0 + 1.5
    assert hold.is_over()


def test_a_hold_is_over_when_its_file_is_there(tmp_path: Path) -> None:
    faults, clock = make(f"barrier:merge:until={tmp_path}/go")
    hold = faults.hold("merge", "barrier")
    assert hold is not None
    clock.now += 1e6
    assert not hold.is_over()
    (tmp_path / "go").touch()
    assert hold.is_over()


def test_rules_of_a_file_are_others_as_soon_as_it_is(tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    faults, _ = make(f"@{rules}")  # it need not be there
    assert fired(faults, "Commit", "drop", 2) == []
    rules.write_text("drop:Commit@2*")
    assert fired(faults, "Commit", "drop", 3) == [2, 3]
    rules.write_text("drop:Commit")  # counted from 1 again
    assert fired(faults, "Commit", "drop", 3) == [1]
    rules.write_text("")
    assert fired(faults, "Commit", "drop", 3) == []


def test_what_a_rule_holds_goes_on_when_the_rule_is_gone(tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.write_text(f"barrier:merge:until={tmp_path}/go")
    faults, _ = make(f"@{rules}")
    hold = faults.hold("merge", "barrier")
    assert hold is not None
    assert not hold.is_over()
    rules.write_text("")
    assert hold.is_over()


def test_the_log_says_that_faults_are_on_and_what_fired(caplog: pytest.LogCaptureFixture) -> None:
    faults, _ = make("drop:Commit*; prefill/drop:Chunk")
    assert "decode-0: FAULTS ARE ON, this is no server to rely on: drop:Commit*" in caplog.text
    assert "Chunk" not in caplog.text
    fired(faults, "Commit", "drop", 9)
    said = [record.getMessage() for record in caplog.records[1:]]
    assert said == [f"fault drop:Commit* fired, no. {n}" for n in (1, 2, 4, 8)]
