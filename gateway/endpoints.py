"""What differs between /v1/completions and /v1/chat/completions, as two values of one dataclass.

How to read a request and how an answer looks in JSON; how it is computed and sent is the same for both
(`generation.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gateway import unsupported
from gateway.answer import ScoredToken
from gateway.echo import Encoded, echo_of
from gateway.logprobs import chat_logprobs, completion_logprobs
from gateway.openai_api import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    parse_chat,
    parse_completion,
)
from gateway.structured import check_grammar
from gateway.text import TextPipeline
from gateway.token_text import TokenTexts
from gateway.unsupported import Table

Json = dict[str, Any]
# With the context length; blocks: it tokenizes, and has the grammar checked.
Encode = Callable[[TextPipeline, int], list[Encoded]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One way to ask for tokens."""

    path: str
    request_type: type[GenerationRequest]
    unsupported: Table  # what the API documents and is not done here
    id_prefix: str
    prompt_param: str  # the field that errors about the prompt name
    body_object: str
    chunk_object: str
    parse: Callable[[Json], tuple[GenerationRequest, Encode]]
    choice: Callable[[str], Json]  # the text of a whole answer -> its part of a choice
    opening: Json | None  # what a choice's stream begins with, before any text
    delta: Callable[[str], Json]  # more text -> its part of a chunk's choice
    logprobs: Callable[[Sequence[ScoredToken], TokenTexts], Json]
    prompt_logprobs_in_choice: bool  # rather than in the body, as vLLM has it


def _read_completion(body: Json) -> tuple[GenerationRequest, Encode]:
    request = parse_completion(body)

    def encode(text: TextPipeline, context_length: int) -> list[Encoded]:
        _check_grammar(request)
        # The four forms don't mix: all are texts or all are ids.
        texts = [prompt for prompt in request.prompt if isinstance(prompt, str)]
        text.check_length(texts, context_length, "prompt")
        given = [prompt for prompt in request.prompt if not isinstance(prompt, str)]
        ids = given or text.encode(texts, special_tokens=True)
        if not request.echo:
            return [Encoded(each) for each in ids]
        shown: Sequence[str | None] = texts or [None] * len(ids)
        # What does not fit is refused later; nothing is read of it.
        return [
            Encoded(each, echo_of(each[:context_length], one, text))
            for each, one in zip(ids, shown, strict=True)
        ]

    return request, encode


def _read_chat(body: Json) -> tuple[GenerationRequest, Encode]:
    request = parse_chat(body)

    def encode(text: TextPipeline, context_length: int) -> list[Encoded]:
        _check_grammar(request)
        messages = [message.for_template() for message in request.messages]
        # The template writes the special tokens itself.
        tools = None if request.tool_use is None else request.tool_use.for_template()
        chat = text.render_chat(messages, tools)
        text.check_length([chat], context_length, "messages")
        return [Encoded(ids) for ids in text.encode([chat], special_tokens=False)]

    return request, encode


def _check_grammar(request: GenerationRequest) -> None:
    if request.grammar is not None:
        check_grammar(request.grammar, request.grammar_param)


COMPLETIONS = Endpoint(
    path="/v1/completions",
    request_type=CompletionRequest,
    unsupported=unsupported.COMPLETION,
    id_prefix="cmpl-",
    prompt_param="prompt",
    body_object="text_completion",
    chunk_object="text_completion",
    parse=_read_completion,
    choice=lambda text: {"text": text},
    opening=None,
    delta=lambda text: {"text": text},
    logprobs=completion_logprobs,
    prompt_logprobs_in_choice=True,
)
CHAT = Endpoint(
    path="/v1/chat/completions",
    request_type=ChatRequest,
    unsupported=unsupported.CHAT,
    id_prefix="chatcmpl-",
    prompt_param="messages",
    body_object="chat.completion",
    chunk_object="chat.completion.chunk",
    parse=_read_chat,
    choice=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    opening={"delta": {"role": "assistant", "content": ""}},
    delta=lambda text: {"delta": {"content": text} if text else {}},
    logprobs=chat_logprobs,
    prompt_logprobs_in_choice=False,
)
