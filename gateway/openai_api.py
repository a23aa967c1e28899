"""The requests of the OpenAI API: which fields there are, of which type and range. Strict, nothing coerced.

`parse_completion` and `parse_chat` turn a JSON object into a request or refuse it with the field's name. What
depends on the model (context length, vocabulary, chat template) is not decided here.
"""

from __future__ import annotations

import re
import secrets
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError, WithJsonSchema

from common.errors import RequestRejected
from common.request import MAX_LOGPROBS, U64_MAX, LogitBias, SamplingParams
from gateway.errors import clipped, from_validation, unknown_field
from gateway.limits import COMPLETION_MAX_TOKENS, AnswerLength
from gateway.unsupported import CHAT, COMPLETION, MESSAGE, Table, without_defaults

INT32_MAX = 2**31 - 1
MAX_PROMPTS = 1024  # requests that one call may start
MAX_STOPS = 4  # OpenAI's limit
MAX_STOP_CHARS = 1024
MAX_BIASED = 1024  # tokens with a logit bias
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
_NO_DEFAULTS: Table = {}


def _ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


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


# What the OpenAPI page says of the fields that the functions above check.
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


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Strict):
    """What a stream tells beside the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = True  # padding against eavesdroppers; there is none, so both values are met


class Message(_Strict):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content), WithJsonSchema(_CONTENT_SCHEMA)]
    name: str | None = None


class GenerationRequest(_Strict):
    """What completions and chat have in common."""

    model: str
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] = 1.0  # not OpenAI's; as in vLLM and SGLang
    logit_bias: Annotated[dict[int, float], BeforeValidator(_bias), WithJsonSchema(_BIAS_SCHEMA)] = {}
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stops), WithJsonSchema(_STOP_SCHEMA)] = []
    stop_token_ids: Annotated[list[int], Field(max_length=1024), FailFast()] = []
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    ignore_eos: bool = False
    return_token_ids: bool = False
    timings: bool = False
    timeout: Annotated[float, Field(gt=0)] | None = None  # seconds
    user: str | None = None  # a label; it changes nothing
    stream: bool = False
    stream_options: StreamOptions | None = None

    def length(self) -> AnswerLength:
        """Return the wish for the answer's length."""
        return AnswerLength(self.max_tokens, "max_tokens", COMPLETION_MAX_TOKENS)

    def num_logprobs(self) -> int | None:
        """Return how many likeliest tokens to tell beside the drawn one; None: no log probabilities at all.

        Each endpoint has fields of its own for it.
        """
        return None

    def sampling(self, max_tokens: int) -> SamplingParams:
        """Return the sampling parameters, with a seed drawn where the client gave none."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=max(self.top_k, 0),  # -1 is off, as in vLLM
            top_p=self.top_p,
            min_p=self.min_p,
            seed=secrets.randbits(64) if self.seed is None else self.seed & U64_MAX,
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple(LogitBias(token, bias) for token, bias in self.logit_bias.items()),
            num_logprobs=self.num_logprobs(),
        )


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    def num_logprobs(self) -> int | None:
        """Return the field."""
        return self.logprobs


class ChatRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0

    def length(self) -> AnswerLength:
        """Return the wish for the answer's length, by default the rest of the context."""
        if self.max_completion_tokens is not None:
            return AnswerLength(self.max_completion_tokens, "max_completion_tokens", None)
        return AnswerLength(self.max_tokens, "max_tokens", None)

    def num_logprobs(self) -> int | None:
        """Return the two fields as one number."""
        return self.top_logprobs if self.logprobs else None


R = TypeVar("R", bound=GenerationRequest)


def _parse(kind: type[R], fields: dict[str, Any]) -> R:
    # Before pydantic, which would collect an error for each of a million unknown fields.
    for name in fields:
        if name not in kind.model_fields:
            raise unknown_field(name)
    options = fields.get("stream_options")
    if type(options) is dict:
        fields["stream_options"] = without_defaults(options, _NO_DEFAULTS)
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error) from None
    if request.stream_options is not None and not request.stream:
        raise RequestRejected("stream_options needs stream to be true", param="stream_options")
    return request


def parse_completion(body: dict[str, Any]) -> CompletionRequest:
    """Check the body of a completion.

    Raises:
        RequestRejected: the first field that is wrong, unknown or not supported.
    """
    return _parse(CompletionRequest, without_defaults(body, COMPLETION))


def parse_chat(body: dict[str, Any]) -> ChatRequest:
    """Check the body of a chat completion.

    Raises:
        RequestRejected: the first field that is wrong, unknown or not supported.
    """
    fields = without_defaults(body, CHAT)
    messages = fields.get("messages")
    if type(messages) is list:
        fields["messages"] = [
            without_defaults(message, MESSAGE, f"messages[{i}].") if type(message) is dict else message
            for i, message in enumerate(messages)
        ]
    request = _parse(ChatRequest, fields)
    if request.max_completion_tokens is not None and request.max_tokens not in (
        None,
        request.max_completion_tokens,
    ):
        raise RequestRejected(
            "max_tokens and max_completion_tokens are both given and differ", param="max_tokens"
        )
    if request.top_logprobs and not request.logprobs:
        raise RequestRejected("top_logprobs needs logprobs to be true", param="top_logprobs")
    return request
