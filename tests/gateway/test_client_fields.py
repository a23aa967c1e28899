"""Every field of the official client's calls has its effect, or is refused by name: none is ignored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from gateway.endpoints import CHAT, COMPLETIONS
from gateway.fake import Script
from gateway.text import TextPipeline
from tests import openai_fields
from tests.client_fields import REFUSED, STREAM, USES, Json, Seen, comparable
from tests.gateway.conftest import MODEL, WAIT_S, LiveServer
from tests.tiny import IM_END

ANSWER = "fox jumps over the lazy dog"
REQUIRED: dict[str, Json] = {
    "/v1/completions": {"model": MODEL, "prompt": "the quick", "max_tokens": 90, "seed": 1},
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "seed": 1},
}
ENDPOINTS = {endpoint.path: endpoint for endpoint in (COMPLETIONS, CHAT)}
FIELDS = [(path, name) for path, fields in openai_fields.BY_PATH.items() for name in sorted(fields)]
MINE = [(path, name) for path, name in FIELDS if name in ENDPOINTS[path].request_type.model_fields]
OTHERS = [case for case in FIELDS if case not in MINE]


@pytest.fixture
def api(server: LiveServer, text: TextPipeline) -> Iterator[openai.OpenAI]:
    ids = [*text.encode([ANSWER], special_tokens=False)[0], IM_END]
    server.nodes.script = Script(lambda _: ids, eos_token_ids=(IM_END,))
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=WAIT_S) as api:
        yield api


def call(api: openai.OpenAI, server: LiveServer, text: TextPipeline, path: str, fields: Json) -> Seen:
    create: Any = api.completions.create if path == "/v1/completions" else api.chat.completions.create
    before = len(server.nodes.streams)
    answer = create(**(REQUIRED[path] | fields))
    chunks = [chunk.model_dump() for chunk in answer] if fields.get("stream") else None
    request = server.nodes.streams[before]
    prompt = text._backend.decode(request.prompt_ids.tolist(), skip_special_tokens=False)
    return Seen(request.sampling, prompt, answer.model_dump() if chunks is None else {}, chunks)


def test_the_table_knows_every_field_of_the_client() -> None:
    """The client has a new field: give it a value, and what it must bring about."""
    for path, name in FIELDS:
        assert name in USES[path] or name in REFUSED, (path, name)
    for path, endpoint in ENDPOINTS.items():
        known = endpoint.request_type.model_fields.keys() | endpoint.unsupported.keys()
        assert openai_fields.BY_PATH[path] - known == set()


@pytest.mark.parametrize("stream", [{}, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize(("path", "name"), MINE)
def test_a_field_does_something(
    api: openai.OpenAI, server: LiveServer, text: TextPipeline, path: str, name: str, stream: Json
) -> None:
    use = USES[path][name]
    value = {} if use.value is None else {name: use.value}
    seen = call(api, server, text, path, stream | use.also | value)
    if callable(use.effect):
        assert use.effect(seen), seen
        without = call(api, server, text, path, {} if name == "stream" else stream | use.also)
        assert name == "parallel_tool_calls" or not use.effect(without), "seen without it as well"
    elif value:
        without = call(api, server, text, path, stream | use.also)
        assert comparable(seen.body) == comparable(without.body)
        assert seen.sampling == without.sampling


@pytest.mark.parametrize(("path", "name"), OTHERS)
def test_a_field_is_refused(api: openai.OpenAI, server: LiveServer, path: str, name: str) -> None:
    create: Any = api.completions.create if path == "/v1/completions" else api.chat.completions.create
    for stream in ({}, STREAM):
        with pytest.raises(openai.BadRequestError) as refused:
            create(**(REQUIRED[path] | stream | {name: REFUSED[name]}))
        assert refused.value.param == name
        assert name in refused.value.message
        assert refused.value.code == "unsupported_parameter"
    assert server.nodes.streams == []
    for value in ENDPOINTS[path].unsupported[name]:
        create(**(REQUIRED[path] | {name: value}))


@pytest.mark.parametrize("role", sorted(openai_fields.MESSAGES))
def test_no_field_of_a_message_is_ignored(
    api: openai.OpenAI, server: LiveServer, text: TextPipeline, role: str
) -> None:
    """Each reaches the template, or is refused with its path."""
    call_of_tool = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    values = {
        "audio": {"id": "a"},
        "function_call": {"name": "weather", "arguments": "{}"},
        "refusal": "no",
        "tool_calls": [call_of_tool],
    }
    asked = {"role": "user", "content": "zebra"}
    called = {"role": "assistant", "content": None, "tool_calls": [call_of_tool]}
    whole = {"role": role, "content": "giraffe"}
    if role == "tool":
        whole["tool_call_id"] = "call_1"
    chat = [asked, called, whole] if role == "tool" else [asked, whole]
    path = "/v1/chat/completions"
    try:
        seen = call(api, server, text, path, {"messages": chat})
        assert "giraffe" in seen.prompt_text
        assert role in seen.prompt_text
    except openai.BadRequestError as refused:
        assert role in ("tool", "function")
        assert (refused.param or "").startswith("messages[")  # noqa: PT017
        return
    for name in openai_fields.MESSAGES[role] & values.keys():
        try:
            more = call(api, server, text, path, {"messages": [asked, whole | {name: values[name]}]})
            assert more.prompt_text != seen.prompt_text, f"{name} is ignored"
        except openai.BadRequestError as refused:
            assert refused.param == f"messages[1].{name}"  # noqa: PT017


def described(**changes: Any) -> Json:
    """A tool, with other fields in its function."""
    function = {"name": "weather", "description": "kestrel", "parameters": {"type": "object"}}
    return {"type": "function", "function": function | changes}


CUSTOM = {"type": "custom", "custom": {"name": "weather"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function"}]}}
PARTS: list[Json] = [
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
    {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
    {"type": "file", "file": {"file_data": "AA=="}},
    {"type": "refusal", "refusal": "no"},
    {"type": "text", "text": "hi", "prompt_cache_breakpoint": {"mode": "explicit"}},
]
SCHEMA: Json = {"name": "s", "schema": {"type": "object"}}
INSIDE: list[Json] = [
    *({"messages": [{"role": "user", "content": [part]}]} for part in PARTS),
    {"tools": [CUSTOM]},
    {"tools": [described(examples=[])]},
    {"tools": [described() | {"defer_loading": True}]},
    {"tools": [described()], "tool_choice": ALLOWED},
    {"tools": [described()], "tool_choice": CUSTOM},
    {"tools": [described()], "tool_choice": {"type": "function", "function": {"name": "other"}}},
    {"response_format": {"type": "grammar", "grammar": "root ::= 'a'"}},
    {"response_format": {"type": "json_schema", "json_schema": SCHEMA | {"examples": []}}},
    {"response_format": {"type": "text", "json_schema": SCHEMA}},
    {"response_format": {"type": "json_object", "json_schema": SCHEMA}},
    {"response_format": {"type": "json_schema"}},
    {"stream": True, "stream_options": {"include_usage": True, "colour": 1}},
]


@pytest.mark.parametrize("fields", INSIDE, ids=lambda fields: str(list(fields.values())[-1])[-50:])
def test_nothing_inside_a_field_is_ignored(api: openai.OpenAI, server: LiveServer, fields: Json) -> None:
    """What a part of a field cannot do is refused with its place."""
    create: Any = api.chat.completions.create
    with pytest.raises(openai.BadRequestError) as refused:
        create(**(REQUIRED["/v1/chat/completions"] | fields))
    assert (refused.value.param or "").split(".")[0].split("[")[0] == list(fields)[-1]
    assert server.nodes.streams == []


def test_what_a_tool_says_reaches_the_model(
    api: openai.OpenAI, server: LiveServer, text: TextPipeline
) -> None:
    properties = {"type": "object", "properties": {"heron": {"type": "string"}}}
    path = "/v1/chat/completions"
    seen = call(api, server, text, path, {"tools": [described(parameters=properties)]})
    for word in ("weather", "kestrel", "heron"):
        assert word in seen.prompt_text
    assert seen.sampling.grammar is None
    named = {"type": "function", "function": {"name": "weather"}}
    forced = call(
        api, server, text, path, {"tools": [described(parameters=properties)], "tool_choice": named}
    )
    assert forced.sampling.grammar is not None
    assert "heron" in forced.sampling.grammar.text
    none = call(api, server, text, path, {"tools": [described()], "tool_choice": "none"})
    assert none.sampling.grammar is None
