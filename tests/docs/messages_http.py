"""What a server answers to a request that it does not serve."""

# ruff: noqa: E501  # texts of tables

from __future__ import annotations

import re
import socket
from contextlib import ExitStack

import httpx

from tests.docs.messages import BY_A_BUG, NotTried, Row
from tests.docs.provoke import Kit, Recipe
from tests.docs.provoke_served import ask, chat, http, message_of, read_all, send, whole


def _path(
    path: str, content: bytes = b"", headers: dict[str, str] | None = None, server: str = "main"
) -> Recipe:
    """Post bytes to a path."""

    def recipe(kit: Kit, says: re.Pattern[str]) -> str:
        _, url = kit.servers.get(server)
        with http(url) as client:
            return message_of(client.post(path, content=content, headers=headers))

    return recipe


def _slow(data: bytes) -> Recipe:
    """Send the beginning of a request and no more."""
    return send(data)


def _too_many_connections(kit: Kit, says: re.Pattern[str]) -> str:
    _, url = kit.servers.get("main")
    address = httpx.URL(url)
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(socket.create_connection((address.host, address.port or 80)))
        last = stack.enter_context(socket.create_connection((address.host, address.port or 80)))
        last.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        return read_all(last)


def _more_than_may_wait(kit: Kit, says: re.Pattern[str]) -> str:
    """Ask for more answers at once than run and wait."""
    _, url = kit.servers.get("main")
    prompts = [[11, 12, 13]] * 12
    with http(url) as client:
        return message_of(client.post("/v1/completions", json=whole({"prompt": prompts, "max_tokens": 400})))


def json_schema(schema: object) -> Recipe:
    """Ask for an answer of a schema."""
    return ask({"structured_outputs": {"json": schema}})


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

REQUESTS = [
    Row(
        {
            "no API key: send it as the header `Authorization: Bearer KEY`": ask({}, server="lone gateway"),
            "this API key is not the server's": _path(
                "/v1/completions", headers={"Authorization": "Bearer wrong"}, server="lone gateway"
            ),
        },
        "The server was started with `--api-key`. Status 401.",
        "Send its key. The official clients take it as `api_key=` or from `OPENAI_API_KEY`; the page at `/` asks.",
    ),
    Row(
        {"the model does not exist; this server has <name>": ask({"model": "gpt-4"})},
        "`model` has to be the name that this server uses. Status 404.",
        "Send that name (`/v1/models` says it), or start the server with `--served-model-name`.",
    ),
    Row(
        {
            "the request body is not valid JSON: <reason>": _path("/v1/completions", b"{"),
            "the request body must be a JSON object": _path("/v1/completions", b"[]"),
            "the request body is larger than <size> bytes": _path("/v1/completions", b"x" * (2 << 20)),
        },
        "The body cannot be read as a request.",
        "Send JSON (`curl -d` with single quotes around it). A larger body needs a larger `--max-body-mib`.",
    ),
    Row(
        {
            "unknown field <name>": ask({"tempreature": 1}),
            "<name> is required": ask({"prompt": None}),
            "<field><more> is not supported; leave it out, or set it to <values>": ask({"suffix": "x"}),
        },
        "A field is mistyped, missing, or one of OpenAI's that Baton does not serve. Nothing is ignored.",
        "[api.md](api.md) has every field. The official client sends extensions in `extra_body`.",
    ),
    Row(
        {
            "the prompt has <number> tokens; with at least 1 token of answer that is more than <limit>": ask(
                {"prompt": [5] * 600}
            ),
            "<number> tokens of prompt and <field>=<number> are more than <limit>": ask({"max_tokens": 5000}),
            "a text of more than <number> bytes cannot fit the model's context of <number> tokens": ask(
                {"prompt": "x" * 100_000}
            ),
            "a prompt of <number> tokens; the prefill nodes hold <number>": NotTried(
                "tests/system/test_standalone.py tries it"
            ),
            "min_tokens=<number> is more than <field>=<number>": ask({"min_tokens": 5, "max_tokens": 4}),
        },
        "Prompt and answer together are longer than the model's context, or than the pool of KV pages of a node.",
        "Shorten the prompt, or ask for fewer tokens. Where the message names the pool: raise `--kv-pages`, or give a "
        "GPU node more of its memory (`--gpu-memory-fraction`).",
    ),
    Row(
        {
            "<field>: the prompt has no tokens": NotTried("an empty text is refused before, in other words"),
            "must not be empty": ask({"prompt": ""}),
            "must be a string, a list of strings, or a list (of lists) of token ids": ask({"prompt": [True]}),
            "more than <number> prompts in one call": ask({"prompt": ["a"] * 3000}),
            "more than <number> answers in one call": ask({"prompt": ["a"] * 1000, "n": 100}),
            "<field>: a token id is not within 0..<last>": ask({"prompt": [100_000]}),
            "must be a string or a list of at most <number> strings": ask({"stop": [1]}),
            "a stop string has 1 to <number> characters": ask({"stop": [""]}),
            "must be an object with at most <number> fields": ask({"logit_bias": [1]}),
            "<key> is no token id": ask({"logit_bias": {"a": 1}}),
            "a bias is a number from -100 to 100": ask({"logit_bias": {"1": 1000}}),
            "max_tokens is at least 1 without echo": ask({"max_tokens": 0}),
            "max_tokens and max_completion_tokens are both given and differ": chat({"max_completion_tokens": 5}),
            "top_logprobs needs logprobs to be true": chat({"top_logprobs": 2}),
            "stream_options needs stream to be true": ask({"stream_options": {"include_usage": True}}),
            "prompt_logprobs are not told in a stream": ask({"prompt_logprobs": 1, "stream": True}),
            "<field>: more than <number> log probabilities of prompts in one call": NotTried(
                "it takes a prompt of 50,000 tokens"
            ),
            "<choices> choices; the decode node has room for <number>": ask({"n": 100}),
        },
        "A field has a value that it cannot have, or not together with another. `error.param` names it, and it stands "
        "before the message.",
        "Mend the field; [api.md](api.md) says what each may be.",
    ),
    Row(
        {
            "must be a string or a list of text parts": chat({"messages": [{"role": "user", "content": 1}]}),
            "a content part is an object with a type": chat({"messages": [{"role": "user", "content": ["x"]}]}),
            "content of type <type> is not supported": chat(
                {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
            ),
            "a text part has the fields type and text, both strings": chat(
                {"messages": [{"role": "user", "content": [{"type": "text"}]}]}
            ),
            "<message>.<field> is of role <role> alone": chat(
                {"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}
            ),
            "the model's chat template refuses the messages: <reason>": chat({}, server="grim template"),
        },
        "A message of the chat is not one that this model can be given: it knows text alone, and its template may want "
        "roles in turn or no system message.",
        "Send text; put what a system message says into the first user message where the template refuses it.",
    ),
    Row(
        {
            "this model has no chat template; use /v1/completions": chat({}, server="no template"),
            "this model has no tokenizer: give the prompt as token ids": ask({"prompt": "x"}, server="no tokenizer"),
            "this model has no tokenizer: its answers have no text": NotTried("said where a grammar is asked of it"),
        },
        "The model's folder has no chat template (base models have none), or was started with `--load-format dummy` and "
        "has no tokenizer.",
        "Take `/v1/completions` with a prompt of your own, an instruct version of the model, or put the files there.",
    ),
    Row(
        {
            "tool_choice needs tools": chat({"tool_choice": "required"}),
            "parallel_tool_calls needs tools": chat({"parallel_tool_calls": False}),
            "tools: two functions have one name": chat({"tools": [TOOL, TOOL]}),
            "tool_choice: no tool is called <name>": chat(
                {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}
            ),
            "type <type> is not supported": chat({"tools": [TOOL], "tool_choice": {"type": "custom"}}),
            'must be "none", "auto", "required", or {"type": "function", "function": {"name": ...}}': chat(
                {"tools": [TOOL], "tool_choice": "f"}
            ),
        },
        "The fields for tools do not fit each other.",
        "See the example [tools.py](examples/tools.py).",
    ),
    Row(
        {
            "type json_schema has a json_schema, and no other type has one": chat(
                {"response_format": {"type": "json_schema"}}
            ),
            "structured_outputs has exactly one of its fields, not <fields>": ask({"structured_outputs": {}}),
            "structured_outputs cannot be used with <field>": chat(
                {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}
            ),
            "<field> cannot be used with <field>": ask({"structured_outputs": {"regex": "a"}, "ignore_eos": True}),
            "is not valid JSON": json_schema("{"),
            "must be a JSON schema": json_schema(1),
        },
        "What the answer must match is said in a way that contradicts itself.",
        "See the examples [json_schema.py](examples/json_schema.py) and "
        "[structured_outputs.py](examples/structured_outputs.py).",
    ),
]  # fmt: skip

CONNECTIONS = [
    Row(
        {"too many connections: close some, or come again": _too_many_connections},
        "More connections are open than `--max-connections`. Status 503.",
        "Close connections that are not used, let clients reuse theirs, or raise the limit (it counts for each gateway).",
    ),
    Row(
        {
            "the request did not come in time": _slow(b"GET /v1/models HTTP/1.1\r\n"),
            "the request's body did not come in time": _slow(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
            ),
        },
        "The client sent the beginning of a request, and the rest not within `--client-timeout` seconds. Status 408.",
        "Look at the client's network; `Content-Length` may be larger than the body. For slow clients raise the limit.",
    ),
    Row(
        {
            "the request's headers are larger than <size> bytes": send(
                b"GET / HTTP/1.1\r\nX: " + b"x" * (80 << 10) + b"\r\n\r\n"
            )
        },
        "The head of a request has more than 64 KiB, or never ends. Status 431.",
        "Look for cookies or headers that a proxy adds.",
    ),
    Row(
        {
            "<number> requests are waiting already": _more_than_may_wait,
        },
        "As many requests wait on the decode node as `--max-queued` lets. Status 429, with `Retry-After`.",
        "Come again later, as the official clients do by themselves; or add nodes. A longer queue makes all wait longer.",
    ),
    Row(
        {
            "the request did not end in time: <phase> after <time> s": ask(
                {"timeout": 0.05, "max_tokens": 400, "ignore_eos": True, "prompt": [5] * 100}
            ),
            "the request did not end in time: not yet tokenized": NotTried("tests/gateway/test_deadlines.py tries it"),
            "the request did not end in time: <node> says nothing": NotTried(
                "tests/faults/test_f15_deadlines.py tries it"
            ),
        },
        "The request took longer than its field `timeout`, or than `--request-timeout`. Status 504. The phase says where "
        "it was: `queued` (others were before it), `transferring` (its prompt was being computed), `running`.",
        "Ask for fewer tokens or more time. `queued` again and again: more decode nodes, or fewer requests; "
        "`transferring`: more prefill nodes. If a node says nothing, see its log.",
    ),
]  # fmt: skip

NODES = [
    Row(
        {
            "no pair of prefill and decode nodes is ready: come again soon": _path(
                "/v1/completions",
                b'{"model": "tiny", "prompt": [1], "max_tokens": 1}',
                {"Authorization": "Bearer sk-secret"},
                "lone gateway",
            ),
        },
        "The gateway runs, and has no decode node, or that has no prefill node. Status 503, with `Retry-After`.",
        "`/ready` says when there are; `/debug/kv` lists the nodes, and which are missing. While a server starts it "
        "passes; if it stays, look for `link refused` in the logs of nodes and gateway.",
    ),
    Row(
        {
            "<node> and a grammar, which decides when the answer ends": BY_A_BUG,
            "the prompt is empty": BY_A_BUG,
            "token ids go from 0 to <last>": BY_A_BUG,
            "the vocabulary has <number> tokens": BY_A_BUG,
            "<number> prompt tokens, each with <number> log probabilities, are more than <number>": BY_A_BUG,
            "<number> prompt tokens and max_tokens <number> are more than <number>": BY_A_BUG,
            "a prompt of <number> tokens; the model takes <number>": BY_A_BUG,
            "a token id is not below the vocabulary size, <number>": BY_A_BUG,
            "a stop token id is not below the vocabulary size, <number>": BY_A_BUG,
            "more than <number> log probabilities of a prompt": BY_A_BUG,
            "a prompt of <number> pages; the prefill node has <number>": BY_A_BUG,
            "<number> pages granted for a prompt of <number>": BY_A_BUG,
            "the prefill node sent <token>, which is no token": BY_A_BUG,
            "the prefill node sent log probabilities of what is no token": BY_A_BUG,
            "internal error: the server's log has more": BY_A_BUG,
            "<request> failed": BY_A_BUG,
        },
        "A node refuses what the gateway should have refused, or something failed that should not: a fault of Baton's. "
        "Other requests are not touched.",
        "Please report it with the lines of the log: behind `failed` there is a traceback.",
    ),
]  # fmt: skip
