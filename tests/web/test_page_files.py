"""The page's files as HTTP serves them, and as a wheel has them."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from setuptools import Distribution
from setuptools.command.build_py import build_py

from common.config import GatewayConfig
from gateway.page_files import FOLDER
from gateway.text import TextPipeline
from tests.gateway.conftest import WAIT_S, LiveServer
from tests.gateway.live import live_gateway

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.name for path in FOLDER.iterdir())
PATHS = ["/", *(f"/web/{name}" for name in NAMES)]
TYPES = {
    "": "text/html",
    ".html": "text/html",
    ".css": "text/css",
    ".js": "javascript",
    ".svg": "image/svg+xml",
}


@pytest.fixture(scope="module")
def guarded(text: TextPipeline) -> Iterator[LiveServer]:
    """A gateway that asks for a key."""
    with live_gateway(text, GatewayConfig(api_key="secret")) as server:
        yield server


@pytest.fixture
def http(guarded: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.url) as client:
        yield client


@pytest.mark.parametrize("path", PATHS)
def test_a_file_needs_no_key_and_is_sent_once(http: httpx.Client, path: str) -> None:
    response = http.get(path)
    assert response.status_code == 200
    assert response.content == (FOLDER / (path.removeprefix("/web/").strip("/") or "index.html")).read_bytes()
    assert TYPES[Path(path).suffix] in response.headers["content-type"]
    assert "script-src 'self';" in response.headers["content-security-policy"]
    assert "unsafe" not in response.headers["content-security-policy"]
    head = http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(response.content))
    again = http.get(path, headers={"If-None-Match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = http.get(path, headers={"If-None-Match": '"another"'})
    assert other.content == response.content


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/web/none.js", 404),
        ("/web/", 404),
        ("/web/../page_files.py", 401),  # the client makes it /page_files.py
        ("/web/%2e%2e/page_files.py", 404),
        ("/web/..%2fapi_key.py", 404),
        ("/web/%2fetc%2fpasswd", 404),
        ("/web", 401),
        ("/webx", 401),
    ],
)
def test_nothing_else_is_served(http: httpx.Client, path: str, status: int) -> None:
    assert http.get(path).status_code == status


ODD = """
//health //ready // /. //v1/models //debug/kv ///debug/kv /%2fdebug/kv /health/../debug/kv
/health%2f..%2fdebug/kv /health/ /health%00 /health;/debug/kv /web/../debug/kv /web/%2e%2e/debug/kv
/web/..%2fdebug/kv /web%2f..%2fdebug%2fkv /web/%2e%2e%2fmetrics /web/debug/kv /web/app.js/../../debug/kv
http://x/debug/kv http://x//debug/kv http://x/web/../debug/kv /debug/kv#/web/ /debug/kv?/web/ /web/%00
/web/app.js%00 /web/%ff /WEB/app.js //web/app.js //v1/completions /web/../v1/completions
/web/..%2fv1/completions /web/v1/completions /health/../v1/completions
"""


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
@pytest.mark.parametrize("target", ODD.split())
def test_an_odd_path_is_no_way_round_the_key(guarded: LiveServer, method: str, target: str) -> None:
    """As it is on the wire: a client of HTTP would put the path in order first."""
    head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=WAIT_S) as sock:
        sock.sendall(head.encode())
        answer = sock.makefile("rb").read()
    assert int(answer.split()[1]) in (401, 404, 405)
    assert guarded.nodes.streams == []


def test_it_is_only_read(http: httpx.Client) -> None:
    for path in ("/", "/web/app.js"):
        assert http.post(path).status_code == 405


def test_the_policy_holds_by_what_the_files_are() -> None:
    """No script or style inside the page, no handler, no address elsewhere, no markup from strings."""
    index = (FOLDER / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=|javascript:", index) == []
    for name in NAMES:
        text = (FOLDER / name).read_text()
        addresses = set(re.findall(r"https?://[^\"' ]+", text)) - {"http://www.w3.org/2000/svg"}
        assert addresses == set(), name
        words = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
        assert re.findall(words, text) == [], name


def test_every_file_is_used() -> None:
    text = "".join(path.read_text() for path in FOLDER.iterdir())
    assert [name for name in NAMES if f'/{name}"' not in text] == ["index.html"]


def test_a_wheel_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    distribution = Distribution()
    distribution.parse_config_files()
    build = build_py(distribution)
    build.ensure_finalized()
    build.manifest_files = {}  # what git knows does not count
    assert sorted(build.find_data_files("gateway", "gateway")) == [f"gateway/web/{name}" for name in NAMES]
