"""HTTP bodies: a request that a node can be sent, or an error object with a status of the client's own fault.

From the body's bytes to the `Submit` of each prompt, without a server: parsed, rendered, tokenized, checked.
What was accepted must survive the wire: a node rejects what does not.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.codec import Envelope
from common.errors import RequestRejected
from common.messages import CODEC, Submit
from fuzz.mutation import changed_bytes, changed_tree
from gateway.body import parse_object
from gateway.endpoints import CHAT, COMPLETIONS, Endpoint
from gateway.errors import ErrorBody
from gateway.limits import ModelLimits
from gateway.prompts import check_model, check_prompts
from gateway.reply import error_response
from gateway.text import TextPipeline
from gateway.unsupported import CHAT as CHAT_TABLE
from gateway.unsupported import COMPLETION as COMPLETION_TABLE
from gateway.unsupported import MESSAGE as MESSAGE_TABLE

MAX_BYTES = 4096
MODEL = "tiny"
CAPACITY_TOKENS = 256
_ENDPOINTS = (COMPLETIONS, CHAT)  # the first byte of an input chooses
_COMMON: dict[str, Any] = {
    "model": MODEL, "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1,
    "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "logit_bias": {"5": -100},
    "seed": 7, "stop": ["x", "yz"], "stop_token_ids": [3], "min_tokens": 1, "ignore_eos": True,
    "return_token_ids": True, "timings": True, "timeout": 1.5, "user": "u", "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": False, "include_obfuscation": True},
}  # fmt: skip
_CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "name": "n",
        },
    ],
    "logprobs": True,
    "top_logprobs": 2,
    "max_completion_tokens": 5,
}
_SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_STRUCTURES: tuple[dict[str, Any], ...] = (
    {"json": _SCHEMA}, {"json": '{"enum": [1]}'}, {"regex": "[a-c]{2}"}, {"choice": ["a", "b"]},
    {"json_object": True}, {"grammar": 'root ::= "a"'},
    {"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}},
)  # fmt: skip
_TOOL = {"type": "function", "function": {"name": "f", "parameters": _SCHEMA, "strict": True}}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_TOOLS: tuple[dict[str, Any], ...] = (
    {"tools": [_TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}},
    {"response_format": {"type": "json_object"}, "tools": [_TOOL]},
    {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "b"}]},
        ]
    },
)
# What JSON can say; NaN and Infinity it cannot, but Python writes them.
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, -(2**63), 10**40, 0.0, 0.5, -0.5, 1e-300, 1e300, 1e-9,
    float("nan"), float("inf"), "", "stop", "\ud800", "\0", "é", "\U0001f600" * 20, "x" * 2000, [], [1], [-1],
    [[]], [[1]], ["a", 1], [319, 320], [None], {}, {"a": 1}, {"1": 1, "01": 2}, {"type": "text"},
)  # fmt: skip


def seeds() -> list[bytes]:
    """Each field alone and all together, in every form of a prompt; each documented field that is refused."""
    bodies: list[tuple[int, dict[str, Any]]] = []
    for prompt in ("the quick", ["a", "b"], [5, 6, 7], [[5], [6, 7]]):
        bodies.append((0, {"model": MODEL, "prompt": prompt}))
    bodies.append((0, _COMMON | {"prompt": "the", "logprobs": 3}))
    bodies.append((1, _COMMON | _CHAT))
    bodies += [(0, {"model": MODEL, "prompt": "a", name: _COMMON[name]}) for name in _COMMON]
    bodies += [(0, {"model": MODEL, "prompt": "a", name: 1}) for name in COMPLETION_TABLE]
    messages = [{"role": "user", "content": "hi"}]
    bodies += [(0, {"model": MODEL, "prompt": "a", "structured_outputs": each}) for each in _STRUCTURES]
    scored = {"echo": True, "max_tokens": 0, "n": 2, "prompt_logprobs": 1}
    bodies += [(0, {"model": MODEL, "prompt": prompt} | scored) for prompt in (["a", "b"], [5, 6])]
    bodies += [(1, {"model": MODEL, "messages": messages} | each) for each in _TOOLS]
    bodies += [(1, {"model": MODEL, "messages": messages, name: [1]}) for name in CHAT_TABLE]
    bodies += [(1, {"model": MODEL, "messages": [messages[0] | {name: 1}]}) for name in MESSAGE_TABLE]
    return [bytes((which,)) + json.dumps(body).encode() for which, body in bodies]


def runner(folder: Path | None = None) -> Callable[[bytes], str]:
    """Return the target, with the tokenizer of a model folder, or of one that is made for it."""
    if folder is not None:
        return _runner(TextPipeline.load(folder))
    from tests.tiny import write_tiny_model

    with tempfile.TemporaryDirectory() as made:
        return _runner(TextPipeline.load(write_tiny_model(Path(made) / "tiny")))


def _runner(text: TextPipeline) -> Callable[[bytes], str]:
    limits = ModelLimits(context_length=512, vocab_size=320)

    def accept(endpoint: Endpoint, body: bytes) -> int:
        request, encode = endpoint.parse(parse_object(body))
        check_model(request.model, MODEL)
        ids = encode(text, limits.context_length)
        prompts = check_prompts(request, ids, endpoint.prompt_param, limits, CAPACITY_TOKENS)
        for number, prompt in enumerate(prompts, 1):
            assert len(prompt.ids) + prompt.sampling.max_tokens <= CAPACITY_TOKENS
            envelope = Envelope(1, number, Submit(number, prompt.sampling, prompt.ids))
            assert CODEC.decode([bytes(frame) for frame in CODEC.encode(envelope)]) == envelope
        return len(prompts)

    def run(data: bytes) -> str:
        endpoint = _ENDPOINTS[data[0] % 2] if data else COMPLETIONS
        try:
            return f"{endpoint.path} {min(2, accept(endpoint, data[1:]))}"
        except RequestRejected as error:
            if not 400 <= error.status < 500:
                raise
            response = error_response(error)
            shown = ErrorBody.model_validate_json(bytes(response.body)).error
            assert shown.message.isprintable(), shown.message
            assert len(response.body) < 4096
            return f"{endpoint.path} {error.status} {re.sub(r'[0-9]+', '_', str(error.param))} {error.code}"

    return run


def mutate(data: bytes, draw: random.Random) -> bytes:
    """Change a value of the JSON, or some bytes of it."""
    if not data or draw.random() < 0.02:
        return bytes((draw.randrange(2),)) + data[1:]
    if draw.random() < 0.7:
        try:
            tree = changed_tree(json.loads(data[1:]), draw, _VALUES)
            return data[:1] + json.dumps(tree, ensure_ascii=draw.random() < 0.5).encode(
                "utf-8", "surrogatepass"
            )
        except (ValueError, TypeError, RecursionError):
            pass
    return data[:1] + changed_bytes(data[1:], draw)
