"""Gateway and nodes started by hand, one by one, in any order, over ipc and over tcp."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.system.client import Client, greedy
from tests.system.oracle import Case
from tests.system.server import START_S, Process, poll_until, temporary_folder

pytestmark = pytest.mark.system

CHECKS = ("--debug-checks", "--verify-pages")
PREFILL_PAGES = 10  # of 16 tokens


class ByHand:
    """Processes in one folder, each with a log of its own."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.model = str(model)
        self.folder = folder
        self.temp_dir = folder / "tmp"
        self.temp_dir.mkdir()
        self.processes: dict[str, Process] = {}
        self.url = ""

    def start(self, role: str, *args: str, name: str | None = None) -> Process:
        """Start one; `name` tells several of a role apart."""
        name = name or role
        process = Process(self.temp_dir, self.folder / f"{name}.log", role, self.model, *args)
        self.processes[name] = process
        return process

    def wait_ready(self) -> None:
        """Wait until the gateway has a usable pair."""
        self.url = self.processes["gateway"].wait_for(r"listening on (http://127.0.0.1:\d+)")

        def ready() -> bool:
            return httpx.get(self.url + "/ready", timeout=START_S).status_code == 200

        poll_until(ready, START_S, "a usable pair", self.log)

    def log(self) -> str:
        """What all of them said."""
        return "\n".join(process.log() for process in self.processes.values())

    def end(self) -> None:
        """End all, like a user, and check that nothing is left."""
        for process in self.processes.values():
            process.end()
            assert "Traceback" not in process.log()
        assert list(self.temp_dir.iterdir()) == []


@pytest.fixture
def by_hand(model: Path) -> Iterator[ByHand]:
    with temporary_folder() as folder:
        processes = ByHand(folder, model)
        try:
            yield processes
        finally:
            for process in processes.processes.values():
                process.kill()


def check(by_hand: ByHand, cases: list[Case]) -> Client:
    client = Client(by_hand.url, by_hand.model)
    for case, outcome in zip(cases, client.ask_all([case.body() for case in cases]), strict=True):
        case.check(outcome)
    client.assert_ledger_clean()
    return client


def test_ipc_nodes_first(by_hand: ByHand, cases: list[Case]) -> None:
    address = f"ipc://{by_hand.folder}/gateway.sock"
    by_hand.start("decode", "--join", address, *CHECKS).wait_for("loaded()")
    by_hand.start("prefill", "--join", address, *CHECKS, "--kv-pages", str(PREFILL_PAGES)).wait_for(
        "loaded()"
    )
    by_hand.start("gateway", "--nodes", address, "--port", "0")
    by_hand.wait_ready()
    fitting = [case for case in cases if len(case.prompt) <= PREFILL_PAGES * 16]
    client = check(by_hand, fitting)

    # The prefill node's pool is the small one here: many prompts take turns in it, and in order.
    case = max(fitting, key=lambda case: len(case.prompt))
    assert len(case.prompt) > PREFILL_PAGES * 16 // 2
    outcome = client.ask(greedy([case.prompt] * 20, 1, stream=True))
    assert outcome.order == list(range(20))
    assert outcome.token_ids == case.answer[:1] * 20
    too_long = client.ask(cases[-1].body(stream=True))
    assert too_long.status == 400
    assert too_long.error is not None
    assert too_long.error["message"] == "a prompt of 300 tokens; the prefill nodes hold 160"
    client.assert_ledger_clean()
    by_hand.end()


def test_tcp_gateway_first_and_a_second_prefill_node(by_hand: ByHand, cases: list[Case]) -> None:
    gateway = by_hand.start("gateway", "--nodes", "tcp://127.0.0.1:*", "--port", "0")
    address = gateway.wait_for(r"nodes join (tcp://127.0.0.1:\d+)")
    by_hand.start("prefill", "--join", address, "--node-id", "p", *CHECKS)
    by_hand.start("decode", "--join", address, *CHECKS)
    by_hand.wait_ready()
    client = check(by_hand, cases[:8])
    by_hand.processes.pop("prefill").end()

    # Another one takes its place, under its name and at another address.
    assert client.get("/debug/kv").json()["missing"] == ["p"]
    by_hand.start("prefill", "--join", address, "--node-id", "p", *CHECKS, name="second")
    by_hand.wait_ready()
    check(by_hand, cases[:8])
    by_hand.end()


def test_node_without_a_gateway_says_so(by_hand: ByHand) -> None:
    refusals: dict[tuple[str, ...], str] = {
        ("decode",): "--join ADDRESS is missing",
        ("prefill", "--join", "http://x"): "'http://x' is no address",
        ("decode", "--join", "ipc:///" + "x" * 200): "longer than 107 bytes",
    }
    for (role, *args), words in refusals.items():
        process = by_hand.start(role, *args)
        assert process.popen.wait(START_S) == 2
        assert words in process.log().splitlines()[-1]
        assert "Traceback" not in process.log()
