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
from gateway.logprobs import chat_logprobs, completion_logprobs
from gateway.openai_api import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    parse_chat,
    parse_completion,
)
from gateway.text import TextPipeline
from gateway.token_text import TokenTexts
from gateway.unsupported import Table

Json = dict[str, Any]
Encode = Callable[[TextPipeline, int], list[list[int]]]  # with the context length; blocks: it tokenizes


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


def _read_completion(body: Json) -> tuple[GenerationRequest, Encode]:
    request = parse_completion(body)

    def encode(text: TextPipeline, context_length: int) -> list[list[int]]:
        # The four forms don't mix: all are texts or all are ids.
        texts = [prompt for prompt in request.prompt if isinstance(prompt, str)]
        text.check_length(texts, context_length, "prompt")
        ids = [prompt for prompt in request.prompt if not isinstance(prompt, str)]
        return ids or text.encode(texts, special_tokens=True)

    return request, encode


def _read_chat(body: Json) -> tuple[GenerationRequest, Encode]:
    request = parse_chat(body)

    def encode(text: TextPipeline, context_length: int) -> list[list[int]]:
        messages = [message.model_dump(exclude_none=True) for message in request.messages]
        # The template writes the special tokens itself.
        chat = text.render_chat(messages)
        text.check_length([chat], context_length, "messages")
        return text.encode([chat], special_tokens=False)

    return request, encode


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
)
