"""J: the API says what it does and does what it says."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import httpx
from transformers import AutoTokenizer

from conformance.client import Body, greedy
from conformance.recipes import (
    PROMPTS,
    assert_unavailable,
    check_all,
    joined,
    node_ids,
    post,
    without,
)
from conformance.rows import Needs, Proof, row
from conformance.setup import Setup

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "be short"}, {"role": "user", "content": "tell a story"}]
FIELDS: Body = {"max_tokens": 20, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
USAGE: Body = {"stream": True, "stream_options": {"include_usage": True}}
TOO_LONG = 300_000  # tokens; longer than any context


def events(response: httpx.Response) -> list[Any]:
    """Return the events of a stream, [DONE] apart."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.headers
    *lines, last = [line for line in response.text.split("\n") if line]
    assert last == "data: [DONE]", last
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@row(
    "J2",
    "what the official client sends is answered, whole and streamed",
    proof=Proof(
        "a stream has no usage",
        patch="import gateway.rendering as r\nr.Renderer.usage_chunk = lambda *_: None\n",
    ),
)
def j2(s: Setup) -> None:
    ids = PROMPTS[4]
    text = s.reference.text(s.reference.tokens(ids, 20))
    for form in (ids, [ids]):
        whole = post(s, COMPLETIONS, {"prompt": form, **FIELDS}).json()
        assert whole["object"] == "text_completion"
        assert whole["choices"][0]["text"] == text
        parts = events(post(s, COMPLETIONS, {"prompt": form, **FIELDS, **USAGE}))
        assert "".join(part["choices"][0]["text"] for part in parts if part["choices"]) == text
        assert parts[-1].get("usage") == whole["usage"], parts[-1]
    assert [model["id"] for model in s.client.get("/v1/models").json()["data"]] == [s.client.model]


@row(
    "J3",
    "too long a prompt is 400 with the API's error object, on every way",
    needs=Needs.HTTP,
    proof=Proof(
        "the status is lost on the way",
        patch="import common.errors as e\n"
        "real = e.RequestRejected.__init__\n"
        "def init(self, *args, **how):\n"
        "    real(self, *args, **how)\n"
        "    self.status = 500\n"
        "e.RequestRejected.__init__ = init\n",
    ),
)
def j3(s: Setup) -> None:
    chat = [{"role": "user", "content": "a b" * TOO_LONG}]
    for path, body in ((COMPLETIONS, {"prompt": [7] * TOO_LONG}), (CHAT, {"messages": chat})):
        for how in ({}, USAGE):
            response = post(s, path, {**body, **how})
            assert response.status_code == 400, (response.status_code, response.text[:300])
            assert response.headers["content-type"] == "application/json"
            error = response.json()["error"]
            assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
            assert error["message"]


@row(
    "J4",
    "no prefill node: an error, not another way of serving; and metrics that say so",
    needs=Needs.FRESH,
    proof=Proof(
        "D computes prompts by itself",
        patch="import decode_node.node as n\n"
        "real = n.DecodeNode.__init__\n"
        "def init(self, *args, **how):\n"
        "    real(self, *args, **how)\n"
        "    self._scheduler.prefill_lost = lambda *_: None\n"
        "n.DecodeNode.__init__ = init\n"
        "n.DecodeNode._can_prefill = lambda self: True\n"
        "n.DecodeNode._longest_prompt = lambda self: 512\n",
    ),
)
def j4(s: Setup) -> None:
    failed = s.client.metric("baton_requests_total", outcome="failed")
    with without(s, "prefill"):
        assert_unavailable(s)
        assert s.client.metric("baton_requests_total", outcome="failed") == failed + 2
        assert s.client.metric("baton_nodes") == 1
        assert s.client.metric("baton_kv_pages", role="prefill") == 0
    check_all(s, PROMPTS[:4])


def check_chat(s: Setup) -> None:
    """Compare chats, with the template, a system role and text parts, with the oracle's."""
    tokenizer = AutoTokenizer.from_pretrained(s.models.tiny)
    text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = s.reference.expect({"prompt": ids, "max_tokens": 20, "ignore_eos": True})
    parts = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in MESSAGES]
    for messages in (MESSAGES, parts):
        response = post(s, CHAT, {"messages": messages, **FIELDS})
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        assert (choice["message"]["role"], choice["message"]["content"]) == ("assistant", expected.text)
        assert choice["prompt_token_ids"] == ids
        assert choice["token_ids"] == expected.tokens
        deltas = events(post(s, CHAT, {"messages": messages, **FIELDS, **USAGE}))
        assert deltas[0]["choices"][0]["delta"].get("role") == "assistant", deltas[0]
        said = [delta["choices"][0]["delta"].get("content") or "" for delta in deltas if delta["choices"]]
        assert "".join(said) == expected.text


@row(
    "J5",
    "chat and completions: templates, a system role, text parts",
    proof=Proof(
        "the system message is left out",
        patch="import gateway.openai_api as o\n"
        "real = o.parse_chat\n"
        "def parse(body):\n"
        "    body['messages'] = [m for m in body['messages'] if m['role'] != 'system']\n"
        "    return real(body)\n"
        "o.parse_chat = parse\n",
    ),
)
def j5(s: Setup) -> None:
    check_chat(s)
    choice = post(s, COMPLETIONS, {"prompt": "tell a story", **FIELDS}).json()["choices"][0]
    ids = AutoTokenizer.from_pretrained(s.models.tiny).encode("tell a story", add_special_tokens=False)
    assert choice["prompt_token_ids"] == ids
    assert choice["token_ids"] == s.reference.tokens(ids, 20)


@row(
    "J7",
    "stream, finish_reason, usage and media types say what is so",
    needs=Needs.HTTP,
    proof=Proof(
        "the stream flag is ignored",
        patch="import gateway.openai_api as o\n"
        "for name in ('parse_completion', 'parse_chat'):\n"
        "    def parse(body, real=getattr(o, name)):\n"
        "        body.pop('stream_options', None)\n"
        "        return real(body | {'stream': False})\n"
        "    setattr(o, name, parse)\n",
    ),
)
def j7(s: Setup) -> None:
    ids = PROMPTS[4]
    first = post(s, COMPLETIONS, greedy(ids, 1)).json()["choices"][0]["token_ids"]
    calls = (
        (COMPLETIONS, {"prompt": ids, "max_tokens": 5, "ignore_eos": True}, "length"),
        (COMPLETIONS, {"prompt": ids, "max_tokens": 20, "stop_token_ids": first}, "stop"),
        (CHAT, {"messages": MESSAGES[1:], "max_tokens": 5, "ignore_eos": True}, "length"),
    )
    for path, fields, finish in calls:
        body = {"temperature": 0, **fields}
        whole = post(s, path, body)
        assert whole.headers["content-type"] == "application/json"
        used = whole.json()["usage"]
        assert whole.json()["choices"][0]["finish_reason"] == finish
        assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]
        parts = events(post(s, path, body | {"stream": True}))
        reasons = [part["choices"][0]["finish_reason"] for part in parts]
        assert (set(reasons[:-1]) <= {None}, reasons[-1]) == (True, finish), reasons
        assert not any(part.get("usage") for part in parts), "nobody asked for it"
        last = events(post(s, path, body | USAGE))[-1]
        assert (last["choices"], last["usage"]) == ([], used), last


@row(
    "J9",
    "log probabilities are whole, where tools are called too",
    needs=Needs.HTTP,
    proof=Proof(
        "with tools there are none",
        patch="import gateway.rendering as r\n"
        "real = r.Renderer._choice\n"
        "def choice(self, answer, content, finish, scored, **how):\n"
        "    return real(self, answer, content, finish, () if self._may_call_tools else scored, **how)\n"
        "r.Renderer._choice = choice\n",
    ),
)
def j9(s: Setup) -> None:
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    ]
    asked = {"messages": MESSAGES[1:], "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    for more in (FIELDS, {"tools": tools, "tool_choice": "required", "max_tokens": 60}):
        choice = post(s, CHAT, asked | more).json()["choices"][0]
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) > 0
        chunks = [part["choices"][0] for part in events(post(s, CHAT, asked | more | {"stream": True}))]
        ids = [token for chunk in chunks for token in chunk["token_ids"]]
        told = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
        assert len(told) == len(ids) > 0
        if "tools" in more:
            assert choice["message"]["tool_calls"][0]["function"]["name"] == "f"


@row(
    "J10",
    "text is tokenized once, by the gateway: a node needs no tokenizer",
    proof=Proof(
        "nodes load one",
        patch="import pathlib, sys\n"
        "if 'decode' in sys.orig_argv:\n"
        "    folder = sys.orig_argv[sys.orig_argv.index('decode') + 1]\n"
        "    if not (pathlib.Path(folder) / 'tokenizer.json').exists():\n"
        "        raise SystemExit('no tokenizer')\n",
    ),
)
def j10(s: Setup) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder)
        for path in s.models.tiny.iterdir():
            if "token" not in path.name and "template" not in path.name:
                (bare / path.name).symlink_to(path)
        with joined(s, "decode", "bare", "--debug-checks", model=bare) as node:
            node.wait_for(r"(linked to prefill-0), plane")
            s.client.until(lambda: "bare" in node_ids(s), "it has joined")
            check_chat(s)
            check_all(s)
            assert s.client.metric("baton_node_steps_total", node="bare") > 0, "it was not asked"
    s.client.until(lambda: node_ids(s) == ["decode-0", "prefill-0"], "it has left")
