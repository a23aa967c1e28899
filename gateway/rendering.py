"""Answers -> the JSON of the OpenAI API: bodies, chunks, usage. Pure; sends nothing.

Beside what OpenAI documents: `prompt_token_ids` and `token_ids` in a choice (`return_token_ids`; in a stream
the former in the choice's first chunk, the latter in every chunk), `timings` in the body (of several choices,
in each) or in the chunk with the finish reason; vLLM's `prompt_logprobs` in a choice or a chat's body.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from common.request import FinishReason, TokenLogprobs
from gateway.answer import Answer, Delta, ScoredToken
from gateway.called_tools import CalledTools
from gateway.endpoints import Endpoint, Json
from gateway.logprobs import echoed_logprobs, prompt_logprobs
from gateway.openai_api import ChatRequest, GenerationRequest, StreamOptions
from gateway.prompts import Prompt
from gateway.rows import Rows
from gateway.token_text import TokenTexts

_NOTHING = Delta("", ())


def _timings(answer: Answer) -> Json:
    return answer.timeline().to_json()


class Renderer:
    """Writes one call's JSON. `head` is what every object of it carries: id, created, model."""

    def __init__(
        self,
        endpoint: Endpoint,
        request: GenerationRequest,
        head: Json,
        token_texts: TokenTexts,
        prompts: Sequence[Prompt],
    ) -> None:
        self._endpoint = endpoint
        self._request = request
        self._options = request.stream_options or StreamOptions()
        self._head = head
        self._token_texts = token_texts
        self._prompts = prompts
        self._echoes_logprobs = prompts[0].echo is not None and request.num_logprobs() is not None
        self._may_call_tools = isinstance(request, ChatRequest) and request.tool_use is not None
        self._tools: dict[int, CalledTools] = {}  # by the answer's index
        self._opened: set[int] = set()  # choices whose first chunk was written
        self._scores: dict[int, tuple[TokenLogprobs, ...]] = {}  # of prompts, by number
        self._held: dict[int, list[tuple[Answer, Delta]]] = {}  # until those are there

    def body(self, answers: Sequence[Answer], deltas: Sequence[Sequence[Delta]]) -> Json:
        """Return the whole answer; `deltas[i]` are all of `answers[i]`."""
        for answer, parts in zip(answers, deltas, strict=True):
            self._keep_scores(answer, parts[0])
        choices = []
        for answer, parts in zip(answers, map(self._shown, deltas), strict=True):
            text = "".join(part.text for part in parts)
            scored = [token for part in parts for token in part.scored]
            content = self._whole(answer, text)
            choice = self._choice(answer, content, parts[-1].finish, scored, is_first=True)
            if self._request.return_token_ids:
                choice["prompt_token_ids"] = Rows(map(int, answer.prompt_ids))
                choice["token_ids"] = [token_id for part in parts for token_id in part.token_ids]
            if self._request.prompt_logprobs is not None and self._endpoint.prompt_logprobs_in_choice:
                choice["prompt_logprobs"] = self._prompt_logprobs(answer)
            if self._request.timings and len(answers) > 1:
                choice["timings"] = _timings(answer)
            choices.append(choice)
        body = self._head | {"object": self._endpoint.body_object, "choices": choices}
        body["usage"] = self._usage(answers)
        if self._request.prompt_logprobs is not None and not self._endpoint.prompt_logprobs_in_choice:
            body["prompt_logprobs"] = self._prompt_logprobs(answers[0])
        if self._request.timings and len(answers) == 1:
            body["timings"] = _timings(answers[0])
        return body

    def chunks(self, answer: Answer, delta: Delta, answers: Sequence[Answer]) -> list[Json]:
        """Return the chunks of one event: none when it has nothing to tell, as with half a character."""
        number = self._keep_scores(answer, delta)
        if self._echoes_logprobs and number not in self._scores:  # another choice of the prompt has them
            self._held.setdefault(number, []).append((answer, delta))
            return []
        events = [*self._held.pop(number, ()), (answer, delta)]
        return [chunk for one, more in events for chunk in self._chunks(one, more, answers)]

    def _chunks(self, answer: Answer, delta: Delta, answers: Sequence[Answer]) -> list[Json]:
        chunks = []
        (delta,) = self._shown((delta,))
        opening = self._endpoint.opening
        if opening is not None and answer.index not in self._opened:
            if self._may_call_tools:  # then it may have no content at all
                opening = {"delta": {"role": "assistant", "content": None}}
            chunks.append(self._chunk(answer, opening, _NOTHING, answers))
        told = self._request.return_token_ids or self._options.continuous_usage_stats
        is_echo = answer.index not in self._opened and self._prompt(answer).echo is not None
        content, has_content = self._more(answer, delta)
        if has_content or delta.finish is not None or delta.scored or told or is_echo:
            chunk = self._chunk(answer, content, delta, answers)
            if self._request.timings and delta.finish is not None:
                chunk["timings"] = _timings(answer)
            chunks.append(chunk)
        return chunks

    @property
    def is_plain(self) -> bool:
        """The chunk of a delta that is text alone depends on its text, and on nothing that came before."""
        asked = self._request.return_token_ids or self._options.continuous_usage_stats
        return not (asked or self._may_call_tools or self._echoes_logprobs)

    def usage_chunk(self, answers: Sequence[Answer]) -> Json | None:
        """Return the chunk that ends a stream with the usage, where the client asked for it."""
        if not self._options.include_usage:
            return None
        chunk = self._head | {"object": self._endpoint.chunk_object, "choices": []}
        return chunk | {"usage": self._usage(answers)}

    # What is told of an answer ---------------------------------------------------------------------------

    def _prompt(self, answer: Answer) -> Prompt:
        return self._prompts[self._number(answer)]

    def _number(self, answer: Answer) -> int:
        """Return which prompt of the call it answers: the choices of one come behind each other."""
        return answer.index // self._request.n

    def _shown(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        """Leave out the token that was computed although none was wanted."""
        if self._request.max_tokens != 0:
            return deltas
        finish = FinishReason.LENGTH if deltas[-1].finish is not None else None
        return [Delta("", (), finish)]

    def _whole(self, answer: Answer, text: str) -> Json:
        if self._may_call_tools:
            return {"message": self._tools_of(answer).message(text)}
        return self._endpoint.choice(text)

    def _more(self, answer: Answer, delta: Delta) -> tuple[Json, bool]:
        if self._may_call_tools:
            more = self._tools_of(answer).delta(delta.text, is_last=delta.finish is not None)
            return {"delta": more}, bool(more)
        return self._endpoint.delta(delta.text), bool(delta.text)

    def _tools_of(self, answer: Answer) -> CalledTools:
        return self._tools.setdefault(answer.index, CalledTools())

    def _keep_scores(self, answer: Answer, delta: Delta) -> int:
        """Return the prompt's number."""
        number = self._number(answer)
        if delta.prompt_logprobs is not None:
            self._scores[number] = delta.prompt_logprobs
        return number

    def _prompt_logprobs(self, answer: Answer) -> Rows:
        scores = self._scores[self._number(answer)]
        return prompt_logprobs(
            answer.prompt_ids, scores, self._request.prompt_logprobs or 0, self._token_texts
        )

    def _usage(self, answers: Sequence[Answer]) -> Json:
        """Count over all prompts of the call, as far as it got; a prompt counts once for all its choices."""
        prompt = sum(len(answer.prompt_ids) for answer in answers[:: self._request.n])
        completion = sum(answer.num_tokens for answer in answers)
        if self._request.max_tokens == 0:
            completion = 0
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    # The parts of a choice -------------------------------------------------------------------------------

    def _choice(
        self,
        answer: Answer,
        content: Json,
        finish: FinishReason | None,
        scored: Sequence[ScoredToken],
        *,
        is_first: bool,
    ) -> dict[str, Any]:
        echo = self._prompt(answer).echo
        if echo is not None:
            if is_first:
                content = {"text": echo.text + content["text"]}
            scored = [replace(each, text_offset=each.text_offset + len(echo.text)) for each in scored]
        logprobs = self._endpoint.logprobs(scored, self._token_texts) if scored else None
        if self._echoes_logprobs and is_first:
            logprobs = self._with_echo(answer, logprobs)
        return {
            "index": answer.index,
            **content,
            "logprobs": logprobs,
            "finish_reason": self._reason(answer, finish),
        }

    def _with_echo(self, answer: Answer, logprobs: Json | None) -> Json:
        echo, scores = self._prompt(answer).echo, self._scores[self._number(answer)]
        assert echo is not None
        num = self._request.num_logprobs() or 0
        whole = echoed_logprobs(answer.prompt_ids, echo.offsets, scores, num, self._token_texts)
        return {name: Rows(values, (logprobs or {}).get(name, ())) for name, values in whole.items()}

    def _reason(self, answer: Answer, finish: FinishReason | None) -> str | None:
        if finish is FinishReason.STOP and self._may_call_tools and self._tools_of(answer).any_called:
            return "tool_calls"
        return None if finish is None else finish.value

    def _chunk(self, answer: Answer, content: Json, delta: Delta, answers: Sequence[Answer]) -> Json:
        is_first = answer.index not in self._opened
        self._opened.add(answer.index)
        choice = self._choice(answer, content, delta.finish, delta.scored, is_first=is_first)
        if self._request.return_token_ids:
            if is_first:
                choice["prompt_token_ids"] = answer.prompt_ids.tolist()
            choice["token_ids"] = list(delta.token_ids)
        chunk = self._head | {"object": self._endpoint.chunk_object, "choices": [choice]}
        if self._options.continuous_usage_stats:
            chunk["usage"] = self._usage(answers)
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk
