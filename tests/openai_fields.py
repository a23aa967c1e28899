"""The fields of the official client's own types: what "the OpenAI API" means in tests and in docs/api.md."""

from __future__ import annotations

from typing import Any

from openai.types import chat, completion_create_params, shared_params
from openai.types.chat import completion_create_params as chat_create_params


def names(typed_dict: Any) -> frozenset[str]:
    """Return the fields of a TypedDict, inherited ones too."""
    return frozenset(typed_dict.__annotations__)


def _of(module: Any) -> frozenset[str]:
    return names(module.CompletionCreateParamsNonStreaming) | names(module.CompletionCreateParamsStreaming)


COMPLETION = _of(completion_create_params)
CHAT = _of(chat_create_params)
BY_PATH = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}
STREAM_OPTIONS = names(chat.ChatCompletionStreamOptionsParam)
MESSAGES = {
    "system": names(chat.ChatCompletionSystemMessageParam),
    "developer": names(chat.ChatCompletionDeveloperMessageParam),
    "user": names(chat.ChatCompletionUserMessageParam),
    "assistant": names(chat.ChatCompletionAssistantMessageParam),
    "tool": names(chat.ChatCompletionToolMessageParam),
    "function": names(chat.ChatCompletionFunctionMessageParam),
}


def of_parts() -> frozenset[str]:
    """Return every field of every object that a request may hold."""
    modules = (
        chat,
        chat_create_params,
        chat.chat_completion_message_function_tool_call_param,
        shared_params,
        shared_params.response_format_json_schema,
    )
    kinds = {
        kind for module in modules for kind in vars(module).values() if hasattr(kind, "__required_keys__")
    }
    return frozenset().union(*(names(kind) for kind in kinds))
