"""Log probabilities of tokens -> the shapes that the OpenAI API has for an answer's, and vLLM for a prompt's.

Pure; which tokens there are, and where their text begins, is decided in answer.py and echo.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any

from common.request import TokenLogprobs
from gateway.answer import ScoredToken
from gateway.rows import Rows
from gateway.token_text import TokenTexts

Json = dict[str, Any]


def completion_logprobs(scored: Sequence[ScoredToken], texts: TokenTexts) -> Json:
    """Return `logprobs` of a choice of /v1/completions."""
    return {
        "tokens": [texts.of(token.token_id).text for token in scored],
        "token_logprobs": [token.logprobs.logprob for token in scored],
        "top_logprobs": [_by_text(token.token_id, token.logprobs, texts) for token in scored],
        "text_offset": [token.text_offset for token in scored],
    }


def echoed_logprobs(
    prompt: Sequence[int],
    offsets: Sequence[int],
    scores: Sequence[TokenLogprobs],
    num: int,
    texts: TokenTexts,
) -> dict[str, Iterable[Any]]:
    """Return the same for a prompt, each list as it is read; nothing is known of the first token.

    Args:
        prompt: its token ids.
        offsets: where the text of each begins.
        scores: of all but the first.
        num: likeliest tokens to tell, no more than there are.
    """
    scored = zip(islice(prompt, 1, None), scores, strict=True)
    return {
        "tokens": (texts.of(token_id).text for token_id in prompt),
        "token_logprobs": chain([None], (score.logprob for score in scores)),
        "top_logprobs": chain([None], (_by_text(token, score, texts, num) for token, score in scored)),
        "text_offset": offsets,
    }


def prompt_logprobs(
    prompt: Sequence[int], scores: Sequence[TokenLogprobs], num: int, texts: TokenTexts
) -> Rows:
    """Return vLLM's `prompt_logprobs`; a token's rank is null where it is not among the likeliest."""
    scored = zip(islice(prompt, 1, None), scores, strict=True)
    return Rows([None], (_ranked(token, score, num, texts) for token, score in scored))


def chat_logprobs(scored: Sequence[ScoredToken], texts: TokenTexts) -> Json:
    """Return `logprobs` of a choice of /v1/chat/completions."""
    content = [
        _entry(token.token_id, token.logprobs.logprob, texts)
        | {
            "top_logprobs": [
                _entry(token_id, logprob, texts) for token_id, logprob in _likeliest(token.logprobs)
            ]
        }
        for token in scored
    ]
    return {"content": content, "refusal": None}


def _likeliest(score: TokenLogprobs, num: int | None = None) -> list[tuple[int, float]]:
    return list(zip(score.top_ids, score.top_logprobs, strict=True))[:num]


def _by_text(
    token_id: int, score: TokenLogprobs, texts: TokenTexts, num: int | None = None
) -> dict[str, float]:
    """Return the likeliest tokens by their texts, and the drawn one whether it is among them or not.

    Where several have one text (parts of characters), it stands for the drawn one, or else the likeliest.
    """
    by_text: dict[str, float] = {}
    for other, logprob in _likeliest(score, num):
        by_text.setdefault(texts.of(other).text, logprob)
    by_text[texts.of(token_id).text] = score.logprob
    return by_text


def _ranked(token_id: int, score: TokenLogprobs, num: int, texts: TokenTexts) -> Json:
    ranks = {other: rank for rank, other in enumerate(score.top_ids, 1)}
    own = {token_id: score.logprob}
    told = own | dict(_likeliest(score, num)) | own  # itself first
    return {
        str(other): {"logprob": logprob, "rank": ranks.get(other), "decoded_token": texts.of(other).text}
        for other, logprob in told.items()
    }


def _entry(token_id: int, logprob: float, texts: TokenTexts) -> Json:
    token = texts.of(token_id)
    return {"token": token.text, "logprob": logprob, "bytes": list(token.raw)}
