"""Turn what the scheduler says into messages: one `Tokens` a gateway and round, arrays inside."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from common.messages import Begun, Failed, Finish, PromptLogprobs, Refused, RequestLogprobs, Tokens, int32s
from common.request import TokenLogprobs
from decode_node.entry import FailedOut, Out, RefusedOut, RequestKey, StampsOut, TokenOut


@dataclass(eq=False, slots=True)
class _Run:
    """A request's tokens of this round, one after the other."""

    first: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


def messages_of(outs: Iterable[Out]) -> list[tuple[int, Any, tuple[RequestKey, ...]]]:
    """Group by gateway; returns (gateway's epoch, message, requests that end with it), in order."""
    runs: dict[int, dict[RequestKey, _Run]] = {}
    begun: dict[int, list[Begun]] = {}
    finished: dict[int, list[Finish]] = {}
    ended: dict[int, list[RequestKey]] = {}
    first_words: list[tuple[int, Any, tuple[RequestKey, ...]]] = []
    last_words: list[tuple[int, Any, tuple[RequestKey, ...]]] = []
    for out in outs:
        key, epoch = out.key, out.key.epoch
        match out:
            case TokenOut(index=index, sampled=sampled, finish=finish, entry=entry):
                if (scores := out.prompt_logprobs) is not None:
                    arrays = scores.logprobs, scores.top_ids, scores.top_logprobs
                    first_words.append((epoch, PromptLogprobs(key.request_id, *arrays), ()))
                run = runs.setdefault(epoch, {}).setdefault(key, _Run(index))
                run.tokens.append(sampled.token)
                if sampled.logprobs is not None:
                    run.logprobs.append(sampled.logprobs)
                if finish is not None:
                    last = Finish(key.request_id, finish, entry.prebuilt_s, entry.second_token_s)
                    finished.setdefault(epoch, []).append(last)
                    ended.setdefault(epoch, []).append(key)
            case StampsOut(news=Begun() as news):
                begun.setdefault(epoch, []).append(news)
            case StampsOut(news=news):
                first_words.append((epoch, news, ()))
            case RefusedOut():
                refused = Refused(
                    key.request_id, out.status, out.message, out.code, out.param, out.retry_after_s
                )
                last_words.append((epoch, refused, (key,)))
            case FailedOut(status=status, reason=reason, retry_after_s=retry_after_s):
                last_words.append((epoch, Failed(key.request_id, status, reason, retry_after_s), (key,)))
    tokens: list[tuple[int, Any, tuple[RequestKey, ...]]] = [
        (epoch, _tokens(by_key, begun.get(epoch, []), finished.get(epoch, [])), tuple(ended.get(epoch, [])))
        for epoch, by_key in runs.items()
    ]
    # Tokens first: a request that failed in this round may have got some before.
    return first_words + tokens + last_words


def _tokens(by_key: dict[RequestKey, _Run], begun: list[Begun], finished: list[Finish]) -> Tokens:
    return Tokens(
        request_ids=tuple(key.request_id for key in by_key),
        begun=tuple(begun),
        finished=tuple(finished),
        first=int32s(run.first for run in by_key.values()),
        counts=int32s(len(run.tokens) for run in by_key.values()),
        token_ids=int32s(token for run in by_key.values() for token in run.tokens),
        logprobs=tuple(
            RequestLogprobs(key.request_id, tuple(run.logprobs))
            for key, run in by_key.items()
            if run.logprobs
        ),
    )
