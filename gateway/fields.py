"""Fields that pydantic's own types do not describe: a check each, and what the OpenAPI page says of it.

Nothing is coerced. What a request has of them is said in openai_api.py.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema, model_validator

from gateway.errors import clipped

INT32_MAX = 2**31 - 1
MAX_PROMPTS = 1024  # requests that one call may start
MAX_STOPS = 4  # OpenAI's limit
MAX_STOP_CHARS = 1024
MAX_BIASED = 1024  # tokens with a logit bias
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")


class Strict(BaseModel):
    """An object of the API: no field that it does not have, and of no other type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _with_one_unknown(cls, value: Any) -> Any:
        """Keep one of many unknown fields: pydantic would collect an error for each of a million."""
        if type(value) is not dict or len(value) <= len(cls.model_fields):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next(name for name in value if name not in known)
        return {name: value[name] for name in (*(known & value.keys()), unknown)}


def _ids(value: list[Any]) -> bool:
    return set(map(type, value)) <= {int}  # a million of them: in C


def _prompts(value: Any) -> list[str | list[int]]:
    """Bring the four forms of a prompt into one: a list of texts and lists of token ids."""
    match value:
        case str():
            prompts: list[Any] = [value]
        case [int(), *_]:
            prompts = [value]
        case [_, *_]:
            prompts = value
        case []:
            raise ValueError("must not be empty")
        case _:
            raise ValueError("must be a string, a list of strings, or a list (of lists) of token ids")
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"more than {MAX_PROMPTS} prompts in one call")
    kind = type(prompts[0])
    for prompt in prompts:
        if type(prompt) is not kind or not (kind is str or (kind is list and _ids(prompt))):
            raise ValueError("must be a string, a list of strings, or a list (of lists) of token ids")
        if not prompt:
            raise ValueError("must not be empty")
    return prompts


def _stops(value: Any) -> list[str]:
    stops = [value] if type(value) is str else value
    if type(stops) is not list or len(stops) > MAX_STOPS or any(type(stop) is not str for stop in stops):
        raise ValueError(f"must be a string or a list of at most {MAX_STOPS} strings")
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"a stop string has 1 to {MAX_STOP_CHARS} characters")
    return stops


def _content(value: Any) -> str:
    """Join the text parts of a message."""
    if type(value) is str:
        return value
    if type(value) is not list:
        raise ValueError("must be a string or a list of text parts")
    for part in value:
        if type(part) is not dict or type(part.get("type")) is not str:
            raise ValueError("a content part is an object with a type")
        if part["type"] != "text":
            raise ValueError(f"content of type {clipped(part['type'])!r} is not supported")
        if part.keys() != {"type", "text"} or type(part["text"]) is not str:
            raise ValueError("a text part has the fields type and text, both strings")
    return "".join(part["text"] for part in value)


def _bias(value: Any) -> dict[int, float]:
    if type(value) is not dict or len(value) > MAX_BIASED:
        raise ValueError(f"must be an object with at most {MAX_BIASED} fields")
    for key, bias in value.items():
        if not _TOKEN_ID.fullmatch(key):
            raise ValueError(f"{clipped(key)!r} is no token id")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError("a bias is a number from -100 to 100")
    return {int(key): float(bias) for key, bias in value.items()}


_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_SEVERAL = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS}
_PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [_TEXT, _IDS, _SEVERAL | {"items": _TEXT}, _SEVERAL | {"items": _IDS}]
}
_STOP = _TEXT | {"maxLength": MAX_STOP_CHARS}
_STOP_SCHEMA: dict[str, Any] = {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]}
_BIAS = {"type": "number", "minimum": -100, "maximum": 100}
_BIAS_SCHEMA: dict[str, Any] = {
    "type": "object",
    "propertyNames": {"pattern": f"^({_TOKEN_ID.pattern})$"},
    "additionalProperties": _BIAS,
    "maxProperties": MAX_BIASED,
}
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_CONTENT_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}

Prompts = Annotated[list[str | list[int]], BeforeValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
Stops = Annotated[list[str], BeforeValidator(_stops), WithJsonSchema(_STOP_SCHEMA)]
Content = Annotated[str, BeforeValidator(_content), WithJsonSchema(_CONTENT_SCHEMA)]
Bias = Annotated[dict[int, float], BeforeValidator(_bias), WithJsonSchema(_BIAS_SCHEMA)]
