"""Keys, and gateways that answer, refuse, or are none."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from common.acceptor import Acceptor
from common.addresses import listen_towards
from common.context import open_context
from common.errors import ConfigError
from common.host import this_process
from common.keys import load_keys, make_keys
from common.messages import Hello, Role
from common.model.spec import load_spec
from common.sockets import FrameSocket, wait
from doctor import cluster
from doctor.finding import Finding, Level
from tests.doctor.look import ROOT, find, find_one
from tests.wire.net import no_status

EPOCH = 77


def hello(model: str, role: Role = Role.GATEWAY) -> Hello:
    return Hello("gateway-1", role, this_process(), model)


@contextmanager
def accepting(address: str, local: Hello, keys: Path | None = None) -> Iterator[Acceptor]:
    """Whoever binds an address, as a gateway's process does, in a thread."""
    stop, stopped = os.pipe()
    context = open_context(load_keys(None if keys is None else str(keys)))
    acceptor = Acceptor(context, address, local, EPOCH, no_status)

    def serve() -> None:
        while True:
            wait([*acceptor.pollables(), stop], None)
            if is_readable(stop):
                return
            acceptor.poll(0.0)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield acceptor
    finally:
        os.write(stopped, b"x")
        thread.join()
        acceptor.close()
        context.destroy(linger=0)
        os.close(stop)
        os.close(stopped)


def is_readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


@pytest.fixture
def fingerprint(tiny_model: Path) -> str:
    return load_spec(tiny_model).fingerprint


def greeted(model: Path, address: str, **values: Any) -> Finding:
    return find_one("gateway", model, join=address, **values)


def test_without_join_or_keys_nothing_is_said(tiny_model: Path) -> None:
    assert find("gateway", tiny_model) == find("keys", tiny_model) == []


def test_a_gateway_says_who_it_is_and_takes_nobody_for_a_node(
    tiny_model: Path, address: str, fingerprint: str
) -> None:
    with accepting(address, hello(fingerprint)) as gateway:
        for _ in range(2):
            finding = greeted(tiny_model, address)
            assert finding.level is Level.OK
            assert f"gateway-1 answers at {address}" in finding.found
            assert f"it serves the model here, {fingerprint[:12]}" in finding.found
        assert gateway.peers() == []
        assert gateway.counters["links_refused"] == 2


def test_several_gateways_are_greeted_each(tiny_model: Path, address: str, fingerprint: str) -> None:
    with accepting(address, hello(fingerprint)):
        findings = find("gateway", tiny_model, join=f"{address}, {address}-2")
    assert [finding.level for finding in findings] == [Level.OK, Level.PROBLEM]


def test_another_model_is_a_problem_with_both_named(tiny_model: Path, address: str, fingerprint: str) -> None:
    with accepting(address, hello("feedfacecafebeef")):
        finding = greeted(tiny_model, address)
    assert finding.level is Level.PROBLEM
    assert "feedfacecafe" in finding.found
    assert fingerprint[:12] in finding.found


def test_without_a_model_here_the_gateways_is_named(tmp_path: Path, address: str) -> None:
    with accepting(address, hello("feedfacecafebeef")):
        finding = find_one("gateway", "smollm2-135m", cache=str(tmp_path), join=address)
    assert (finding.level, "it serves model feedfacecafe" in finding.found) == (Level.OK, True)


def test_a_node_is_no_gateway(tiny_model: Path, address: str, fingerprint: str) -> None:
    with accepting(address, hello(fingerprint, Role.PREFILL)):
        finding = greeted(tiny_model, address)
    assert (finding.level, "it is a prefill node" in finding.found) == (Level.PROBLEM, True)


def test_nobody_there_is_a_problem(tiny_model: Path, address: str) -> None:
    finding = greeted(tiny_model, address)
    assert finding.level is Level.PROBLEM
    assert "cannot be reached: No such file or directory" in finding.found
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    finding = greeted(tiny_model, f"tcp://127.0.0.1:{port}")
    assert "cannot be reached: Connection refused" in finding.found


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("http://somewhere", "is no address"),
        ("tcp://127.0.0.1:many", "has no port"),
        ("tcp://192.0.2.1:7000", "needs keys"),
    ],
)
def test_an_address_that_cannot_be_used_is_a_problem(tiny_model: Path, address: str, words: str) -> None:
    finding = greeted(tiny_model, address)
    assert finding.level is Level.PROBLEM
    assert words in finding.found


def test_something_that_says_nothing_is_a_problem() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(cluster.NoAnswer, match="says nothing within"),
    ):
        cluster.greet(f"tcp://127.0.0.1:{server.getsockname()[1]}", None, 0.3)


def test_another_version_is_a_problem_with_both_named(tiny_model: Path, address: str) -> None:
    context = open_context(None)
    with closing(FrameSocket.router(context, address)) as stranger:

        def answer() -> None:
            received = None
            while received is None:
                wait(stranger.pollables(), None)
                received = stranger.receive()
            header = msgpack.unpackb(bytes(received.frames[0])) | {"version": 999}
            stranger.send([msgpack.packb(header)], received.identity)

        thread = threading.Thread(target=answer)
        thread.start()
        finding = greeted(tiny_model, address)
        thread.join()
    context.destroy(linger=0)
    assert finding.level is Level.PROBLEM
    assert "is of another version: " in finding.found
    assert "999" in finding.found


# Keys -------------------------------------------------------------------------------------------------------


def test_keys_that_do_not_do_are_a_problem(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    missing = find_one("keys", keys=str(ours))
    assert (missing.level, "cannot read" in missing.found) == (Level.PROBLEM, True)
    path = make_keys(ours)
    assert find_one("keys", keys=str(ours)).level is Level.OK
    path.chmod(0o640)
    readable = find_one("keys", keys=str(ours))
    assert (readable.level, "others may read or change" in readable.found) == (Level.PROBLEM, True)
    path.chmod(0o600)
    path.write_text("no key\n")
    assert find_one("keys", keys=str(ours)).level is Level.PROBLEM


def test_the_same_keys_open_and_others_do_not(tmp_path: Path, tiny_model: Path, fingerprint: str) -> None:
    ours, others = tmp_path / "ours", tmp_path / "others"
    make_keys(ours)
    make_keys(others)
    with accepting("tcp://127.0.0.1:*", hello(fingerprint), ours) as gateway:
        assert greeted(tiny_model, gateway.address, keys=str(ours)).level is Level.OK
        for keys in ({"keys": str(others)}, {}):
            finding = greeted(tiny_model, gateway.address, **keys)
            assert finding.level is Level.PROBLEM
            assert "start both with the same --keys" in finding.found
    assert find_one("gateway", join="tcp://127.0.0.1:1", keys=str(tmp_path)).found.startswith("not greeted: ")


def test_to_another_host_the_own_address_is_named() -> None:
    answer = replace(hello("m"), node_id="gateway-9")
    try:
        listen_towards("tcp://192.0.2.1:7000")
    except ConfigError:
        pytest.skip("no way leads to other hosts")
    finding = cluster.judge_answer("tcp://192.0.2.1:7000", answer, 0.001, None)
    assert "a prefill node here would listen at tcp://" in finding.found


def test_a_real_gateway_answers_and_goes_on(tiny_model: Path, fingerprint: str, address: str) -> None:
    command = [sys.executable, "-m", "cli", "gateway", str(tiny_model), "--port", "0", "--nodes", address]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as gateway:
        assert gateway.stderr is not None
        try:
            while "listening on" not in (line := gateway.stderr.readline()):
                assert line, "it ended"
            for _ in range(2):
                finding = greeted(tiny_model, address)
                assert finding.level is Level.OK, finding
                assert f"gateway-{gateway.pid} answers" in finding.found
        finally:
            gateway.terminate()
            log = gateway.stderr.read()
        assert gateway.wait() == 0
        assert f"a gateway node at doctor-{os.getpid()}" in log  # it says whom it refused
        assert "Traceback" not in log
