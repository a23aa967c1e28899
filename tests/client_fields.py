"""A value for every field of the official client's two create calls, with what it must bring about.

`uses(path)` are the fields that the server has; what a field does is seen in the sampling parameters and the
prompt that reach the nodes, or in the answer. `REFUSED` has a value for each of the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common.request import GrammarKind, LogitBias, SamplingParams

Json = dict[str, Any]
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
LABEL = "a label: it is taken, and changes nothing"


@dataclass(frozen=True, slots=True)
class Seen:
    """What became of a call: at the nodes, and as its answer."""

    sampling: SamplingParams
    prompt_text: str
    body: (
        Json  # the whole answer; of a stream, its chunks are in `chunks` and this has the first choice alone
    )
    chunks: list[Json] | None = None


@dataclass(frozen=True, slots=True)
class Use:
    """A field's value, the fields that it needs beside it, and its effect (a text: why there is none)."""

    value: Any
    effect: Callable[[Seen], bool] | str
    also: Json = field(default_factory=dict)


def _sampling(name: str, value: Any, at_the_nodes: Any = None) -> Use:
    expected = value if at_the_nodes is None else at_the_nodes
    return Use(value, lambda seen: bool(getattr(seen.sampling, name) == expected))


def _has_grammar(kind: GrammarKind) -> Callable[[Seen], bool]:
    return lambda seen: seen.sampling.grammar is not None and seen.sampling.grammar.kind is kind


def _has_usage(seen: Seen) -> bool:
    return seen.chunks is not None and seen.chunks[-1]["usage"] is not None


STREAM = {"stream": True}
COMMON = {
    "model": Use(None, "every call has it"),
    "frequency_penalty": _sampling("frequency_penalty", 0.5),
    "logit_bias": _sampling("logit_bias", {"7": 1.5}, (LogitBias(7, 1.5),)),
    "max_tokens": _sampling("max_tokens", 5),
    "n": Use(2, lambda seen: {c["index"] for c in _choices(seen)} == {0, 1}),
    "presence_penalty": _sampling("presence_penalty", -0.5),
    "seed": _sampling("seed", 11),
    "stop": Use(["over"], lambda seen: _text(seen).endswith("jumps ")),
    "stream": Use(True, lambda seen: seen.chunks is not None and len(seen.chunks) > 2),
    "stream_options": Use({"include_usage": True, "include_obfuscation": False}, _has_usage, STREAM),
    "temperature": _sampling("temperature", 0.25),
    "top_p": _sampling("top_p", 0.5),
    "user": Use("somebody", LABEL),
}
COMPLETION = COMMON | {
    "prompt": Use(None, "every call has it"),
    "echo": Use(True, lambda seen: _text(seen).startswith(seen.prompt_text)),
    "logprobs": Use(2, lambda seen: any(len(c["logprobs"]["top_logprobs"][0]) == 2 for c in _scored(seen))),
}
CHAT = COMMON | {
    "messages": Use(None, "every call has it"),
    "logprobs": Use(
        True, lambda seen: any(c["logprobs"]["content"][0]["logprob"] < 0 for c in _scored(seen))
    ),
    "max_completion_tokens": _sampling("max_tokens", 4),
    "top_logprobs": Use(
        3,
        lambda seen: any(len(c["logprobs"]["content"][0]["top_logprobs"]) == 3 for c in _scored(seen)),
        {"logprobs": True},
    ),
    "response_format": Use(
        {"type": "json_schema", "json_schema": {"name": "age", "schema": SCHEMA, "strict": True}},
        _has_grammar(GrammarKind.JSON_SCHEMA),
    ),
    "tools": Use([TOOL], lambda seen: "weather" in seen.prompt_text),
    "tool_choice": Use("required", lambda seen: seen.sampling.grammar is not None, {"tools": [TOOL]}),
    "parallel_tool_calls": Use(
        False,
        lambda seen: seen.sampling.grammar is not None,
        {"tools": [TOOL], "tool_choice": "required"},
    ),
}
USES = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}
# A value that asks for something, for what the server does not do.
REFUSED: Json = {
    "audio": {"voice": "ash", "format": "wav"},
    "best_of": 2,
    "echo": True,
    "function_call": {"name": "weather"},
    "functions": [TOOL["function"]],
    "metadata": {"topic": "relay"},
    "modalities": ["text", "audio"],
    "moderation": {"model": "omni-moderation-latest"},
    "n": 2,
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "fox"},
    "prompt_cache_key": "key",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
    "safety_identifier": "somebody",
    "service_tier": "flex",
    "store": True,
    "suffix": "the end",
    "tool_choice": "required",
    "tools": [TOOL],
    "verbosity": "low",
    "web_search_options": {"search_context_size": "low"},
}


def _choices(seen: Seen) -> list[Json]:
    parts = [seen.body] if seen.chunks is None else seen.chunks
    return [choice for part in parts for choice in part["choices"]]


def _scored(seen: Seen) -> list[Json]:
    return [choice for choice in _choices(seen) if choice.get("logprobs")]


def _text(seen: Seen) -> str:
    """Return the text of the first choice."""
    texts = []
    for choice in _choices(seen):
        if choice["index"] == 0:
            inside = choice.get("message") or choice.get("delta") or choice
            texts.append(inside.get("content") or inside.get("text") or "")
    return "".join(texts)


def comparable(body: Json) -> str:
    """Return an answer without what differs from call to call."""
    return json.dumps({name: value for name, value in body.items() if name not in ("id", "created")})
