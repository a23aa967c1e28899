"""Progress is shown on a terminal, and nowhere else; what is written beside it stays whole."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.tiny import write_tiny_model

BATON = Path(sys.executable).parent / "baton"
WORK = """
import logging, sys
import click
from terminal.progress import beside_progress, progress
logging.basicConfig(format="logged %(message)s")
with progress("working", 3) as shown:
    for number in range(3):
        shown.say(f"step {number}")
        logging.warning("line %d", number)
        with beside_progress():
            click.echo(f"said {number}", err=True)
        shown.advance()
with progress("waiting") as shown:
    shown.advance()
print("result")
"""


def run_on_terminal(*command: str | Path, columns: int = 100) -> tuple[str, str]:
    """Run a command whose stderr is a terminal; returns what was on stdout, and on the terminal."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (25, columns))
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            data = os.read(ours, 1 << 16)
        except OSError:  # the last process that had it is gone
            break
        shown += data
        if not data:
            break
    os.close(ours)
    out, _ = process.communicate()
    assert process.returncode == 0, shown.decode()
    return out.decode(), shown.decode()


@pytest.mark.parametrize("columns", [100, 0])  # 0: a terminal that does not say
def test_terminal_has_the_bar_and_whole_lines_beside_it(columns: int) -> None:
    out, shown = run_on_terminal(sys.executable, "-c", WORK, columns=columns)
    assert out == "result\n"
    assert re.search(r"step 2: +\d+% \|", shown)
    assert re.search(r"waiting \[00:0\d\]", shown)
    for number in range(3):
        # What stood there was taken away before: the line begins at a carriage return or a new line.
        assert re.search(rf"[\r\n]logged line {number}\r\n", shown)
        assert re.search(rf"[\r\n]said {number}\r\n", shown)


def test_without_a_terminal_nothing_is_shown() -> None:
    done = subprocess.run([sys.executable, "-c", WORK], capture_output=True, text=True, check=True)
    assert done.stdout == "result\n"
    assert done.stderr.splitlines() == [f"{what} {n}" for n in range(3) for what in ("logged line", "said")]


@pytest.mark.system
def test_server_says_on_a_terminal_how_far_it_is(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    out, shown = run_on_terminal(
        *(BATON, "serve", model, "--port", "0", "--device", "cpu", "--kv-pages", "200", "--ask", "What?")
    )
    assert re.search(r"making the model ready \[\d\d:\d\d\]", shown)
    assert re.search(r"starting: [12] of 3 processes are ready", shown)
    for name in ("gateway", "prefill-0", "decode-0"):
        assert re.search(rf"[\r\n]\d\d:\d\d:\d\d INFO {name} is ready\r\n", shown)
    assert "ready" not in out
