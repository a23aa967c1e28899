"""Sockets: the folder for private ones, loopback, the HTTP port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from doctor.finding import Level
from doctor.network import listeners
from tests.doctor.look import find_elsewhere, find_one


@pytest.mark.parametrize("check", ["socket-folder", "loopback"])
def test_this_machine_serves(check: str) -> None:
    assert find_one(check).level is Level.OK


def test_a_long_path_for_temporary_files_is_a_warning(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    [finding] = find_elsewhere("socket-folder", env={"TMPDIR": str(long)})
    assert finding.level is Level.WARNING
    assert finding.found.startswith(f"/tmp is used: paths in {long} are too long")


def test_a_folder_that_cannot_be_written_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, reason in (("/no/such/folder", "No such file"), ("/proc", "")):
        monkeypatch.setattr(tempfile, "tempdir", folder)
        finding = find_one("socket-folder")
        assert finding.level is Level.PROBLEM
        assert finding.found.startswith(f"no socket can be made in {folder}: ")
        assert reason in finding.found


def isolated() -> bool:
    try:
        return subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not isolated(), reason="no network namespaces here")
def test_loopback_that_is_down_is_a_problem() -> None:
    [finding] = find_elsewhere("loopback", "unshare", "--net")
    assert finding.level is Level.PROBLEM
    assert "ip link set lo up" in finding.remedy


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_that_is_taken_is_a_problem_and_who_has_it_is_named(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"no {host} here")
    with server:
        port = server.getsockname()[1]
        finding = find_one("port", host=host, port=port)
        assert finding.level is Level.PROBLEM
        assert f"port {port} of {host} is taken by pid {os.getpid()} (" in finding.found
        assert "--port" in finding.remedy
    assert find_one("port", host=host, port=port).level is Level.OK


def test_who_listens_is_named_with_the_command() -> None:
    script = (
        "import socket, sys\n"
        "s = socket.create_server(('127.0.0.1', 0))\n"
        "print(s.getsockname()[1], flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-S", "-c", script, "a-name-of-its-own"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as server:
        assert server.stdout is not None
        [who] = listeners(int(server.stdout.readline()))
        assert who.startswith(f"pid {server.pid} (")
        server.communicate()


def test_a_connection_to_a_port_is_no_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address) as client:
            assert listeners(client.getsockname()[1]) == []
            assert len(listeners(address[1])) == 1


@pytest.mark.parametrize(
    ("host", "words"),
    [("no-such-host.invalid", "is no address"), ("192.0.2.1", "cannot listen on 192.0.2.1")],
)
def test_an_address_that_is_not_ours_is_a_problem(host: str, words: str) -> None:
    finding = find_one("port", host=host, port=0)
    assert finding.level is Level.PROBLEM
    assert words in finding.found


def test_who_has_a_port_is_not_guessed() -> None:
    with socket.socket() as bound:  # it does not listen, so that no table has it
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        assert (
            find_one("port", port=port).found
            == f"port {port} of 127.0.0.1 is taken; who has it cannot be seen"
        )


def test_a_port_that_the_system_picks_is_free() -> None:
    assert find_one("port", port=0).found == "127.0.0.1: a port that the system picks"


def test_a_key_in_a_command_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text("sl\n 0: 0100007F:1F40 00000000:0000 0A 0:0 0:0 0 0 0 77 1\n")
    (tmp_path / "12" / "fd").mkdir(parents=True)
    (tmp_path / "12" / "fd" / "3").symlink_to("socket:[77]")
    for said, shown in (
        ("baton serve --api-key sk-1 --port 8000", "baton serve --api-key *** --port 8000"),
        ("vllm serve m --api-key=sk-1", "vllm serve m --api-key=***"),
        ("baton serve --api-key @file --keys folder", "baton serve --api-key @file --keys folder"),
    ):
        (tmp_path / "12" / "cmdline").write_bytes(said.replace(" ", "\0").encode() + b"\0")
        assert listeners(8000, tmp_path) == [f"pid 12 ({shown})"]
