"""The requests of the OpenAI API: which fields there are, of which type and range. Strict, nothing coerced.

`parse_completion` and `parse_chat` turn a JSON object into a request or refuse it with the field's name. What
depends on the model (context length, vocabulary, chat template) is not decided here.
"""

from __future__ import annotations

import secrets
from functools import cached_property
from typing import Annotated, Any, TypeVar

from pydantic import FailFast, Field, ValidationError

from common.errors import RequestRejected
from common.request import MAX_CHOICES, MAX_LOGPROBS, U64_MAX, Grammar, LogitBias, SamplingParams
from gateway.errors import from_validation, unknown_field
from gateway.fields import INT32_MAX, MAX_PROMPTS, Bias, Prompts, Stops, Strict
from gateway.limits import COMPLETION_MAX_TOKENS, AnswerLength
from gateway.messages import Message
from gateway.structured import ResponseFormat, StructuredOutputs, exactly_one
from gateway.tools import MAX_TOOLS, Choice, Tool, ToolUse, tool_use
from gateway.unsupported import CHAT, COMPLETION, MESSAGE, Table, without_defaults

_NO_DEFAULTS: Table = {}


class StreamOptions(Strict):
    """What a stream tells beside the text."""

    include_usage: Annotated[bool, Field(description="a last chunk with the usage")] = False
    continuous_usage_stats: Annotated[bool, Field(description="each chunk has the usage so far")] = False
    # Padding against eavesdroppers; there is none, so both values are met.
    include_obfuscation: Annotated[bool, Field(description="changes nothing: there is none")] = True


class GenerationRequest(Strict):
    """What completions and chat have in common."""

    model: Annotated[str, Field(description="as `/v1/models` names it")]
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES, description="answers to each prompt")] = 1
    max_tokens: Annotated[
        int | None, Field(ge=1, le=INT32_MAX, description="by default the rest of the context")
    ] = None
    temperature: Annotated[float, Field(ge=0, le=2, description="0 takes the likeliest token")] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1, description="draw from the likeliest so much")] = 1.0
    top_k: Annotated[
        int, Field(ge=-1, le=INT32_MAX, description="draw from so many likeliest; 0 and -1: from all")
    ] = 0
    min_p: Annotated[
        float, Field(ge=0, le=1, description="draw from tokens at least so likely, of the likeliest one")
    ] = 0.0
    presence_penalty: Annotated[
        float, Field(ge=-2, le=2, description="against tokens that the answer has")
    ] = 0.0
    frequency_penalty: Annotated[
        float, Field(ge=-2, le=2, description="the same, each time that it has them")
    ] = 0.0
    repetition_penalty: Annotated[
        float, Field(ge=0.01, le=2, description="against tokens of prompt and answer")
    ] = 1.0
    logit_bias: Annotated[Bias, Field(description="by token id, added to its logit")] = {}
    seed: Annotated[
        int | None, Field(ge=-(2**63), le=2**63 - 1, description="the same seed draws the same tokens")
    ] = None
    stop: Annotated[Stops, Field(description="ends the answer, and is no part of it")] = []
    stop_token_ids: Annotated[
        list[int], Field(max_length=1024, description="tokens that end the answer, as EOS does"), FailFast()
    ] = []
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX, description="nothing ends it before")] = 0
    ignore_eos: Annotated[bool, Field(description="EOS does not end the answer")] = False
    structured_outputs: Annotated[
        StructuredOutputs | None, Field(description="what the answer must match, as in vLLM")
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Field(
            ge=0, le=MAX_LOGPROBS, description="log probabilities of the prompt, as in vLLM; not in a stream"
        ),
    ] = None
    return_token_ids: Annotated[bool, Field(description="ids of prompt and answer, see below")] = False
    timings: Annotated[bool, Field(description="where the time went, see below")] = False
    timeout: Annotated[
        float | None, Field(gt=0, description="seconds until 504; by default `--request-timeout`")
    ] = None
    user: Annotated[str | None, Field(description="a label; it changes nothing")] = None
    stream: Annotated[bool, Field(description="server-sent events, a chunk as tokens come")] = False
    stream_options: Annotated[StreamOptions | None, Field(description="needs `stream`")] = None

    def length(self) -> AnswerLength:
        """Return the wish for the answer's length."""
        return AnswerLength(self.max_tokens, "max_tokens", COMPLETION_MAX_TOKENS)

    def num_logprobs(self) -> int | None:
        """Return how many likeliest tokens to tell beside the drawn one; None: no log probabilities at all.

        Each endpoint has fields of its own for it.
        """
        return None

    def num_prompt_logprobs(self) -> int | None:
        """Return the same for the prompt's tokens."""
        return self.prompt_logprobs

    @cached_property
    def grammar(self) -> Grammar | None:
        """What the answer must match."""
        return None if self.structured_outputs is None else self.structured_outputs.to_grammar()

    @property
    def grammar_param(self) -> str:
        """The field that it came in."""
        return "structured_outputs"

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
            num_prompt_logprobs=self.num_prompt_logprobs(),
            num_choices=self.n,
            grammar=self.grammar,
        )


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: Annotated[Prompts, Field(description="one or several; texts, or token ids")]
    max_tokens: Annotated[
        int | None, Field(ge=0, le=INT32_MAX, description="by default 16; 0 needs echo")
    ] = None
    logprobs: Annotated[
        int | None, Field(ge=0, le=MAX_LOGPROBS, description="so many likeliest tokens at each place")
    ] = None
    echo: Annotated[bool, Field(description="the answer begins with the prompt, logprobs too")] = False

    def length(self) -> AnswerLength:
        """Return the wish for the answer's length; where 0 is wished for, a token is computed and dropped."""
        wish = 1 if self.max_tokens == 0 else self.max_tokens
        return AnswerLength(wish, "max_tokens", COMPLETION_MAX_TOKENS)

    def num_logprobs(self) -> int | None:
        """Return the field."""
        return self.logprobs

    def num_prompt_logprobs(self) -> int | None:
        """Return the larger of what two fields ask for."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((num for num in asked if num is not None), default=None)


class ChatRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, description="the chat so far"), FailFast()]
    max_completion_tokens: Annotated[
        int | None, Field(ge=1, le=INT32_MAX, description="by default the rest of the context")
    ] = None
    logprobs: Annotated[bool, Field(description="log probabilities of the answer's tokens")] = False
    top_logprobs: Annotated[
        int, Field(ge=0, le=MAX_LOGPROBS, description="likeliest tokens at each place; needs `logprobs`")
    ] = 0
    response_format: Annotated[
        ResponseFormat | None, Field(description="enforced, whatever the model wants")
    ] = None
    tools: Annotated[
        list[Tool], Field(max_length=MAX_TOOLS, description="functions that the model may call"), FailFast()
    ] = []
    tool_choice: Annotated[Choice | None, Field(description="by default `auto` where there are tools")] = None
    parallel_tool_calls: Annotated[bool | None, Field(description="false: one call at the most")] = None

    def length(self) -> AnswerLength:
        """Return the wish for the answer's length, by default the rest of the context."""
        if self.max_completion_tokens is not None:
            return AnswerLength(self.max_completion_tokens, "max_completion_tokens", None)
        return AnswerLength(self.max_tokens, "max_tokens", None)

    def num_logprobs(self) -> int | None:
        """Return the two fields as one number."""
        return self.top_logprobs if self.logprobs else None

    @cached_property
    def tool_use(self) -> ToolUse | None:
        """The tools that the answer may call."""
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    @cached_property
    def grammar(self) -> Grammar | None:
        """What the answer must match."""
        if self.structured_outputs is not None:
            return self.structured_outputs.to_grammar()
        if self.tool_use is not None:
            return self.tool_use.grammar(self.response_format)
        return None if self.response_format is None else self.response_format.grammar()

    @property
    def grammar_param(self) -> str:
        """The field that it came in."""
        if self.structured_outputs is not None:
            return "structured_outputs"
        return "response_format" if self.tool_use is None else "tools"


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
    if request.stream and request.prompt_logprobs is not None:
        raise RequestRejected("prompt_logprobs are not told in a stream", param="prompt_logprobs")
    if request.structured_outputs is not None:
        exactly_one(request.structured_outputs)
    return request


def _check_grammar_fields(request: GenerationRequest) -> None:
    """Refuse what would keep an answer from its end, or end it elsewhere; a grammar that is too much."""
    if request.grammar is None:
        return
    for name in ("min_tokens", "ignore_eos"):
        if getattr(request, name):
            raise RequestRejected(f"{name} cannot be used with {request.grammar_param}", param=name)


def parse_completion(body: dict[str, Any]) -> CompletionRequest:
    """Check the body of a completion.

    Raises:
        RequestRejected: the first field that is wrong, unknown or not supported.
    """
    request = _parse(CompletionRequest, without_defaults(body, COMPLETION))
    if request.max_tokens == 0 and not request.echo:
        raise RequestRejected("max_tokens is at least 1 without echo", param="max_tokens")
    if len(request.prompt) * request.n > MAX_PROMPTS:
        raise RequestRejected(f"more than {MAX_PROMPTS} answers in one call", param="n")
    _check_grammar_fields(request)
    return request


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
    for i, message in enumerate(request.messages):
        message.check(f"messages[{i}]")
    if request.structured_outputs is not None:
        for name, other in (("response_format", request.response_format), ("tools", request.tool_use)):
            if other is not None:
                raise RequestRejected(
                    f"structured_outputs cannot be used with {name}", param="structured_outputs"
                )
    _check_grammar_fields(request)
    return request
