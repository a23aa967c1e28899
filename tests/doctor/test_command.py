"""`baton doctor` as it is typed: lines, colours, JSON, exit status; and its page, which has every check."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from doctor.finding import Level, ok, problem, warning, worst
from doctor.groups import CHECKS, GROUPS
from doctor.render import Lines, Row, as_json, counted
from tests.docs.doctor import fill_checks
from tests.docs.generate import DOCTOR
from tests.doctor.look import ROOT

PATIENCE_S = 300.0
ESCAPE = "\x1b["
# Said where nothing else is asked for, on a machine without GPUs.
EVERYWHERE = set(CHECKS) - {"peer-access", "triton", "attention", "plane-cuda-ipc", "keys", "gateway"}


def run(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli", "doctor", "--device", "cpu", *args]
    return subprocess.run(
        command, cwd=ROOT, text=True, timeout=PATIENCE_S, check=False, **{"capture_output": True} | options
    )


def test_a_machine_that_serves(tiny_model: Path) -> None:
    """Everything, with rates, in lines that a file can hold."""
    result = run(str(tiny_model), "--port", "0")
    assert (result.returncode, result.stderr) == (0, ""), result.stdout
    assert ESCAPE not in result.stdout
    lines = re.findall(r"^  (ok|warning|problem) +(\S+) +(\S.*)$", result.stdout, re.MULTILINE)
    assert {check for _, check, _ in lines} == EVERYWHERE
    remedies = re.findall(r"^ +to do: \S.*$", result.stdout, re.MULTILINE)
    assert len(remedies) == sum(level != "ok" for level, _, _ in lines)
    for plane in ("plane-shm", "plane-frames"):
        [found] = [found for _, check, found in lines if check == plane]
        assert re.match(r"\d+\.\d GB/s between two processes; one plain copy \d+\.\d GB/s", found)
    assert f"`baton serve {tiny_model}` works here" in result.stdout.splitlines()[-1]


def test_a_machine_that_does_not_as_json(tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        result = run(str(tiny_model), "--port", port, "--quick", "--json")
    assert (result.returncode, result.stderr) == (1, "")
    told = json.loads(result.stdout)
    assert (told["level"], told["model"]) == ("problem", str(tiny_model))
    assert sum(told["counts"].values()) == len(told["checks"])
    assert {check["check"] for check in told["checks"]} == EVERYWHERE
    assert {check["check"]: check["group"] for check in told["checks"]}.items() <= {
        (check.name, group.name) for group in GROUPS for check in group.checks
    }
    for check in told["checks"]:
        assert check["found"]
        assert bool(check["remedy"]) == (check["level"] != "ok")
    assert [check["check"] for check in told["checks"] if check["level"] == "problem"] == ["port"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--no-such-option",), "--no-such-option"),
        (("--port", "many"), "'many'"),
        (("--colocated", "--prefill", "1"), "--colocated"),
        (("--gpu", "0"), "--gpu 0 does not go with --device cpu"),
        (("--api-key", "@/no/such/file"), "/no/such/file"),
    ],
)
def test_a_wrong_command_line_is_one_line_with_status_2(args: tuple[str, ...], words: str) -> None:
    result = run(*args)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("baton: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


def test_it_works_from_any_folder_whatever_is_there(tiny_model: Path, tmp_path: Path) -> None:
    for name in ("doctor", "common", "torch", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the working directory')\n")
    baton = Path(sys.executable).parent / "baton"
    command = [baton, "doctor", str(tiny_model), "--device", "cpu", "--port", "0", "--quick"]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_of_it(tiny_model: Path, signum: signal.Signals, status: int) -> None:
    command = [sys.executable, "-m", "cli", "doctor", str(tiny_model), "--device", "cpu", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as doctor:
        assert doctor.stdout is not None
        assert doctor.stderr is not None
        assert doctor.stdout.readline() == b"software\n"
        started = psutil.Process(doctor.pid).children(recursive=True)
        assert started
        doctor.send_signal(signum)
        assert doctor.wait(PATIENCE_S) == status
        assert psutil.wait_procs(started, PATIENCE_S)[1] == []
        assert b"Traceback" not in doctor.stderr.read()


def test_what_others_named_cannot_write_over_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    Lines(4).row(Row("group", "name", problem("by pid 1 (a\x1b[2Kb\nok)", "end\rit")))
    written = capsys.readouterr().out
    assert "by pid 1 (a [2Kb ok)" in written
    assert "to do: end it" in written
    assert written.count("\n") == 3


@pytest.mark.parametrize("no_color", [False, True])
def test_colours_are_for_terminals_that_want_them(no_color: bool) -> None:
    script = (
        "from doctor.finding import ok\nfrom doctor.render import Lines, Row\n"
        "Lines(4).row(Row('group', 'name', ok('all is well')))\n"
    )
    ours, theirs = pty.openpty()
    env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    env |= {"NO_COLOR": "1"} if no_color else {}
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, stdout=theirs, check=True)
    os.close(theirs)
    said = os.read(ours, 4096).decode()
    os.close(ours)
    assert "all is well" in said
    assert (ESCAPE in said) is not no_color


def test_what_takes_its_time_is_named_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Lines(4).waiting("slow", 60.0)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    lines = Lines(4)
    lines.waiting("quick", 1.9)
    assert capsys.readouterr().err == ""
    lines.waiting("slow", 2.6)
    assert capsys.readouterr().err.endswith("  looking at slow: 3 s")
    lines.row(Row("group", "slow", ok("done")))
    written = capsys.readouterr()
    assert written.err == "\r\x1b[K"
    assert "done" in written.out


def test_the_worst_level_decides() -> None:
    good, bad, worse = ok("a"), warning("b", "do"), problem("c", "do")
    assert worst([]) is Level.OK
    assert worst([good, bad]) is Level.WARNING
    assert worst([worse, bad, good]) is Level.PROBLEM
    rows = [Row("group", "name", finding) for finding in (good, bad, bad, worse)]
    assert counted(rows) == "1 ok, 2 warnings, 1 problem"
    told = json.loads(as_json(rows, 0.0, {"model": "m"}))
    assert (told["level"], told["counts"]) == ("problem", {"ok": 1, "warning": 2, "problem": 1})


# The page ---------------------------------------------------------------------------------------------------


def test_the_page_has_every_check_and_is_current() -> None:
    page = DOCTOR.read_text()
    assert page == fill_checks(page), "run: python -m tests.docs.generate"
    rows = re.findall(r"^\| `(\S+)` \| (.+) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    assert [name for name, *_ in rows if name in CHECKS] == list(CHECKS)


def test_every_check_says_what_it_looks_at_and_can_be_more_than_well() -> None:
    assert len(CHECKS) == sum(len(group.checks) for group in GROUPS)
    for check in CHECKS.values():
        assert check.looks_at
        assert check.warns or check.fails, check.name
