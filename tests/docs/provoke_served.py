"""Servers that recipes ask, and nodes that join them: each server is started once, for all that want it."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from common.keys import make_keys
from conformance.client import Body
from conformance.waiting import poll_until
from tests.docs.provoke import WAIT_S, Command, Edit, Kit, Recipe, config, copied, write


class Servers:
    """Servers that several recipes ask: each is started when the first one wants it, and ended at the end.

    Args:
        tiny: folder of the tiny model.
        folder: for all of them; its path is short.
    """

    def __init__(self, tiny: Path, folder: Path) -> None:
        self.tiny, self.folder = tiny, folder
        self.said: dict[Recipe, str] = {}  # by what was tried already
        self._running: dict[str, tuple[Command, str]] = {}

    def get(self, name: str) -> tuple[Command, str]:
        """Return a server and its address."""
        if name not in self._running:
            here = self.folder / name
            here.mkdir(mode=0o700)
            words, env, edit = SERVERS[name]
            kit = Kit(here, self.tiny, self)
            if edit is not None:
                copied(kit, edit)
            command = Command(kit, words, env)
            said = command.wait_for(re.compile(r"listening on http://[\d.]+:\d+"))
            found = re.search(r"listening on (http://[\d.]+:\d+)", said)
            assert found is not None, said
            self._running[name] = command, found[1]
            if words[0] == "serve":
                wait_ready(found[1], command)
        return self._running[name]

    def close(self) -> None:
        """End all."""
        for command, _ in self._running.values():
            command.end()


def wait_ready(url: str, command: Command) -> None:
    """Wait until a server has all its nodes."""

    def ready() -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(url + "/ready", trust_env=False).status_code == 200
        return False

    poll_until(ready, WAIT_S, "ready", command.said)


@contextmanager
def http(url: str) -> Iterator[httpx.Client]:
    """A client that waits for whatever comes."""
    with httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False) as client:
        yield client


def ask(body: Body, path: str = "/v1/completions", server: str = "main") -> Recipe:
    """Post a body, with a model and a prompt where it has none, and return the error's message."""

    def recipe(kit: Kit, says: re.Pattern[str]) -> str:
        _, url = kit.servers.get(server)
        with http(url) as client:
            return message_of(client.post(path, json=whole(body, path)))

    return recipe


def chat(body: Body, server: str = "main") -> Recipe:
    """Post a chat."""
    return ask(body, "/v1/chat/completions", server)


def whole(body: Body, path: str = "/v1/completions") -> Body:
    """Return a body with what every request must have."""
    if path.startswith("/v1/chat"):
        least: Body = {"messages": [{"role": "user", "content": "Hello"}]}
    else:
        least = {"prompt": [11, 12, 13]}
    return {"model": "tiny", "max_tokens": 4, **least, **body}


def message_of(answer: httpx.Response) -> str:
    """Return what an answer, whole or a stream's event, says went wrong."""
    for line in answer.text.splitlines():
        with suppress(ValueError):
            body: Any = json.loads(line.removeprefix("data: "))
            if "error" in body:
                return str(body["error"]["message"])
    return answer.text


def send(data: bytes, server: str = "main") -> Recipe:
    """Write bytes to the port, and read until the server closes."""

    def recipe(kit: Kit, says: re.Pattern[str]) -> str:
        _, url = kit.servers.get(server)
        address = httpx.URL(url)
        with socket.create_connection((address.host, address.port or 80), timeout=WAIT_S) as sock:
            sock.sendall(data)
            return read_all(sock)

    return recipe


def read_all(sock: socket.socket) -> str:
    """Read until the other end closes."""
    parts = []
    with suppress(ConnectionResetError):
        while part := sock.recv(1 << 16):
            parts.append(part)
    return b"".join(parts).decode()


def joining(*words: str, server: str = "main", edit: Edit | None = None, at: str = "gateway") -> Recipe:
    """Have one more prefill node join a server, and return what both say.

    Args:
        edit: of its model.
        at: whose address it is given: the gateway's, or a prefill node's.
    """

    def recipe(kit: Kit, says: re.Pattern[str]) -> str:
        joined, _ = kit.servers.get(server)
        address = address_of(joined)
        if at != "gateway":
            address = address.replace("gateway.sock", f"{at}.sock")
        folder = kit.tiny if edit is None else copied(kit, edit)
        command = Command(kit, ("prefill", str(folder), "--join", address, *words), {})

        def both() -> str:
            return command.said() + joined.said()

        try:
            poll_until(lambda: says.search(both()) or command.has_ended(), WAIT_S, repr(says), both)
            return both()
        finally:
            command.end()

    return recipe


def address_of(command: Command) -> str:
    """Return where nodes join a server."""
    found = re.search(r"nodes join (\S+)", command.said())
    assert found is not None, command.said()
    return found[1]


_GATEWAY = ("--served-model-name", "tiny", "--port", "0", "--nodes", "ipc://{folder}/gateway.sock")


def _faults_file(folder: Path) -> None:
    (folder.parent / "faults").write_text("")


def _keys(folder: Path) -> None:
    make_keys(folder.parent / "keys")


def _grim(folder: Path) -> None:
    write("chat_template.jinja", "{{ raise_exception('no chat today') }}")(folder)


def _no_tokenizer(folder: Path) -> None:
    for file in [*folder.glob("tokenizer*"), *folder.glob("chat_template*"), *folder.glob("*.safetensors")]:
        file.unlink()


def _no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def _no_end(folder: Path) -> None:
    config(eos_token_id=None)(folder)
    (folder / "generation_config.json").unlink()


# By name: the command, its environment, what is changed in its copy of the model (`{folder}/model`).
SERVERS: dict[str, tuple[tuple[str, ...], dict[str, str], Edit | None]] = {
    "main": (
        ("serve", "{tiny}", "--served-model-name", "tiny", "--port", "0", "--max-body-mib", "1",
         "--client-timeout", "2", "--max-connections", "8", "--max-running", "2", "--max-queued", "2"),
        {},
        None,
    ),
    "broken": (
        ("serve", "{folder}/model", "--served-model-name", "tiny", "--port", "0", "--max-running", "2",
         "--stall-timeout", "5", "--transfer", "frames"),
        {"BATON_FAULTS": "@{folder}/faults"},
        _faults_file,
    ),
    "no end": (
        ("serve", "{folder}/model", "--served-model-name", "tiny", "--port", "0", "--colocated"),
        {},
        _no_end,
    ),
    "lone gateway": (("gateway", "{tiny}", *_GATEWAY, "--api-key", "sk-secret"), {}, None),
    "keyed gateway": (
        ("gateway", "{folder}/model", "--port", "0", "--nodes", "tcp://127.0.0.1:*",
         "--keys", "{folder}/keys"),
        {},
        _keys,
    ),
    "grim template": (("gateway", "{folder}/model", *_GATEWAY), {}, _grim),
    "no template": (("gateway", "{folder}/model", *_GATEWAY), {}, _no_template),
    "no tokenizer": (("gateway", "{folder}/model", *_GATEWAY, "--load-format", "dummy"), {}, _no_tokenizer),
}  # fmt: skip
