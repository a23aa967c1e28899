"""Check a call against the model and the nodes: its name, ids in range, prompt and answer fit.

Says what is wrong, by the field's name; submits nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.codec import IntArray
from common.errors import RequestRejected
from common.messages import int32s
from common.request import SamplingParams
from gateway.echo import Echo, Encoded
from gateway.limits import ModelLimits, resolve_max_tokens
from gateway.openai_api import CompletionRequest, GenerationRequest

MAX_PROMPT_LOGPROBS = 1 << 22  # that one answer may tell: some 75 bytes each


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that was checked, ready to be submitted."""

    ids: IntArray
    sampling: SamplingParams
    echo: Echo | None = None


def check_model(name: str, served: str) -> None:
    """Refuse another model than the served one.

    Raises:
        RequestRejected: 404.
    """
    if name != served:
        raise RequestRejected(
            f"the model does not exist; this server has {served!r}",
            status=404,
            code="model_not_found",
            param="model",
        )


def _check_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        raise RequestRejected(f"{param}: a token id is not within 0..{vocab_size - 1}", param=param)


def _check_prompt_logprobs(request: GenerationRequest, prompts: Sequence[Encoded]) -> None:
    asked = request.num_prompt_logprobs()
    if asked is None:
        return
    times = request.n if isinstance(request, CompletionRequest) else 1  # each choice tells them, as in vLLM
    if sum(len(prompt.ids) for prompt in prompts) * times * (asked + 1) > MAX_PROMPT_LOGPROBS:
        param = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
        raise RequestRejected(
            f"{param}: more than {MAX_PROMPT_LOGPROBS} log probabilities of prompts in one call", param=param
        )


def check_prompts(
    request: GenerationRequest,
    prompts: Sequence[Encoded],
    prompt_param: str,
    limits: ModelLimits,
    capacity_tokens: int | None,
) -> list[Prompt]:
    """Return the call's prompts with their sampling parameters; each gets the length that fits it.

    Raises:
        RequestRejected: one of them cannot be served; then none is.
    """
    _check_ids(request.stop_token_ids, limits.vocab_size, "stop_token_ids")
    _check_ids(tuple(request.logit_bias), limits.vocab_size, "logit_bias")
    _check_prompt_logprobs(request, prompts)
    length = request.length()
    checked = []
    for prompt in prompts:
        ids = prompt.ids
        if not ids:
            raise RequestRejected(f"{prompt_param}: the prompt has no tokens", param=prompt_param)
        _check_ids(ids, limits.vocab_size, prompt_param)
        max_tokens = resolve_max_tokens(len(ids), length, limits, capacity_tokens, prompt_param)
        if request.min_tokens > max_tokens:
            raise RequestRejected(
                f"min_tokens={request.min_tokens} is more than {length.param}={max_tokens}",
                param="min_tokens",
            )
        checked.append(Prompt(int32s(ids), request.sampling(max_tokens), prompt.echo))
    return checked
