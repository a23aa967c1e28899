"""Status, headers and error objects on a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from common.errors import RequestRejected
from gateway.fake import Script
from gateway.text import TextPipeline
from tests.gateway.conftest import LIMITS, MODEL, LiveServer
from tests.tiny import VOCAB_SIZE

COMPLETION = {"model": MODEL, "prompt": "the quick", "max_tokens": 4}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def assert_error(response: httpx.Response, status: int, **expected: Any) -> None:
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert {name: error[name] for name in expected} == expected
    assert "Traceback" not in response.text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"{}x",
        b'{"a": NaN}',
        b'{"temperature": -Infinity}',
        b'{"prompt": "\\ud800"}',
        b'{"\\udc00": 1}',
        b'{"prompt": "\xff"}',
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a": ' + b"9" * 10_000 + b"}",
        b"\x00",
    ],
)
def test_what_is_no_json_object(client: httpx.Client, path: str, body: bytes) -> None:
    assert_error(client.post(path, content=body), 400, code="invalid_json", param=None)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"colour": 1}, "colour"),
        ({"n": 129}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 10**30}, "seed"),
        ({"temperature": 1e999}, "temperature"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": [[1], [VOCAB_SIZE]]}, "prompt"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"max_tokens": None, "min_tokens": 17}, "min_tokens"),
    ],
)
def test_wrong_fields_are_400_and_reach_no_node(
    server: LiveServer, client: httpx.Client, changes: dict[str, Any], param: str
) -> None:
    # Python's json writes 1e999 as Infinity, which is no JSON: written by hand.
    body = json.dumps(COMPLETION | changes).replace("Infinity", "1e999")
    assert_error(client.post("/v1/completions", content=body), 400, param=param)
    assert server.nodes.streams == []


def test_routes_that_do_not_exist(client: httpx.Client) -> None:
    assert_error(client.get("/v1/nothing"), 404)
    assert_error(client.get("/v1/models/"), 404)
    response = client.get("/v1/completions")
    assert_error(response, 405)
    assert response.headers["allow"] == "POST"


def test_other_model(server: LiveServer, client: httpx.Client) -> None:
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        response = client.post(path, json=body | {"model": "gpt-4"})
        assert_error(response, 404, code="model_not_found", param="model")
    assert_error(client.get("/v1/models/gpt-4"), 404, code="model_not_found")
    assert client.get(f"/v1/models/{MODEL}").json()["id"] == MODEL
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == [MODEL]


def test_body_over_the_limit(client: httpx.Client) -> None:
    body = json.dumps(COMPLETION | {"user": "x" * (1 << 20)}).encode()

    def chunked() -> Iterator[bytes]:
        for start in range(0, len(body), 1 << 16):
            yield body[start : start + (1 << 16)]

    assert_error(client.post("/v1/completions", content=body), 413)
    assert_error(client.post("/v1/completions", content=chunked()), 413)
    assert client.post("/v1/completions", json=COMPLETION).status_code == 200


def test_prompt_and_answer_have_to_fit_the_context(client: httpx.Client) -> None:
    long = [5] * LIMITS.context_length
    refused = {"code": "context_length_exceeded"}
    response = client.post("/v1/completions", json=COMPLETION | {"prompt": long})
    assert_error(response, 400, param="prompt", **refused)
    response = client.post("/v1/completions", json=COMPLETION | {"prompt": long[:-3]})
    assert_error(response, 400, param="max_tokens", **refused)
    response = client.post(
        "/v1/chat/completions", json=CHAT | {"max_completion_tokens": 512, "max_tokens": None}
    )
    assert_error(response, 400, param="max_completion_tokens", **refused)
    response = client.post(
        "/v1/chat/completions", json=CHAT | {"messages": [{"role": "user", "content": "z" * 600}]}
    )
    assert_error(response, 400, param="messages", **refused)
    assert client.post("/v1/completions", json=COMPLETION | {"prompt": long[:-4]}).status_code == 200


def test_prompt_and_answer_have_to_fit_the_pool(server: LiveServer, client: httpx.Client) -> None:
    server.nodes.capacity = 20
    body = {"model": MODEL, "prompt": [5] * 10}
    response = client.post("/v1/completions", json=body | {"max_tokens": 11})
    assert_error(response, 400, param="max_tokens", code="context_length_exceeded")
    # The default of 16 is clipped instead.
    assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 10
    assert (
        client.post("/v1/completions", json=body | {"prompt": [5]}).json()["usage"]["completion_tokens"] == 16
    )


def test_chat_without_max_tokens_gets_the_rest_of_the_context(
    client: httpx.Client,
) -> None:
    usage = client.post("/v1/chat/completions", json=CHAT | {"max_tokens": None}).json()["usage"]
    assert usage["total_tokens"] == LIMITS.context_length


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "retry_after_s", "header"), [(503, 7, "7"), (429, None, "1"), (400, None, None)]
)
def test_refusal_of_the_nodes_is_a_status(
    server: LiveServer,
    client: httpx.Client,
    stream: bool,
    status: int,
    retry_after_s: int | None,
    header: str | None,
) -> None:
    refusal = RequestRejected("not now", status=status, retry_after_s=retry_after_s)
    for script in (Script(refusal=refusal), Script(fail_after=0, failure=refusal)):
        server.nodes.script = script
        response = client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
        assert_error(response, status, message="not now")
        assert response.headers.get("retry-after") == header


def test_failure_in_a_stream_is_its_last_event(server: LiveServer, client: httpx.Client) -> None:
    server.nodes.script = Script(fail_after=2)
    response = client.post("/v1/completions", json=COMPLETION | {"stream": True})
    assert response.status_code == 200
    events = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]
    assert [*events[-1]] == ["error"]
    assert events[-1]["error"]["message"] == "the decode node died"
    assert all("choices" in event for event in events[:-1])


def test_failure_of_one_prompt_fails_the_call_and_aborts_the_others(
    server: LiveServer, client: httpx.Client, text: TextPipeline
) -> None:
    bad, good = text.encode(["a", "z"], special_tokens=False)

    def tokens(prompt: Any) -> list[int]:
        if prompt.tolist() == bad:
            raise RequestRejected("no pair of nodes", status=503)
        return good

    server.nodes.script = Script(tokens, hold_after=1)
    response = client.post("/v1/completions", json=COMPLETION | {"prompt": ["z", "z", "a"]})
    assert_error(response, 503)
    assert [stream.aborted for stream in server.nodes.streams] == [True, True]


@pytest.mark.parametrize("fail_after", [0, 2])
def test_a_bug_of_ours_is_a_500_and_leaves_nothing(
    server: LiveServer, client: httpx.Client, fail_after: int
) -> None:
    server.nodes.script = Script(fail_after=fail_after, failure=ZeroDivisionError("secret"))
    response = client.post("/v1/completions", json=COMPLETION)
    assert_error(response, 500, type="server_error", message="internal error: the server's log has more")
    response = client.post("/v1/completions", json=COMPLETION | {"stream": True})
    assert "internal error" in response.text
    assert "secret" not in response.text
    assert "[DONE]" not in response.text


def test_health_and_ready(server: LiveServer, client: httpx.Client) -> None:
    assert (client.get("/health").status_code, client.get("/ready").status_code) == (200, 200)
    server.nodes.is_usable = False
    assert (client.get("/health").status_code, client.get("/ready").status_code) == (200, 503)
    assert "retry-after" in client.get("/ready").headers
    server.nodes.stalled_ids = ("decode-1",)
    response = client.get("/health")
    assert (response.status_code, response.json()["nodes"]) == (503, ["decode-1"])


def test_ledger(server: LiveServer, client: httpx.Client) -> None:
    nodes = client.get("/debug/kv").json()["nodes"]
    assert [(node["id"], node["role"], node["epoch"]) for node in nodes] == [
        ("prefill-1", "prefill", 11),
        ("decode-1", "decode", 12),
    ]
    for node in nodes:
        total = node["pages"].pop("total")
        assert node["pages"].keys() == {"free", "active", "cached", "incoming", "outgoing", "quarantined"}
        assert sum(node["pages"].values()) == total
    server.nodes.missing = ("prefill-1",)
    response = client.get("/debug/kv")
    assert (response.status_code, response.json()["missing"]) == (200, ["prefill-1"])
    assert [node["id"] for node in response.json()["nodes"]] == ["decode-1"]


def metric(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == name)


def settle(client: httpx.Client) -> None:
    """Look until no call is being served: a client has its answer a moment before it is counted."""
    for _ in range(1000):
        if metric(client, "baton_requests_running") == 0:
            return
    raise AssertionError("calls are still being served")


def test_metrics_are_there_and_count(server: LiveServer, client: httpx.Client) -> None:
    names = [
        f'baton_requests_total{{outcome="{o}"}}' for o in ("success", "rejected", "failed", "client_gone")
    ]
    settle(client)
    before = [metric(client, name) for name in names]
    tokens = metric(client, "baton_prompt_tokens_total"), metric(client, "baton_generation_tokens_total")
    client.post("/v1/completions", json=COMPLETION | {"prompt": [5, 6, 7]})
    client.post("/v1/completions", json=COMPLETION | {"prompt": ""})
    server.nodes.script = Script(fail_after=1)
    client.post("/v1/completions", json=COMPLETION | {"prompt": [5, 6]})
    settle(client)
    assert [metric(client, name) - old for name, old in zip(names, before, strict=True)] == [1, 1, 1, 0]
    assert metric(client, "baton_prompt_tokens_total") - tokens[0] == 5
    assert metric(client, "baton_generation_tokens_total") - tokens[1] == 5
    assert metric(client, "baton_gateway_messages_rejected_total") == 0
    for role, restarts in (("gateway", 0), ("prefill", 0), ("decode", 1)):
        name = f'baton_restarts_total{{reason="died",role="{role}"}}'
        assert metric(client, name) == restarts
    assert metric(client, 'baton_node_steps_total{node="decode-1",role="decode"}') == 5
    assert metric(client, 'baton_kv_pages{node="decode-1",role="decode",state="free"}') == 100


def test_openapi_page_is_true_to_the_errors(client: httpx.Client) -> None:
    page = client.get("/openapi.json").json()
    responses = page["paths"]["/v1/completions"]["post"]["responses"]
    documented = {"200", "400", "401", "404", "408", "413", "429", "431", "500", "503", "504"}
    assert documented == responses.keys()
    assert "HTTPValidationError" not in json.dumps(page)
    properties = page["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert "prompt" in properties["schema"]["properties"]
    bias, null = properties["schema"]["properties"]["logit_bias"]["anyOf"]
    assert null == {"type": "null"}
    assert (bias["additionalProperties"]["minimum"], bias["additionalProperties"]["maximum"]) == (-100, 100)


def test_head_is_answered_as_get_without_a_body(server: LiveServer) -> None:
    for path in ("/health", "/ready", "/v1/models"):
        response = httpx.head(server.url + path)
        assert response.status_code == 200
        assert response.content == b""


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(server: LiveServer) -> None:
    for path, body in (
        ("completions", {"prompt": "a " * 300_000}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a " * 300_000}]}),
    ):
        response = httpx.post(f"{server.url}/v1/{path}", json={"model": MODEL, **body})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", next(iter(body)))
        assert "bytes" in error["message"]
