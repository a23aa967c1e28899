"""What `make` would do, on a machine with a GPU and on one without: nothing is installed here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[2] / "Makefile"
GPU = "echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'"
MACHINES = {
    "none": "exit 127",
    "no device": "echo 'No devices found.'",
    "broken": "echo 'NVIDIA-SMI has failed'; exit 9",
    "gpu": GPU,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "Makefile").write_text(MAKEFILE.read_text())
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    (tmp_path / ".venv").mkdir()
    return tmp_path


def would_do(folder: Path, nvidia_smi: str, target: str, done: tuple[str, ...] = ()) -> list[str]:
    """Return the commands of a target where these stamps are there, each newer than the one before."""
    smi = folder / "bin" / "nvidia-smi"
    smi.parent.mkdir(exist_ok=True)
    smi.write_text(f'#!/bin/sh\ntest "$1" = -L || exit 1\n{nvidia_smi}\n')
    smi.chmod(0o755)
    now_s = (folder / "constraints.txt").stat().st_mtime
    for age, stamp in enumerate(done, 1):
        (folder / ".venv" / stamp).touch()
        os.utime(folder / ".venv" / stamp, (now_s + age, now_s + age))
    ran = subprocess.run(
        ["make", "-n", target],
        cwd=folder,
        env={**os.environ, "PATH": f"{smi.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    return [line for line in ran.stdout.splitlines() if "pip install" in line or "baton serve" in line]


@pytest.mark.parametrize("target", ["serve", "demo"])
@pytest.mark.parametrize("machine", MACHINES)
def test_extra_for_gpus_is_installed_where_there_is_one(folder: Path, machine: str, target: str) -> None:
    *installs, serve = would_do(folder, MACHINES[machine], target)
    assert serve.startswith(".venv/bin/baton serve")
    wanted = ["-e .", '-e ".[cuda]"'] if machine == "gpu" else ["-e ."]
    assert [line.partition("constraints.txt ")[2] for line in installs] == wanted


def test_second_time_nothing_is_installed(folder: Path) -> None:
    assert len(would_do(folder, GPU, "serve", ("installed", "installed-cuda"))) == 1
    # A set-up from before there was a GPU gets the extra alone.
    (folder / ".venv" / "installed-cuda").unlink()
    assert len(would_do(folder, GPU, "serve", ("installed",))) == 2
    assert len(would_do(folder, MACHINES["none"], "serve", ("installed",))) == 1
