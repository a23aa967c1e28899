"""The commands of docs/two_hosts.md, in two network namespaces: with other addresses and a smaller model."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.docs.generate import DOCS
from tests.docs.pages import blocks
from tests.system.hosts import HostProcess, TwoHosts, two_hosts, why_not
from tests.system.server import BATON, START_S, poll_until, temporary_folder

pytestmark = [pytest.mark.system, pytest.mark.skipif(bool(why_not()), reason=why_not() or "possible")]

HOST_A, HOST_B = "10.0.0.1", "10.0.0.2"
MODEL = "smollm2-135m"


class Page:
    """The page's commands, as they are typed here."""

    def __init__(self, hosts: TwoHosts, folder: Path, model: Path) -> None:
        self.hosts, self.folder, self.model = hosts, folder, model
        self.logs: dict[str, HostProcess] = {}
        text = (DOCS / "two_hosts.md").read_text()
        self.commands = [block.commands.strip() for block in blocks(text) if block.not_run is None]

    def here(self, command: str, host_a: str) -> list[str]:
        """Return a command's words with the addresses of this test, and files where they are here."""
        words = shlex.split(command.replace("\\\n", " ").replace(HOST_A, host_a), posix=True)
        words = [word.replace(HOST_B, self.hosts.two_to_one) for word in words]
        return [
            str(self.folder / "keys") if word == "keys" and at > 1 else word for at, word in enumerate(words)
        ]

    def start(self, command: str) -> None:
        """Start a node or the gateway on its host."""
        _, role, *options = self.here(command, self.hosts.one_to_two)
        host = self.hosts.two if role == "prefill" else self.hosts.one
        model = [str(self.model), *(["--served-model-name", MODEL] if role == "gateway" else [])]
        self.logs[role] = HostProcess(
            host, self.folder / "tmp", self.folder / f"{role}.log", role, *model, *options
        )

    def said(self) -> str:
        """What all of them said."""
        return "\n".join(process.log() for process in self.logs.values())


@pytest.fixture
def page(tiny_model: Path) -> Iterator[Page]:
    with temporary_folder() as folder, two_hosts() as hosts:
        (folder / "tmp").mkdir()
        page = Page(hosts, folder, tiny_model)
        try:
            yield page
        finally:
            for process in page.logs.values():
                process.kill()


def test_its_commands_make_a_server_of_two_hosts(page: Page) -> None:
    keys, *starts, ask = page.commands
    assert keys.split()[:2] == [".venv/bin/baton", "keys"]
    subprocess.run([str(BATON), *page.here(keys, HOST_A)[1:]], check=True, capture_output=True)
    assert [command.split()[1] for command in starts] == ["gateway", "decode", "prefill"]
    for command in starts:
        page.start(command)
    page.logs["gateway"].wait_for("listening on http://0.0.0.0:8000; nodes join tcp://")

    def ready() -> bool:
        try:
            return (
                httpx.get(f"http://{page.hosts.one_to_test}:8000/ready", trust_env=False).status_code == 200
            )
        except httpx.TransportError:
            return False

    poll_until(ready, START_S, "a usable pair", page.said)
    assert f"tcp://{page.hosts.two_to_one}:7001" in " ".join(page.here(starts[2], HOST_A))
    page.logs["decode"].wait_for(r"linked to prefill-\d+, plane frames")
    page.logs["prefill"].wait_for(r"no plane shm with decode-\d+: it is on another host")

    done = subprocess.run(page.here(ask, page.hosts.one_to_test), capture_output=True, text=True, check=True)
    assert '"object":"chat.completion"' in done.stdout
    words = page.here(ask, page.hosts.one_to_test)
    at = next(at for at, word in enumerate(words) if word.startswith("Authorization"))
    refused = subprocess.run(words[: at - 1] + words[at + 1 :], capture_output=True, text=True, check=True)
    assert "no API key" in refused.stdout
