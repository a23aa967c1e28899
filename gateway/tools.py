"""The tools that a chat's answer may call: what a request says of them, and the grammar that holds it to it.

A call is written as Hermes models do (tool_calls.py reads it). `required` and a function by name are enforced
by a grammar, and so is `auto` where a function is strict or one call is the most. Parameters of a function
that is not strict are enforced as far as a grammar can.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from common.errors import RequestRejected
from common.request import Grammar
from gateway.errors import clipped
from gateway.fields import Strict
from gateway.schema_check import MAX_DEPTH, unenforceable
from gateway.structured import ANY_OBJECT, NAME_PATTERN, ResponseFormat, structural_tag
from gateway.tool_calls import CLOSE, OPEN

MAX_TOOLS = 128
MAX_WHITESPACE = 32  # characters in a row within the arguments, as the nodes allow in JSON
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class Function(Strict):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    description: str | None = None
    parameters: Annotated[
        dict[str, Any] | None, Field(description="a JSON schema; without one, it has none")
    ] = None
    strict: Annotated[
        bool | None,
        Field(description="calls keep to the schema with any tool_choice; 400 where that cannot be"),
    ] = None


class Tool(Strict):
    """A tool: a function."""

    type: Literal["function"]
    function: Function


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the answer calls tools, and which: a name goes with `required`."""

    mode: Literal["none", "auto", "required"]
    name: str | None = None


def _choice(value: Any) -> ToolChoice:
    match value:
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function", "function": {"name": str() as name, **others}, **more} if not others | {
            key: inside for key, inside in more.items() if key not in ("type", "function")
        }:
            return ToolChoice("required", name)
        case {"type": str() as kind} if kind != "function":
            raise ValueError(f"type {clipped(kind)!r} is not supported")
        case _:
            raise ValueError(
                'must be "none", "auto", "required", or {"type": "function", "function": {"name": ...}}'
            )


_NAMED = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "function"],
    "additionalProperties": False,
}
Choice = Annotated[
    ToolChoice,
    BeforeValidator(_choice),
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED]}),
]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a call that may use some, and how."""

    tools: tuple[Tool, ...]
    choice: ToolChoice
    parallel: bool

    def for_template(self) -> list[dict[str, Any]]:
        """Return the tools as a chat template reads them."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    def grammar(self, otherwise: ResponseFormat | None) -> Grammar | None:
        """Return what the answer must match; None: no more than the model wants.

        Args:
            otherwise: the form of an answer that calls nothing.

        Raises:
            RequestRejected: parameters of a strict function cannot be enforced, or it is too much in all.
        """
        schema = None if otherwise is None else otherwise.schema()
        if self.choice.mode == "required":
            return structural_tag(self._calls(), "tools")
        if schema is not None:
            if reason := unenforceable(schema):
                raise RequestRejected(
                    f"response_format: {reason}", param="response_format", code="invalid_grammar"
                )
            return structural_tag(
                {"type": "or", "elements": [self._calls(), _json(schema)]}, "response_format"
            )
        if self.parallel and not any(tool.function.strict for tool in self.tools):
            return None
        form = {
            "type": "triggered_tags",
            "triggers": [OPEN],
            "tags": self._tags(),
            "stop_after_first": not self.parallel,
        }
        return structural_tag(form, "tools")

    def _calls(self) -> dict[str, Any]:
        return {
            "type": "tags_with_separator",
            "tags": self._tags(),
            "separator": "\n",
            "at_least_one": True,
            "stop_after_first": not self.parallel or self.choice.name is not None,
        }

    def _tags(self) -> list[dict[str, Any]]:
        return [
            {
                "type": "tag",
                "begin": f'{OPEN}\n{{"name": {json.dumps(tool.function.name)}, "arguments": ',
                "content": _json(self._parameters(i, tool.function)),
                "end": "}\n" + CLOSE,
            }
            for i, tool in enumerate(self.tools)
            if self.choice.name in (None, tool.function.name)
        ]

    def _parameters(self, index: int, function: Function) -> dict[str, Any]:
        if function.parameters is None:
            return NO_PARAMETERS
        reason = unenforceable(function.parameters)
        if reason and function.strict:
            param = f"tools[{index}].function.parameters"
            raise RequestRejected(f"{param}: {reason}", param=param, code="invalid_grammar")
        if function.strict or self.choice.mode == "required":
            return function.parameters if _depth(function.parameters) <= MAX_DEPTH else ANY_OBJECT
        return ANY_OBJECT


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE}


def _depth(value: Any) -> int:
    if type(value) is dict:
        return 1 + max(map(_depth, value.values()), default=0)
    return 1 + max(map(_depth, value), default=0) if type(value) is list else 0


def tool_use(tools: list[Tool], choice: ToolChoice | None, parallel: bool | None) -> ToolUse | None:
    """Bring the three fields together; None: no tools are to be used.

    Raises:
        RequestRejected: they do not fit each other; the field is named.
    """
    names = [tool.function.name for tool in tools]
    if not names:
        if choice is not None and choice.mode == "required":
            raise RequestRejected("tool_choice needs tools", param="tool_choice")
        if parallel is False:
            raise RequestRejected("parallel_tool_calls needs tools", param="parallel_tool_calls")
        return None
    if len(set(names)) < len(names):
        raise RequestRejected("tools: two functions have one name", param="tools")
    choice = choice or ToolChoice("auto")
    if choice.name is not None and choice.name not in names:
        raise RequestRejected(f"tool_choice: no tool is called {clipped(choice.name)!r}", param="tool_choice")
    return None if choice.mode == "none" else ToolUse(tuple(tools), choice, parallel is not False)
