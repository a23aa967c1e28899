"""An id of the hub is fetched from a hub; where there is none, both readings of the name are told."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from common.model.spec import load_spec

COMMIT = "0" * 39 + "1"


class _Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as a download needs, with one model: org/tiny."""

    folder: Path

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        files = {path.name: path for path in self.folder.iterdir()}
        name = self.path.rpartition("/")[2]
        if self.path.startswith("/api/models/org/tiny/revision/"):
            siblings = [{"rfilename": name} for name in files]
            self._answer(json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings}).encode())
        elif self.path.startswith("/api/models/org/tiny/tree/"):
            entries = [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": name}
                for name, path in files.items()
            ]
            self._answer(json.dumps(entries).encode())
        elif self.path.startswith("/org/tiny/resolve/") and name in files:
            self._answer(files[name].read_bytes())
        else:
            self._answer(b"", 404)

    def _answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Stay silent."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Address of a hub, and the folder of its model."""
    folder = tmp_path / "on-the-hub"
    folder.mkdir()
    handler = type("Hub", (_Hub,), {"folder": folder})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()
        thread.join()


def resolve(name: str, endpoint: str, home: Path, load_format: str = "auto") -> tuple[str, str]:
    """Resolve in a process of its own, which reads these variables at its start: the folder, the error."""
    program = (
        "import sys; from model_store.store import resolve_model; from common.errors import ConfigError\n"
        "try: print(resolve_model(sys.argv[1], print, load_format=sys.argv[2]))\n"
        "except ConfigError as error: sys.exit('error: ' + str(error))"
    )
    env = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    env.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run(
        [sys.executable, "-c", program, name, load_format],
        capture_output=True,
        text=True,
        env=env,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    said, _, folder = done.stdout.strip().rpartition("\n")
    assert f"{name} is no folder here, so it is taken from the hub" in (said or folder)
    return folder, done.stderr.rpartition("error: ")[2].removesuffix("\n")


def fill(folder: Path, source: Path) -> None:
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "pytorch_model.bin").write_bytes(b"not wanted")


def test_what_a_model_needs_is_fetched(hub: tuple[str, Path], tiny_model: Path, tmp_path: Path) -> None:
    endpoint, on_the_hub = hub
    fill(on_the_hub, tiny_model)
    folder = Path(resolve("org/tiny", endpoint, tmp_path / "home")[0])
    assert {path.name for path in folder.iterdir()} == {path.name for path in tiny_model.iterdir()}
    assert load_spec(folder) == load_spec(tiny_model)


def test_random_weights_need_no_weights(hub: tuple[str, Path], tiny_model: Path, tmp_path: Path) -> None:
    endpoint, on_the_hub = hub
    fill(on_the_hub, tiny_model)
    folder = Path(resolve("org/tiny", endpoint, tmp_path / "home", "dummy")[0])
    assert (folder / "config.json").exists()
    assert not (folder / "model.safetensors").exists()


def test_a_repository_without_a_model_is_refused(hub: tuple[str, Path], tmp_path: Path) -> None:
    endpoint, on_the_hub = hub
    (on_the_hub / "config.json").write_text("{}")
    _, error = resolve("org/tiny", endpoint, tmp_path / "home")
    assert error == "org/tiny on the hub has no config.json, or no *.safetensors file"


def test_an_id_that_the_hub_does_not_have_is_one_line(hub: tuple[str, Path], tmp_path: Path) -> None:
    _, error = resolve("models/llama", hub[0], tmp_path / "home")
    assert error.startswith("models/llama is neither a folder nor a .gguf file here, and the hub ")
    assert "404" in error
    assert "\n" not in error


def test_a_hub_that_is_not_reachable_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        _, error = resolve("org/tiny", f"http://127.0.0.1:{taken.getsockname()[1]}", tmp_path / "home")
    assert error.startswith("org/tiny is neither a folder nor a .gguf file here, and the hub ")
    assert "\n" not in error
    assert "Connection refused" in error
