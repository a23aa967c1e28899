"""What only Baton's own processes say to each other cannot be said from outside: 400, with its name."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import httpx
import pytest

from common import messages
from common.request import SamplingParams
from gateway.openai_api import ChatRequest, CompletionRequest
from tests.gateway.conftest import MODEL, LiveServer

REQUESTS = {
    "/v1/completions": (CompletionRequest, {"model": MODEL, "prompt": "the quick"}),
    "/v1/chat/completions": (ChatRequest, {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}),
}
INTERNAL = {
    field.name
    for message in [SamplingParams, *vars(messages).values()]
    if isinstance(message, type) and is_dataclass(message)
    for field in fields(message)
}
# How others call such things.
INTERNAL |= {
    *("request_id", "rid", "bootstrap_host", "bootstrap_port", "bootstrap_room", "kv_transfer_params"),
    *(
        "data_parallel_rank",
        "disagg_prefill_dp_rank",
        "input_ids",
        "prompt_token_ids",
        "priority",
        "lora_path",
    ),
    *("custom_logit_processor", "__class__", "chat_template", "mm_processor_kwargs", "extra_args"),
}
CASES = [
    (path, name) for path, (kind, _) in REQUESTS.items() for name in sorted(INTERNAL - set(kind.model_fields))
]


def test_there_is_something_to_try() -> None:
    assert {"page_ids", "transfer_id", "epoch", "num_logprobs", "prompt_ids", "sampling"} <= INTERNAL
    assert len(CASES) > 100


@pytest.mark.parametrize("path", REQUESTS)
def test_an_internal_field_is_refused_by_name(client: httpx.Client, server: LiveServer, path: str) -> None:
    _, body = REQUESTS[path]
    for name in [name for where, name in CASES if where == path]:
        for value in (1, [1], {"a": 1}, "x") if name in ("page_ids", "sampling") else (1,):
            response = client.post(path, json={**body, name: value})
            assert response.status_code == 400, (name, value)
            assert response.json()["error"]["param"] == name
    assert server.nodes.streams == []


def test_the_id_of_a_client_is_no_key(client: httpx.Client) -> None:
    """Two requests with the same id are two requests."""
    _, body = REQUESTS["/v1/completions"]
    headers = {"X-Request-Id": "the-same", "X-Correlation-Id": "1"}
    answers = [client.post("/v1/completions", json=body, headers=headers) for _ in range(2)]
    ids = {answer.json()["id"] for answer in answers}
    assert len(ids) == 2
    assert not any("the-same" in answer.headers["x-request-id"] for answer in answers)
