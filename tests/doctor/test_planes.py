"""The data planes: really moved here, and what is said where they are slow or do not work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks import plane_receiver
from common.messages import Hello, SharedPool
from doctor import planes
from doctor.finding import Level
from doctor.planes import judge_failure, judge_rate
from tests.doctor.look import find, find_one


@pytest.mark.parametrize("plane", ["shm", "frames"])
def test_pages_move_here(plane: str) -> None:
    finding = find_one(f"plane-{plane}", quick=True)
    assert (finding.level, finding.found) == (Level.OK, "pages move between two processes")


def test_a_rate_is_measured_beside_a_plain_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, _ = planes._SHAPES["cpu"]
    monkeypatch.setitem(planes._SHAPES, "cpu", (layout, 8))
    finding = find_one("plane-shm")
    assert finding.level in (Level.OK, Level.WARNING)  # others use this machine, too
    assert float(finding.facts["gb_per_s"]) > 0
    assert "one plain copy" in finding.found


def test_a_plane_that_does_not_work_is_said_with_the_other_ends_reason(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    greet = plane_receiver.greeting

    def greeting(*args: Any) -> tuple[Hello, int]:
        """Offer a descriptor that this process does not have."""
        hello, epoch = greet(*args)
        assert hello.shm is not None
        return replace(hello, shm=SharedPool(2**20, hello.shm.num_pages)), epoch

    monkeypatch.setattr(plane_receiver, "greeting", greeting)
    finding = find_one("plane-shm", quick=True)
    assert finding.level is Level.WARNING
    assert "its memory cannot be opened: No such file or directory" in finding.found
    assert "pages travel as frames" in finding.found


def test_without_prefill_nodes_there_is_nothing_to_hand_over() -> None:
    assert find("plane-shm", colocated=True) == find("plane-frames", colocated=True) == []


@pytest.mark.parametrize(
    ("plane", "transfer", "level"),
    [
        ("shm", "auto", Level.WARNING),
        ("shm", "shm", Level.PROBLEM),
        ("shm", "frames", Level.OK),
        ("cuda-ipc", "auto", Level.WARNING),
        ("cuda-ipc", "cuda-ipc", Level.PROBLEM),
        ("frames", "auto", Level.PROBLEM),
        ("frames", "frames", Level.PROBLEM),
    ],
)
def test_what_follows_from_a_plane_that_does_not_work(plane: str, transfer: str, level: Level) -> None:
    finding = judge_failure(plane, "a reason", transfer)
    assert (finding.level, "a reason" in finding.found) == (level, True)


# As measured on quiet machines: README.md, and benchmarks/results of two H200.
@pytest.mark.parametrize(
    ("plane", "rate", "copy"), [("shm", 10.7, 20.8), ("frames", 3.5, 20.8), ("cuda-ipc", 256.0, 368.0)]
)
def test_a_rate_that_is_a_fraction_of_what_was_measured_is_a_warning(
    plane: str, rate: float, copy: float
) -> None:
    assert judge_rate(plane, rate, copy).level is Level.OK
    slow = judge_rate(plane, rate / 10, copy)
    assert slow.level is Level.WARNING
    assert slow.remedy
