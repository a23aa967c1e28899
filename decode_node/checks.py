"""What a request may be on a decode node, over plain values.

The gateway checks all this too; a node does not trust it. Knows no queue and no pool: whether there is room
for a request now is not asked here.
"""

from __future__ import annotations

import numpy as np

from common.codec import IntArray
from common.messages import NODE_DRAINING
from common.request import MAX_PROMPT_LOGPROBS, Request
from decode_node.entry import RefusedOut, RequestKey

RETRY_AFTER_S = 1


def check_request(
    key: RequestKey, request: Request, *, vocab_size: int, most_tokens: int, most_choices: int
) -> RefusedOut | None:
    """Refuse what this node could never finish; None when it may be taken.

    `most_tokens`: of a prompt and max_tokens together.
    """
    if request.sampling.num_choices > most_choices:
        text = f"{request.sampling.num_choices} choices; the decode node has room for {most_choices}"
        return RefusedOut(key, 400, text, code="too_many_choices", param="n")
    if request.prompt_len < 1:
        return RefusedOut(key, 400, "the prompt is empty", param="prompt")
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab_size:
        return RefusedOut(key, 400, f"token ids go from 0 to {vocab_size - 1}", param="prompt")
    if max(request.sampling.stop_token_ids, default=0) >= vocab_size:
        return RefusedOut(key, 400, f"token ids go from 0 to {vocab_size - 1}", param="stop_token_ids")
    if (request.sampling.num_prompt_logprobs or 0) > vocab_size:
        return RefusedOut(key, 400, f"the vocabulary has {vocab_size} tokens", param="prompt_logprobs")
    if request.prompt_len * request.sampling.num_prompt_numbers > MAX_PROMPT_LOGPROBS:
        return RefusedOut(
            key,
            400,
            f"{request.prompt_len} prompt tokens, each with {request.sampling.num_prompt_numbers} log "
            f"probabilities, are more than {MAX_PROMPT_LOGPROBS}",
            param="prompt_logprobs",
        )
    if request.sampling.grammar is not None and (request.sampling.min_tokens or request.sampling.ignore_eos):
        param = "min_tokens" if request.sampling.min_tokens else "ignore_eos"
        return RefusedOut(key, 400, f"{param} and a grammar, which decides when the answer ends", param=param)
    if request.max_len > most_tokens:
        return RefusedOut(
            key,
            400,
            f"{request.prompt_len} prompt tokens and max_tokens {request.sampling.max_tokens} "
            f"are more than {most_tokens}",
            code="context_length_exceeded",
            param="max_tokens",
        )
    return None


def are_tokens(ids: IntArray, vocab_size: int) -> bool:
    """Say whether all are tokens of the vocabulary; a million of them are seen in a millisecond."""
    return not len(ids) or int(np.frombuffer(ids, np.uint32).max()) < vocab_size  # the negative are large


def node_is_draining(key: RequestKey) -> RefusedOut:
    """Send a request back to the gateway: it knows another decode node, or has its client come again."""
    text = "the decode node is about to leave"
    return RefusedOut(key, 503, text, code=NODE_DRAINING, retry_after_s=RETRY_AFTER_S)


def check_prefill(key: RequestKey, request: Request, longest_prompt: int | None) -> RefusedOut | None:
    """Refuse a prompt that nobody can compute; None when somebody can.

    `longest_prompt`: tokens that somebody can compute, None when nobody is there.
    """
    if longest_prompt is None:
        return RefusedOut(key, 503, "no prefill node is ready", retry_after_s=RETRY_AFTER_S)
    if request.prompt_len > longest_prompt:
        return RefusedOut(
            key,
            400,
            f"a prompt of {request.prompt_len} tokens; the prefill nodes hold {longest_prompt}",
            code="context_length_exceeded",
            param="prompt",
        )
    return None
