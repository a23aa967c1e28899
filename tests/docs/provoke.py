"""Ways to make the real program say something: commands, and what is done before them.

A recipe gets a `Kit` and what is waited for, and returns all that was printed or answered. Commands run in
forks of one process that has loaded torch and the rest: the same code and the same ends, without seconds of
imports.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING

from conformance.process import environment
from conformance.waiting import poll_until

if TYPE_CHECKING:
    from tests.docs.provoke_served import Servers

WAIT_S = 100.0
PRELOADED = [
    "cli", "prefill_node.node", "decode_node.node", "gateway.node", "model_store.store",
    "common.supervision.serve", "gateway.chat", "gateway.ask", "conformance.runner", "transformers",
]  # fmt: skip
Recipe = Callable[["Kit", re.Pattern[str]], str]
Edit = Callable[[Path], object]


@dataclass(frozen=True, slots=True)
class Kit:
    """What recipes work with.

    Args:
        folder: for this recipe alone; its path is short.
        tiny: folder of the tiny model; not to be written to.
        servers: keeps servers that several recipes ask, by name.
    """

    folder: Path
    tiny: Path
    servers: Servers

    def fill(self, words: Sequence[str]) -> list[str]:
        """Put folders into the arguments of a command."""
        names = {"folder": str(self.folder), "tiny": str(self.tiny)}
        return [re.sub(r"\{(folder|tiny)\}", lambda found: names[found[1]], word) for word in words]


class Command:
    """A command in a fork, until it ends or is ended."""

    def __init__(self, kit: Kit, words: Sequence[str], env: Mapping[str, str]) -> None:
        self._said = kit.folder / f"said-{len(list(kit.folder.iterdir()))}"
        self._said.touch()
        settings = dict(zip(env, kit.fill(list(env.values())), strict=True))
        env = environment(kit.folder) | {"CUDA_VISIBLE_DEVICES": ""} | settings
        self._process = _forks().Process(target=_run, args=(kit.fill(words), env, str(self._said)))
        self._process.start()

    def said(self) -> str:
        """All that it printed so far."""
        return self._said.read_text(errors="replace")

    def wait_for(self, pattern: re.Pattern[str]) -> str:
        """Wait until it has printed something, or has ended; return all that it printed."""
        poll_until(lambda: pattern.search(self.said()) or self.has_ended(), WAIT_S, repr(pattern), self.said)
        return self.said()

    def has_ended(self) -> bool:
        """Say whether it has."""
        return not self._process.is_alive()

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._process.pid is not None
        return self._process.pid

    def end(self) -> None:
        """End it, and wait."""
        self._process.terminate()
        self._process.join(WAIT_S)
        self._process.kill()
        self._process.join()


def _forks() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _run(words: list[str], env: dict[str, str], said: str) -> None:
    """Be the command."""
    output = os.open(said, os.O_WRONLY | os.O_APPEND)
    for fd in (1, 2):
        os.dup2(output, fd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["baton", *words]
    import cli

    cli.main()


def baton(*words: str, prepare: Edit | None = None, **env: str) -> Recipe:
    """Run a command until it has said what it should; `{folder}` and `{tiny}` stand for folders.

    `prepare` is done in the folder before.
    """

    def recipe(kit: Kit, says: re.Pattern[str]) -> str:
        if prepare is not None:
            prepare(kit.folder)
        command = Command(kit, words, env)
        try:
            return command.wait_for(says)
        finally:
            command.end()

    return recipe


def node(*words: str, prepare: Edit | None = None, **env: str) -> Recipe:
    """Start a prefill node of the tiny model that never meets its gateway."""
    return baton("prefill", "{tiny}", "--join", "ipc://{folder}/none.sock", *words, prepare=prepare, **env)


def model(edit: Edit, *words: str, role: str = "prefill") -> Recipe:
    """Start a process, or a server, with a copy of the tiny model in which something was changed."""

    def recipe(kit: Kit, says: re.Pattern[str]) -> str:
        copied(kit, edit)
        more = ["--join", "ipc://{folder}/none.sock"] if role == "prefill" else ["--port", "0"]
        return baton(role, "{folder}/model", *more, *words)(kit, says)

    return recipe


def copied(kit: Kit, edit: Edit) -> Path:
    """Return a copy of the tiny model in which something was changed."""
    copy = kit.folder / "model"
    copy.mkdir()
    for file in kit.tiny.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    edit(copy)
    return copy


def config(**changes: object) -> Edit:
    """Change config.json; None takes an entry out."""

    def edit(folder: Path) -> None:
        file = folder / "config.json"
        settings = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))

    return edit


def write(name: str, text: str) -> Edit:
    """Write a file."""
    return lambda folder: (folder / name).write_text(text)


def remove(name: str) -> Edit:
    """Remove a file."""
    return lambda folder: (folder / name).unlink()


def on_taken_port(*words: str) -> Recipe:
    """Run a command whose `{port}` somebody else has."""

    def recipe(kit: Kit, says: re.Pattern[str]) -> str:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            return baton(*(word.replace("{port}", port) for word in words))(kit, says)

    return recipe


def cut_weights(folder: Path) -> None:
    """Leave the beginning of the weights."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
