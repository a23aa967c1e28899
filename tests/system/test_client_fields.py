"""Every field of the official client's calls on real servers: served, and a stream says what a body says.

What each field does is checked where the nodes can be seen (tests/gateway/test_client_fields.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests import openai_fields
from tests.client_fields import REFUSED, STREAM, USES, Json
from tests.system.client import Client
from tests.system.server import running

pytestmark = pytest.mark.system

NUM_TOKENS = 8
REQUIRED: dict[str, Json] = {
    "/v1/completions": {"prompt": "the quick brown", "seed": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello!"}], "seed": 3},
}
IN_A_STREAM_ALONE = ("stream", "stream_options")


@pytest.fixture(scope="module")
def small(smollm2: Path) -> Iterator[Client]:
    with running(smollm2, "--dtype", "float32") as server:
        client = Client(server.url, server.model)
        yield client
        client.assert_ledger_clean()


def ours(client: Client, path: str) -> frozenset[str]:
    """Return the client's fields that this server has, as its own page says."""
    page = client.get("/openapi.json").json()
    schema = page["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    refused = {name for name, says in schema["properties"].items() if says.keys() == {"enum"}}
    return openai_fields.BY_PATH[path] - (refused & REFUSED.keys())


def texts(choices: list[Any]) -> dict[int, str]:
    """Join what a whole answer, or the chunks of a stream, say of each choice."""
    found: dict[int, str] = {}
    for choice in choices:
        inside = getattr(choice, "message", None) or getattr(choice, "delta", None) or choice
        text = getattr(inside, "content", None) or getattr(inside, "text", None) or ""
        for call in getattr(inside, "tool_calls", None) or ():
            text += (call.function.name or "") + (call.function.arguments or "")
        found[choice.index] = found.get(choice.index, "") + text
    return found


def check(client: Client, path: str) -> None:
    """Ask with each field, stream and not."""
    assert ours(client, path) >= {"temperature", "stop", "logprobs", "seed"}
    with openai.OpenAI(base_url=client.url + "/v1", api_key="none", max_retries=0) as api:
        create: Any = api.completions.create if path == "/v1/completions" else api.chat.completions.create
        for name in sorted(ours(client, path)):
            use = USES[path][name]
            value = {} if use.value is None else {name: use.value}
            limit = {} if name == "max_completion_tokens" else {"max_tokens": NUM_TOKENS}
            fields = {"model": client.model} | REQUIRED[path] | limit | use.also | value
            chunks = [choice for chunk in create(**(fields | STREAM)) for choice in chunk.choices]
            for other in IN_A_STREAM_ALONE:
                fields.pop(other, None)
            whole = create(**fields)
            assert whole.usage.completion_tokens > 0, name
            assert texts(chunks) == texts(whole.choices), name
            ends = {choice.index: choice.finish_reason for choice in chunks if choice.finish_reason}
            assert ends == {choice.index: choice.finish_reason for choice in whole.choices}, name


@pytest.mark.parametrize("path", REQUIRED)
def test_tiny_model(pair: Client, path: str) -> None:
    check(pair, path)


@pytest.mark.smollm2
@pytest.mark.parametrize("path", REQUIRED)
def test_smollm2(small: Client, path: str) -> None:
    check(small, path)


@pytest.mark.parametrize("path", REQUIRED)
def test_what_the_server_does_not_do_is_refused_by_name(pair: Client, path: str) -> None:
    refused = openai_fields.BY_PATH[path] - ours(pair, path)
    assert refused
    with openai.OpenAI(base_url=pair.url + "/v1", api_key="none", max_retries=0) as api:
        create: Any = api.completions.create if path == "/v1/completions" else api.chat.completions.create
        for name in sorted(refused):
            with pytest.raises(openai.BadRequestError) as error:
                create(**({"model": pair.model} | REQUIRED[path] | {name: REFUSED[name]}))
            assert error.value.param == name
