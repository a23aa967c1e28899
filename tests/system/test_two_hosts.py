"""A gateway and a decode node on one host, a prefill node on another: keys, and a cable that is cut.

Between hosts death is known by heartbeats, and pages travel as frames. Where namespaces are not permitted all
of this is skipped, and only `tests/wire/test_curve.py` tries keys.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from common.keys import make_keys
from tests.system.client import Client, Outcome, greedy
from tests.system.hosts import HostProcess, TwoHosts, two_hosts, why_not
from tests.system.oracle import Case
from tests.system.server import START_S, poll_until, temporary_folder

pytestmark = [pytest.mark.system, pytest.mark.skipif(bool(why_not()), reason=why_not() or "possible")]

CHECKS = ("--debug-checks", "--verify-pages")
PORT = 7000
KEY = "sk-between-hosts"
CUT_S = 20.0
SLACK_S = 3.0  # beyond a deadline: a second of the gateway's own, and a busy machine


class KeyedClient(Client):
    """A client that sends an API key."""

    def __init__(self, url: str, model: str, api_key: str) -> None:
        super().__init__(url, model)
        self.headers = {"Authorization": f"Bearer {api_key}"}
        self._pages.headers.update(self.headers)

    def session(self) -> httpx.AsyncClient:
        """With the key."""
        session = super().session()
        session.headers.update(self.headers)
        return session


class Deployment:
    """The processes, and what to ask them with."""

    def __init__(self, hosts: TwoHosts, folder: Path, model: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.model = str(model)
        self.temp_dir = folder / "tmp"
        self.temp_dir.mkdir()
        self.processes: list[HostProcess] = []
        self.join = f"tcp://{hosts.one_to_two}:{PORT}"
        for name in ("ours", "others"):
            make_keys(folder / name)

    def start(self, host: str, name: str, role: str, *args: str) -> HostProcess:
        """Start a process on a host; `name` is that of its log."""
        process = HostProcess(host, self.temp_dir, self.folder / f"{name}.log", role, self.model, *args)
        self.processes.append(process)
        return process

    def keys(self, name: str) -> tuple[str, str]:
        """The option for keys."""
        return "--keys", str(self.folder / name)

    def start_all(self) -> KeyedClient:
        """Start gateway, D and P with the same keys; returns the client, once a pair is usable."""
        keys, hosts = self.keys("ours"), self.hosts
        http = ("--host", hosts.one_to_test, "--port", "8000", "--api-key", KEY)
        self.gateway = self.start(hosts.one, "gateway", "gateway", "--nodes", self.join, *http, *keys)
        joined = ("--join", self.join, *CHECKS, *keys)
        self.decode = self.start(hosts.one, "decode", "decode", *joined, "--node-id", "d")
        self.prefill = self.start(hosts.two, "prefill", "prefill", *joined, "--node-id", "p")
        client = KeyedClient(f"http://{hosts.one_to_test}:8000", self.model, KEY)
        self.gateway.wait_for("listening on")
        self.wait_ready(client)
        return client

    def wait_ready(self, client: Client) -> None:
        """Wait until a pair of nodes is usable."""

        def ready() -> bool:
            try:
                return client.get("/ready").status_code == 200
            except httpx.TransportError:
                return False

        poll_until(ready, START_S, "a usable pair", self.log)

    def log(self) -> str:
        """What all of them said."""
        return "\n".join(process.log() for process in self.processes)


@pytest.fixture
def deployment(model: Path) -> Iterator[Deployment]:
    with temporary_folder() as folder, two_hosts() as hosts:
        deployment = Deployment(hosts, folder, model)
        try:
            yield deployment
        finally:
            for process in deployment.processes:
                process.kill()


def check(client: Client, cases: list[Case]) -> None:
    """All of them are right, and afterwards all pages are back."""
    for case, outcome in zip(cases, client.ask_all([case.body() for case in cases]), strict=True):
        case.check(outcome)
    client.assert_ledger_clean()


def timed(client: Client, body: dict[str, object]) -> tuple[float, Outcome]:
    """One request, and how long it took."""
    begun_s = time.monotonic()
    outcome = client.ask(body)
    return time.monotonic() - begun_s, outcome


def test_keys_decide_who_belongs_to_it(deployment: Deployment, cases: list[Case]) -> None:
    client, hosts = deployment.start_all(), deployment.hosts
    check(client, cases)
    assert "d: linked to p, plane frames" in deployment.decode.log()
    # P chose an address that D can reach by itself.
    assert client.metric("baton_nodes") == 2

    # With other keys: refused at both ends, and both live on.
    join = ("--join", deployment.join, "--node-id", "q", *CHECKS)
    stranger = deployment.start(hosts.two, "stranger", "prefill", *join, *deployment.keys("others"))
    refusal = "has other keys than this process, or none: start both with the same --keys"
    stranger.wait_for(f"q: link refused: {deployment.join} ({refusal})")
    deployment.gateway.wait_for(f"link refused: a peer at {deployment.join} ({refusal})")
    assert stranger.popen.poll() is None

    # Without: it does not even start.
    keyless = deployment.start(hosts.two, "keyless", "prefill", *join)
    assert keyless.popen.wait(START_S) == 2
    last = keyless.log().splitlines()[-1]
    assert last.startswith(f"baton: {deployment.join} can be reached from other hosts, and needs keys")

    # Nor does it help to listen where keys are not needed, as the gateway is not there.
    check(client, cases[:4])
    assert client.metric("baton_nodes") == 2
    for process in (deployment.prefill, deployment.decode, deployment.gateway):
        process.end()
    assert "Traceback" not in deployment.log()


def test_a_cut_cable_ends_each_request_within_its_deadline(deployment: Deployment, cases: list[Case]) -> None:
    client, hosts = deployment.start_all(), deployment.hosts
    check(client, cases[:4])

    for is_mended in (True, False):
        cut_s = time.monotonic()
        hosts.cut()
        with ThreadPoolExecutor(8) as pool:
            # Their own deadlines: two before the cut is noticed, two after it.
            deadlines = (1, 4, 30, 60)
            asked = [
                pool.submit(timed, client, greedy(case.prompt, 8, timeout=deadline))
                for case, deadline in zip(cases[-4:], deadlines, strict=True)
            ]
            noticed_s = _when_noticed(client, cut_s)
            for deadline, future in zip(deadlines, asked, strict=True):
                took_s, outcome = future.result()
                assert took_s < deadline + SLACK_S, (deadline, took_s, outcome)
                assert outcome.status == (504 if deadline < noticed_s else 503), (
                    deadline,
                    noticed_s,
                    outcome,
                )
                assert outcome.error is not None
        print(f"the cut was noticed after {noticed_s:.1f} s")  # noqa: T201
        # Nobody waits for a node that is known to be away, and no page is lost with it.
        took_s, outcome = timed(client, greedy(cases[0].prompt, 8, timeout=30))
        assert (outcome.status, took_s < SLACK_S) == (503, True)
        kv = client.get("/debug/kv").json()
        assert kv["missing"] == ["p"]
        [decode] = kv["nodes"]
        assert decode["pages"]["free"] == decode["pages"]["total"]
        if is_mended:
            left_s = cut_s + CUT_S - time.monotonic()
            time.sleep(max(0.0, left_s))  # what is tried is a cut of so long
            hosts.mend()
            mended_s = time.monotonic()
            deployment.wait_ready(client)
            print(f"usable again {time.monotonic() - mended_s:.1f} s after it was mended")  # noqa: T201
            check(client, cases)

    assert all(process.popen.poll() is None for process in deployment.processes)
    assert "Traceback" not in deployment.log()


def test_what_runs_does_not_notice_a_cut(deployment: Deployment, cases: list[Case]) -> None:
    """A decode node has all that it needs."""
    client, hosts = deployment.start_all(), deployment.hosts
    case = cases[3]
    with httpx.Client(base_url=client.url, headers=client.headers, timeout=60) as http:
        body = {"model": deployment.model, **case.body(stream=True)}
        with http.stream("POST", "/v1/completions", json=body) as response:
            outcome = Outcome(status=response.status_code)
            for line in response.iter_lines():
                outcome.take_event(line)
                if outcome.token_ids and len(outcome.token_ids) < 3:
                    hosts.cut()
    case.check(outcome)


def _when_noticed(client: Client, cut_s: float) -> float:
    poll_until(lambda: client.get("/ready").status_code == 503, 60.0, "the cut is noticed")
    return time.monotonic() - cut_s
