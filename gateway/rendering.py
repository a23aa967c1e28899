"""Answers -> the JSON of the OpenAI API: bodies, chunks, usage. Pure; sends nothing.

Beside what OpenAI documents: `prompt_token_ids` and `token_ids` in a choice (`return_token_ids`; in a stream
the former in the choice's first chunk, the latter in every chunk), and `timings` in the body or in the chunk
with the finish reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from common.request import FinishReason
from gateway.answer import Answer, Delta, ScoredToken
from gateway.endpoints import Endpoint, Json
from gateway.openai_api import GenerationRequest, StreamOptions
from gateway.token_text import TokenTexts


def _usage(answers: Sequence[Answer]) -> Json:
    """Count over all prompts of the call, as far as it got."""
    prompt = sum(len(answer.prompt_ids) for answer in answers)
    completion = sum(answer.num_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _timings(delta: Delta) -> Json | None:
    return None if delta.timings is None else asdict(delta.timings)


class Renderer:
    """Writes one call's JSON. `head` is what every object of it carries: id, created, model."""

    def __init__(
        self, endpoint: Endpoint, request: GenerationRequest, head: Json, token_texts: TokenTexts
    ) -> None:
        self._endpoint = endpoint
        self._request = request
        self._options = request.stream_options or StreamOptions()
        self._head = head
        self._token_texts = token_texts
        self._opened: set[int] = set()  # choices whose first chunk was written

    def body(self, answers: Sequence[Answer], deltas: Sequence[Sequence[Delta]]) -> Json:
        """Return the whole answer; `deltas[i]` are all of `answers[i]`."""
        choices = []
        for answer, parts in zip(answers, deltas, strict=True):
            text = "".join(part.text for part in parts)
            scored = [token for part in parts for token in part.scored]
            choice = self._choice(answer, self._endpoint.choice(text), parts[-1].finish, scored)
            if self._request.return_token_ids:
                choice["prompt_token_ids"] = answer.prompt_ids.tolist()
                choice["token_ids"] = [token_id for part in parts for token_id in part.token_ids]
            choices.append(choice)
        body = self._head | {"object": self._endpoint.body_object, "choices": choices}
        body["usage"] = _usage(answers)
        if self._request.timings:
            body["timings"] = _timings(deltas[0][-1])
        return body

    def chunks(self, answer: Answer, delta: Delta, answers: Sequence[Answer]) -> list[Json]:
        """Return the chunks of one event: none when it has nothing to tell, as with half a character."""
        chunks = []
        opening = self._endpoint.opening
        if opening is not None and answer.index not in self._opened:
            chunks.append(self._chunk(answer, opening, Delta("", ()), answers))
        told = self._request.return_token_ids or self._options.continuous_usage_stats
        if delta.text or delta.finish is not None or delta.scored or told:
            chunk = self._chunk(answer, self._endpoint.delta(delta.text), delta, answers)
            if self._request.timings and delta.finish is not None:
                chunk["timings"] = _timings(delta)
            chunks.append(chunk)
        return chunks

    def usage_chunk(self, answers: Sequence[Answer]) -> Json | None:
        """Return the chunk that ends a stream with the usage, where the client asked for it."""
        if not self._options.include_usage:
            return None
        chunk = self._head | {"object": self._endpoint.chunk_object, "choices": []}
        return chunk | {"usage": _usage(answers)}

    def _choice(
        self, answer: Answer, content: Json, finish: FinishReason | None, scored: Sequence[ScoredToken]
    ) -> dict[str, Any]:
        return {
            "index": answer.index,
            **content,
            "logprobs": self._endpoint.logprobs(scored, self._token_texts) if scored else None,
            "finish_reason": None if finish is None else finish.value,
        }

    def _chunk(self, answer: Answer, content: Json, delta: Delta, answers: Sequence[Answer]) -> Json:
        choice = self._choice(answer, content, delta.finish, delta.scored)
        if self._request.return_token_ids:
            if answer.index not in self._opened:
                choice["prompt_token_ids"] = answer.prompt_ids.tolist()
            choice["token_ids"] = list(delta.token_ids)
        self._opened.add(answer.index)
        chunk = self._head | {"object": self._endpoint.chunk_object, "choices": [choice]}
        if self._options.continuous_usage_stats:
            chunk["usage"] = _usage(answers)
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk
