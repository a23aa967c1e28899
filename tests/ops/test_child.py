"""What a parent sees of one child: its output as a terminal would show it, its words, its end."""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

import pytest

from common.supervision.child import TAIL_LINES, Child, ChildSpec, describe_status

DEADLINE_S = 30.0


def run_to_the_end(tmp_path: Path, code: str, *, is_job: bool = False) -> tuple[Child, bytes, int]:
    """Run Python code as a child that may write as much as it likes; return what is shown of it."""
    child = Child(ChildSpec("d", "decode", (sys.executable, "-c", code), is_job=is_job), os.environ, tmp_path)
    shown, is_open = b"", True
    while is_open:
        assert select.select([child.output], [], [], DEADLINE_S)[0]
        data, is_open = child.read_output()
        shown += data
    assert select.select([child.pidfd], [], [], DEADLINE_S)[0]
    status = child.reap()
    shown += child.last_words()
    child.close()
    return child, shown, status


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("print('one'); print('two')", b"[d] one\n[d] two\n"),
        ("print('no newline', end='')", b"[d] no newline\n"),
        (r"print('10%\r50%\r100%')", b"[d] 100%\n"),
        (r"print('carriage return\r')", b"[d] carriage return\n"),
        ("print('é' * 3)", "[d] ééé\n".encode()),
        ("pass", b""),
    ],
)
def test_output_is_shown_in_whole_labelled_lines(tmp_path: Path, code: str, shown: bytes) -> None:
    assert run_to_the_end(tmp_path, code)[1:] == (shown, 0)


def test_endless_line_is_cut_and_nothing_is_lost(tmp_path: Path) -> None:
    _, shown, _ = run_to_the_end(tmp_path, "print('x' * 1_000_000, end='')")
    assert shown.count(b"x") == 1_000_000
    assert shown.count(b"\n") > 1


def test_output_of_a_job_is_passed_on_as_it_is(tmp_path: Path) -> None:
    code = r"import sys; sys.stderr.write('10%\r50%\r'); sys.exit(7)"
    assert run_to_the_end(tmp_path, code, is_job=True)[1:] == (b"10%\r50%\r", 7)


def test_tail_is_the_last_lines(tmp_path: Path) -> None:
    child, _, _ = run_to_the_end(tmp_path, "for i in range(100): print(i)")
    assert list(child.tail) == [str(i) for i in range(100 - TAIL_LINES, 100)]


def test_program_that_is_not_there_is_an_os_error_and_leaves_no_descriptor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="no-such-program"):
        Child(ChildSpec("d", "decode", ("/no-such-program",)), os.environ, tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("status", "text"),
    [(3, "ended with status 3"), (-9, "was killed by SIGKILL"), (-63, "was killed by signal 63")],
)
def test_status_in_words(status: int, text: str) -> None:
    assert describe_status(status) == text
