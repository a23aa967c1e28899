"""How long a prompt and its answer may be: the model's context, and what a decode node's pool can hold.

Knows numbers only; what a field is called in the request comes from the caller.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import RequestRejected

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the gateway has to know about the model's weights."""

    context_length: int  # tokens, prompt and answer together
    vocab_size: int


@dataclass(frozen=True, slots=True)
class AnswerLength:
    """The client's wish for the length of an answer, with the field it came in.

    `max_tokens` None takes `default_max_tokens`, clipped to what fits; None there as well means all the rest.
    """

    max_tokens: int | None
    param: str
    default_max_tokens: int | None


def resolve_max_tokens(
    num_prompt: int, length: AnswerLength, limits: ModelLimits, capacity_tokens: int | None, prompt_param: str
) -> int:
    """Return how many tokens the answer to a prompt may have, at least 1.

    Raises:
        RequestRejected: the prompt, or the length asked for, does not fit.
    """
    room = limits.context_length
    what = f"the model's context of {limits.context_length} tokens"
    if capacity_tokens is not None and capacity_tokens < room:
        room = capacity_tokens
        what = f"this server's KV pool of {capacity_tokens} tokens"
    if num_prompt + 1 > room:
        raise RequestRejected(
            f"the prompt has {num_prompt} tokens; with at least 1 token of answer that is more than {what}",
            code="context_length_exceeded",
            param=prompt_param,
        )
    left = room - num_prompt
    if length.max_tokens is None:
        return left if length.default_max_tokens is None else min(length.default_max_tokens, left)
    if length.max_tokens > left:
        raise RequestRejected(
            f"{num_prompt} tokens of prompt and {length.param}={length.max_tokens} are more than {what}",
            code="context_length_exceeded",
            param=length.param,
        )
    return length.max_tokens
