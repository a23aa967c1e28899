"""A check that breaks, ends its process or hangs is a problem with its reason, and the next one goes on."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys

from doctor.finding import Finding, Level
from doctor.runner import Ended, Found, run_checks
from tests.doctor.bad_worker import CHECKS
from tests.doctor.look import ROOT

MODULE = "tests.doctor.bad_worker"
VALUES = {"model": "a-model"}
PATIENCE_MS = 60_000


def run(*names: str, module: str = MODULE) -> list[tuple[str, Finding]]:
    events = run_checks([CHECKS[name] for name in names], VALUES, module)
    return [(event.check, event.finding) for event in events if isinstance(event, Found)]


def run_one(name: str) -> Finding:
    [*_, (check, finding), last] = run(name, "good")
    assert check == name
    assert (last[0], last[1].level, last[1].found) == ("good", Level.OK, "a-model")
    return finding


def wait_for_end(pid: int) -> None:
    """Wait until a process that is no child of ours is gone."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    assert poller.poll(PATIENCE_MS), f"{pid} lives on"
    os.close(pidfd)


def test_findings_come_in_order_and_what_libraries_print_does_not_matter() -> None:
    events = list(run_checks([CHECKS["good"], CHECKS["silent"], CHECKS["good"]], VALUES, MODULE))
    said = [event for event in events if isinstance(event, Found | Ended)]
    assert [type(event).__name__ for event in said] == ["Found", "Ended", "Ended", "Found", "Ended"]
    assert [event.check for event in said] == ["good", "good", "silent", "good", "good"]


def test_an_exception_is_a_problem_and_what_was_found_before_it_stays() -> None:
    [before, (check, finding), after] = run("raises", "good")
    assert (before[1].level, check, after[1].level) == (Level.OK, "raises", Level.OK)
    assert finding.level is Level.PROBLEM
    assert finding.found == "the check itself failed: RuntimeError: it broke"
    assert finding.remedy


def test_a_setting_that_cannot_work_is_said_as_it_is() -> None:
    assert run_one("misconfigured").found == "--this does not go with --that"


def test_a_process_that_ends_is_a_problem_with_its_status() -> None:
    finding = run_one("exits")
    assert (finding.level, finding.found) == (Level.PROBLEM, "the check ended its process with status 3")


def test_a_crash_is_a_problem_with_its_signal_and_last_words() -> None:
    found = run_one("crashes").found
    assert found == "the check ended its process by signal 11; it said last: a driver's last words"


def test_a_check_that_hangs_is_ended_with_all_that_it_started() -> None:
    [(_, pids), (check, finding), (good, _)] = run("hangs", "good")
    assert (check, good) == ("hangs", "good")
    assert finding.level is Level.PROBLEM
    assert finding.found.startswith("the check took longer than 2 s, and was ended")
    for name in ("worker", "child"):
        wait_for_end(int(pids.facts[name]))


def test_a_worker_that_cannot_start_fails_each_check_and_nothing_waits() -> None:
    found = run("good", "silent", module="doctor.there_is_no_such_worker")
    assert [(check, finding.level) for check, finding in found] == [
        ("good", Level.PROBLEM),
        ("silent", Level.PROBLEM),
    ]
    assert all("No module named" in finding.found for _, finding in found)


def test_nothing_is_left_when_whoever_asked_is_killed() -> None:
    script = (
        "import json, sys\n"
        "from doctor.runner import run_checks, Found\n"
        "from tests.doctor.bad_worker import CHECKS\n"
        f"for event in run_checks([CHECKS['hangs long']], {VALUES}, '{MODULE}'):\n"
        "    if isinstance(event, Found):\n"
        "        print(json.dumps(dict(event.finding.facts)), flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = json.loads(parent.stdout.readline())
        parent.kill()
    for name in ("worker", "child"):
        wait_for_end(pids[name])
