"""What cannot be served is refused at once, with the field's name, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.system.client import WAIT_S, Client
from tests.system.oracle import Case
from tests.tiny import VOCAB_SIZE

pytestmark = pytest.mark.system

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
CONTEXT = 512
# Path, fields beside `model`, the param that the error names.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": [5, "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": [5, -1]}, "prompt"),
    (COMPLETIONS, {"prompt": [5, VOCAB_SIZE]}, "prompt"),
    (COMPLETIONS, {"prompt": [5, 2**40]}, "prompt"),
    (COMPLETIONS, {"prompt": [[5], [6, VOCAB_SIZE]]}, "prompt"),  # one good, one bad: neither runs
    (COMPLETIONS, {"prompt": [7] * CONTEXT}, "prompt"),
    (COMPLETIONS, {"prompt": [7] * 20, "max_tokens": CONTEXT - 19}, "max_tokens"),
    (COMPLETIONS, {"prompt": "hi", "max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"prompt": "hi", "max_tokens": "3"}, "max_tokens"),
    (COMPLETIONS, {"prompt": "hi", "max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    (COMPLETIONS, {"prompt": "hi", "temperature": -1}, "temperature"),
    (COMPLETIONS, {"prompt": "hi", "top_p": 1.1}, "top_p"),
    (COMPLETIONS, {"prompt": "hi", "stop": ""}, "stop"),
    (COMPLETIONS, {"prompt": "hi", "stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "hi", "best_of": 2}, "best_of"),
    (COMPLETIONS, {"prompt": "hi", "bootstrap_room": 1}, "bootstrap_room"),
    (COMPLETIONS, {"prompt": "hi", "stream": True, "max_tokens": CONTEXT}, "max_tokens"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "nobody", "content": "hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": "a b" * CONTEXT}]}, "messages"),
    (CHAT, {"messages": USER, "max_completion_tokens": CONTEXT}, "max_completion_tokens"),
    (CHAT, {"messages": USER, "n": 129}, "n"),
    (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools[0].function"),
]


def post(client: Client, path: str, **how: Any) -> httpx.Response:
    return httpx.post(client.url + path, timeout=WAIT_S, **how)


def test_refused_by_the_name_of_the_field(pair: Client) -> None:
    submitted = pair.metric("baton_node_requests_submitted_total")
    for path, fields, param in REFUSED:
        response = post(pair, path, json={"model": pair.model, **fields})
        assert response.status_code == 400, (fields, response.text)
        error = response.json()["error"]
        assert error["param"] == param, (fields, error)
        assert error["type"] == "invalid_request_error"
    assert pair.metric("baton_node_requests_submitted_total") == submitted


def test_what_is_no_request(pair: Client) -> None:
    for data in (b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000):
        assert post(pair, COMPLETIONS, content=data).status_code == 400, data[:10]
    assert post(pair, COMPLETIONS, content=b" " * (17 << 20)).status_code == 413
    unknown = post(pair, CHAT, json={"model": "other", "messages": USER})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert pair.get("/v1/nothing").status_code == 404
    assert pair.get(COMPLETIONS).status_code == 405


def test_null_and_defaults_are_as_if_absent(pair: Client, cases: list[Case]) -> None:
    nothing: dict[str, Any] = {"n": 1, "logprobs": None, "stop": None, "top_k": None, "presence_penalty": 0}
    cases[2].check(pair.ask(cases[2].body(8, **nothing)), 8)
