"""Requests for a load: prompts that share nothing, so that no cache helps, and when each is due.

The same for the same seed. Knows no server and no socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Most tokenizers have each of these as one token, with the space before it.
_WORDS = (
    *("the", "of", "and", "to", "in", "is", "was", "for", "on", "that", "with", "as", "by", "at", "from"),
    *("his", "her", "it", "an", "be", "this", "are", "which", "or", "had", "not", "but", "were", "have"),
    *("one", "all", "they", "you", "she", "he", "we", "there", "their", "been", "has", "who", "more"),
)
_FIRST_ID = 3  # the ids below are special in many vocabularies


@dataclass(frozen=True, slots=True)
class RequestMaker:
    """Writes the bodies of /v1/completions."""

    model: str
    vocab_size: int  # token ids of prompts are below
    is_text: bool  # prompts are words, about one token each
    asks_ids: bool  # the server is to send the ids of the tokens
    seed: int

    def body(self, prompt_tokens: int, output_tokens: int, number: int) -> dict[str, Any]:
        """Return the request with this number."""
        draw = np.random.default_rng((self.seed, prompt_tokens, number))
        prompt: str | list[int]
        if self.is_text:
            prompt = " ".join(_WORDS[i] for i in draw.integers(len(_WORDS), size=prompt_tokens))
        else:
            prompt = draw.integers(_FIRST_ID, self.vocab_size, size=prompt_tokens).tolist()
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        return body | ({"return_token_ids": True} if self.asks_ids else {})


def arrivals(num: int, rate: float, seed: int, *, is_even: bool = False) -> Sequence[float]:
    """Return when each of `num` requests is due, seconds from the begin, within num / rate seconds.

    Evenly, or as a Poisson process of which so many are known to come: that is, at independent random times.
    """
    if is_even:
        return [i / rate for i in range(num)]
    times: list[float] = np.sort(np.random.default_rng(seed).uniform(0, num / rate, num)).tolist()
    return times
