"""The default model held to grammars: every answer parses and is valid, and a tool is called and answered.

`jsonschema` checks what xgrammar let through, `re` the regular expressions. At temperature 1 the model writes
what comes to its mind.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.system.client import Client
from tests.system.server import running

pytestmark = [pytest.mark.system, pytest.mark.smollm2]

NAME = {"type": "string", "maxLength": 16}
AGE = {"type": "integer", "minimum": 0, "maximum": 120}


def each(**properties: Any) -> dict[str, Any]:
    """The schema of an object that has all of these."""
    return {"type": "object", "properties": properties, "required": [*properties]}


def formatted(form: str) -> dict[str, Any]:
    return {"type": "string", "format": form}


PERSON = each(name=NAME, age=AGE)
PAIR = {"type": "array", "items": AGE, "maxItems": 2}
QUOTED = 'é "quoted" \\'
SCHEMAS: list[dict[str, Any]] = [
    PERSON,
    PERSON | {"additionalProperties": False},
    PERSON | {"required": []},
    each(who=PERSON, friends={"type": "array", "items": PERSON, "maxItems": 2}) | {"required": ["friends"]},
    {"type": "array", "items": AGE, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [NAME, AGE], "minItems": 2},
    {"type": "array", "items": {"enum": ["red", "green", 7, None]}, "minItems": 3, "maxItems": 3},
    {"type": "object", "additionalProperties": AGE, "propertyNames": {"maxLength": 8}, "maxProperties": 3},
    each(kind={"const": "circle"}, radius={"type": "number", "minimum": 0, "maximum": 9}),
    {"anyOf": [PERSON, {"type": "null"}]},
    {"oneOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}]},
    {"type": ["integer", "boolean"], "minimum": 5, "maximum": 50},
    {"type": "string", "minLength": 3, "maxLength": 12},
    {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
    formatted("date"),
    each(id=formatted("uuid"), day={"enum": ["Monday", "Friday"]}),
    each(ip=formatted("ipv4"), up={"type": "boolean"}),
    {
        "$defs": {
            "tree": each(value=AGE, left={"anyOf": [{"$ref": "#/$defs/pair"}, {"type": "null"}]}),
            "pair": PAIR,
        },
        "$ref": "#/$defs/tree",
    },
    each(**{QUOTED: {"enum": ["ü\n", '"', "\\", "😀"]}}),
    each(**{f"q{i}": {"enum": ["yes", "no"]} for i in range(6)})
    | {"title": "Questions", "description": "Yes or no"},
]
REGEXES = [
    r"(yes|no|maybe), [a-z]{2,9}\.",
    r"\d{3}-\d{4}",
    r"[A-Z][a-z]{1,9} [A-Z][a-z]{2,7}",
    r"#[0-9a-f]{6}",
    r"((19|20)\d\d-(0[1-9]|1[0-2])\n){2}",
]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tell the weather of a city.",
            "parameters": {
                **each(city=NAME, unit={"enum": ["celsius", "fahrenheit"]}),
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "get_time", "strict": True, "parameters": each()}},
]
ASKED: Any = {"role": "user", "content": "What is the weather in Paris?"}


@pytest.fixture(scope="module")
def client(smollm2: Path) -> Iterator[Client]:
    with running(smollm2) as server:
        client = Client(server.url, server.model)
        yield client
        client.assert_ledger_clean()


@pytest.fixture
def api(client: Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=client.url + "/v1", api_key="none", max_retries=0, timeout=300) as api:
        yield api


def answers(client: Client, bodies: list[dict[str, Any]]) -> list[str]:
    """Ask all at once; every answer has come to its end by itself."""

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=client.url, timeout=300) as http:
            return await asyncio.gather(*(http.post("/v1/chat/completions", json=body) for body in bodies))

    texts = []
    for response in asyncio.run(ask()):
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        assert choice["finish_reason"] == "stop", choice
        texts.append(choice["message"]["content"])
    return texts


def question(client: Client, words: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": words}]
    return {"model": client.model, "messages": messages, "max_tokens": 2000, "seed": 1, **fields}


@pytest.mark.parametrize("temperature", [0, 1])
def test_every_answer_is_valid_by_its_schema(client: Client, temperature: int) -> None:
    asked = [
        question(
            client,
            f"Answer with JSON of this schema: {json.dumps(schema)}",
            temperature=temperature,
            response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        )
        for schema in SCHEMAS
    ]
    assert len(asked) == 20
    for schema, text in zip(SCHEMAS, answers(client, asked), strict=True):
        validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        validator.validate(json.loads(text))


def test_regexes_and_choices(client: Client) -> None:
    choices = ["a fox", 'a "dog"', "a\\cat\n"]
    asked = [question(client, "Say something.", structured_outputs={"regex": regex}) for regex in REGEXES]
    asked += [
        question(client, "What do you see?", structured_outputs={"choice": choices}, seed=seed)
        for seed in range(4)
    ]
    texts = answers(client, asked)
    for regex, text in zip(REGEXES, texts, strict=False):
        assert re.fullmatch(regex, text), (regex, text)
    assert {*texts[len(REGEXES) :]} <= {*choices}


def test_a_round_trip_with_tools(api: openai.OpenAI, client: Client) -> None:
    """Called in a stream because it must, answered, and told in words."""
    state: Any = ChatCompletionStreamState()
    pieces = 0
    fields: Any = {"tool_choice": "required", "parallel_tool_calls": False, "seed": 3, "max_tokens": 2000}
    for chunk in api.chat.completions.create(
        model=client.model, messages=[ASKED], tools=TOOLS, stream=True, **fields
    ):
        pieces += sum(len(choice.delta.tool_calls or ()) for choice in chunk.choices)
        state.handle_chunk(chunk)
    (choice,) = state.get_final_completion().choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert pieces > 1
    check_call(call)

    answer: Any = {"role": "tool", "tool_call_id": call.id, "content": '{"weather": "sunny", "degrees": 21}'}
    told = api.chat.completions.create(
        model=client.model,
        messages=[ASKED, choice.message, answer],
        tools=TOOLS,
        max_tokens=30,
        temperature=0,
    )
    assert told.choices[0].message.content or told.choices[0].message.tool_calls


def test_a_named_function_and_several_choices(api: openai.OpenAI, client: Client) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    body = api.chat.completions.create(
        model=client.model, messages=[ASKED], tools=TOOLS, tool_choice=named, n=3, seed=5, max_tokens=2000
    )
    for choice in body.choices:
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls or ()
        assert call.type == "function"
        assert call.function.name == "get_weather"
        check_call(call)


def check_call(call: Any) -> None:
    tools = {tool["function"]["name"]: tool["function"] for tool in TOOLS}
    jsonschema.validate(json.loads(call.function.arguments), tools[call.function.name]["parameters"])
