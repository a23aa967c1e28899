"""Log probabilities of an answer's tokens -> the two shapes that the OpenAI API has for them.

Pure; which tokens there are, and where their text begins, is decided in answer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.answer import ScoredToken
from gateway.token_text import TokenTexts


def completion_logprobs(scored: Sequence[ScoredToken], texts: TokenTexts) -> dict[str, Any]:
    """Return `logprobs` of a choice of /v1/completions."""
    return {
        "tokens": [texts.of(token.token_id).text for token in scored],
        "token_logprobs": [token.logprobs.logprob for token in scored],
        "top_logprobs": [_by_text(token, texts) for token in scored],
        "text_offset": [token.text_offset for token in scored],
    }


def chat_logprobs(scored: Sequence[ScoredToken], texts: TokenTexts) -> dict[str, Any]:
    """Return `logprobs` of a choice of /v1/chat/completions."""
    content = [
        _entry(token.token_id, token.logprobs.logprob, texts)
        | {"top_logprobs": [_entry(token_id, logprob, texts) for token_id, logprob in _likeliest(token)]}
        for token in scored
    ]
    return {"content": content, "refusal": None}


def _likeliest(token: ScoredToken) -> list[tuple[int, float]]:
    return list(zip(token.logprobs.top_ids, token.logprobs.top_logprobs, strict=True))


def _by_text(token: ScoredToken, texts: TokenTexts) -> dict[str, float]:
    """Return the likeliest tokens by their texts, and the drawn one whether it is among them or not.

    Where several have one text (parts of characters), it stands for the drawn one, or else the likeliest.
    """
    by_text: dict[str, float] = {}
    for token_id, logprob in _likeliest(token):
        by_text.setdefault(texts.of(token_id).text, logprob)
    by_text[texts.of(token.token_id).text] = token.logprobs.logprob
    return by_text


def _entry(token_id: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    token = texts.of(token_id)
    return {"token": token.text, "logprob": logprob, "bytes": list(token.raw)}
