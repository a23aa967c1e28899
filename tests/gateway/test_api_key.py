"""The key of the HTTP API: who has it is served, everybody else gets 401 and nothing besides."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from common.config import AskConfig, ClientConfig, GatewayConfig
from gateway import api_key
from gateway.api_client import AskFailed
from gateway.ask import ask
from gateway.text import TextPipeline
from tests.gateway.conftest import MODEL, LiveServer
from tests.gateway.live import live_gateway

KEY = "sk-the-quick-brown-fox"
COMPLETION = {"model": MODEL, "prompt": "the quick", "max_tokens": 4}
CLOSED = [
    ("GET", "/v1/models"),
    ("HEAD", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/metrics"),
    ("GET", "/debug/kv"),
    ("GET", "/openapi.json"),
    ("GET", "/no/such/path"),
    ("OPTIONS", "/v1/models"),
    ("GET", "/health/"),
    ("GET", "/web"),
    ("GET", "/website"),
    ("GET", "/debug/requests"),
    ("GET", "/Health"),
]


@pytest.fixture(scope="module")
def guarded(text: TextPipeline) -> Iterator[LiveServer]:
    with live_gateway(text, GatewayConfig(api_key=KEY)) as server:
        yield server


@pytest.fixture
def http(guarded: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.url) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def assert_refused(response: httpx.Response) -> None:
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    if response.request.method != "HEAD":
        error = response.json()["error"]
        assert (error["type"], error["param"], error["code"]) == (
            "invalid_request_error",
            None,
            "invalid_api_key",
        )
        assert KEY not in response.text


@pytest.mark.parametrize(("method", "path"), CLOSED)
def test_every_route_but_those_asks_for_it(
    http: httpx.Client, guarded: LiveServer, method: str, path: str
) -> None:
    body: dict[str, Any] = {"json": COMPLETION} if method == "POST" else {}
    assert_refused(http.request(method, path, **body))
    assert http.request(method, path, headers=bearer(KEY), **body).status_code != 401
    assert len(guarded.nodes.streams) <= 1
    guarded.nodes.streams.clear()


@pytest.mark.parametrize("path", ["/health", "/ready", "/", "/web/app.js"])
def test_whether_it_lives_is_no_secret_nor_is_the_page(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 200


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        KEY,
        f"Basic {KEY}",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        f"Bearer {KEY.upper()}",
        f"Bearer x {KEY}",
        "Bearer \u00e4".encode("latin-1"),
        b"Bearer \xff\xfe",
        "Bearer " + "x" * 10_000,
    ],
)
def test_anything_else_is_refused(http: httpx.Client, guarded: LiveServer, value: str | bytes) -> None:
    headers: Any = {"Authorization": value}
    assert_refused(http.post("/v1/completions", json=COMPLETION, headers=headers))
    assert guarded.nodes.streams == []


def test_two_of_them_are_refused(http: httpx.Client) -> None:
    headers = [("Authorization", f"Bearer {KEY}"), ("Authorization", "Bearer x")]
    assert_refused(http.get("/v1/models", headers=headers))


@pytest.mark.parametrize("value", [f"bearer {KEY}", f"BEARER {KEY}", f"Bearer  {KEY}"])
def test_the_scheme_is_a_word_of_any_case(http: httpx.Client, value: str) -> None:
    assert http.get("/v1/models", headers={"Authorization": value}).status_code == 200


def test_a_body_is_not_read_without_it(http: httpx.Client) -> None:
    assert_refused(http.post("/v1/completions", content=b"not json"))
    assert_refused(http.post("/v1/completions", content=b"x" * (17 << 20)))


def test_what_is_compared_takes_the_same_time(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two digests, by the one function that the language has for it: no clock can show that."""
    seen: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes, compare: Any = hmac.compare_digest) -> Any:
        seen.append((a, b))
        return compare(a, b)

    monkeypatch.setattr(api_key.hmac, "compare_digest", compare)
    for key in ("x", KEY, "y" * 1000):
        http.get("/v1/models", headers=bearer(key))
    assert len(seen) == 3
    assert {len(digest) for pair in seen for digest in pair} == {32}


def test_commands_send_it(guarded: LiveServer, tmp_path: Any) -> None:
    (tmp_path / "key").write_text(KEY + "\n")
    answer: list[str] = []
    for key in (KEY, f"@{tmp_path / 'key'}"):
        config = ClientConfig(url=guarded.url, max_tokens=4, api_key=key)
        ask(config, AskConfig(raw=True), "the quick", answer.append)
    assert answer
    for wrong, words in ((None, "no API key"), ("x", "not the server's")):
        config = ClientConfig(url=guarded.url, api_key=wrong)
        with pytest.raises(AskFailed, match=rf"{words}.*\(HTTP 401\)"):
            ask(config, AskConfig(raw=True), "the quick", answer.append)


def test_without_a_key_nobody_is_asked(text: TextPipeline) -> None:
    with live_gateway(text, GatewayConfig()) as server:
        assert httpx.get(server.url + "/v1/models").status_code == 200
        assert httpx.get(server.url + "/v1/models", headers=bearer("any")).status_code == 200
