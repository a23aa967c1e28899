"""The answer to one prompt: token events of a node -> text, token ids, log probabilities, and why it ended.

A stop string ends the answer here, although the node would go on. Knows neither HTTP nor JSON.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from common.codec import IntArray
from common.request import FinishReason, TokenLogprobs
from gateway.detokenizer import Detokenizer
from gateway.histograms import InterTokenTimes
from gateway.nodes import NodeStamps, RequestStream, TokenEvent
from gateway.stops import StopStrings
from gateway.timeline import GatewayStamps, Timeline, timeline


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its log probabilities, and the place in the answer's text where its own text begins."""

    token_id: int
    logprobs: TokenLogprobs
    text_offset: int  # characters; that of the whole character for a later part of one


class Delta(NamedTuple):  # as TokenEvent
    """What one event adds to an answer; the last has a finish."""

    text: str
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    scored: tuple[ScoredToken, ...] = ()  # one a token, where the request asked for log probabilities
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of all tokens of the prompt but the first

    @property
    def is_text(self) -> bool:
        """It adds text alone, or nothing."""
        return self.finish is None and not self.scored


@dataclass(frozen=True, slots=True)
class TextRules:
    """How an answer's tokens become text, and which text ends it."""

    stops: Sequence[str]
    min_tokens: int  # the first so many tokens complete no stop string


class Answer:
    """One submitted prompt. `abort` gives it up in any state, and is called in the end whatever happened.

    Args:
        begun: its stamps up to when it was submitted.
    """

    def __init__(
        self,
        index: int,
        prompt_ids: IntArray,
        stream: RequestStream,
        detokenizer: Detokenizer,
        rules: TextRules,
        begun: GatewayStamps,
    ) -> None:
        self.index = index
        self.prompt_ids = prompt_ids
        self.num_tokens = 0  # taken so far, up to the one that ended the answer
        self.finish: FinishReason | None = None
        self._stream = stream
        self._detokenizer = detokenizer
        self._stops = StopStrings(rules.stops)
        self._has_stops = bool(rules.stops)
        self._min_tokens = rules.min_tokens
        self._begun = begun
        self._first_token_s: float | None = None
        self._last_token_s = 0.0
        self._done_s: float | None = None
        self._num_chars = 0  # of the text of all tokens so far, shown or held back
        self._is_over = False

    def follow(
        self,
        emit: Callable[[Answer, Delta], None],
        ended: Callable[[Exception | None], None],
        token_times: InterTokenTimes,
    ) -> None:
        """Follow the request, handing every event's delta to `emit`; nothing is called after `abort`.

        Args:
            token_times: counts the time between tokens.
            ended: called once, in the end: with what made the request fail (RequestRejected, or a bug of
                ours in here or in `emit`), or None.
        """

        def take(event: TokenEvent | Exception) -> None:
            if self._is_over:
                return
            try:
                if isinstance(event, Exception):
                    raise event
                delta = self.take(event)
                self._last_token_s = token_times.add(self._last_token_s, len(delta.token_ids))
                if delta.finish is None:
                    emit(self, delta)
                    return
                self.finish = delta.finish
                self.note_first_token()  # at the latest
                self.abort()  # after a stop string the node would go on; else it changes nothing
                emit(self, delta)
            except Exception as failure:  # others' tokens came in the same message
                self.abort()
                ended(failure)
            else:
                ended(None)

        self._stream.follow(take)

    def abort(self) -> None:
        """Give the request up; idempotent."""
        if self._done_s is None:
            self._done_s = time.monotonic()
        self._is_over = True
        self._stream.abort()

    def note_first_token(self) -> None:
        """Note that the client has its first token from now on; only the first time counts."""
        if self._first_token_s is None and not self._is_over:
            self._first_token_s = time.monotonic()

    @property
    def stamps(self) -> GatewayStamps:
        """When this process did what for it, as far as it is."""
        return replace(self._begun, first_token_s=self._first_token_s, done_s=self._done_s)

    @property
    def node_stamps(self) -> NodeStamps:
        """When the nodes did, as far as is known."""
        return self._stream.stamps

    def timeline(self) -> Timeline:
        """Return where its time went until now."""
        return timeline(self.stamps, self.node_stamps, time.monotonic())

    def take(self, event: TokenEvent) -> Delta:
        """Turn an event into what it adds; tokens behind a stop string are dropped and not counted."""
        if event.finish is None and not event.logprobs and not self._has_stops:  # nearly all, so it is quick
            text = "".join(map(self._detokenizer.add, event.token_ids))
            self.num_tokens += len(event.token_ids)
            self._num_chars += len(text)
            return Delta(text, event.token_ids, prompt_logprobs=event.prompt_logprobs)
        text = ""
        offsets: list[int] = []  # one a token that was taken
        for token_id in event.token_ids:
            self.num_tokens += 1
            offsets.append(self._num_chars)
            # The token that made the node stop (EOS or a stop token) is counted, and is no text.
            stopped = event.finish is FinishReason.STOP and len(offsets) == len(event.token_ids)
            text += self._feed("" if stopped else self._detokenizer.add(token_id))
            if self._stops.matched:
                return self._delta(event, offsets, text, FinishReason.STOP)
        if event.finish is None:
            return self._delta(event, offsets, text, None)
        text += self._feed(self._detokenizer.flush())
        if self._stops.matched:
            return self._delta(event, offsets, text, FinishReason.STOP)
        return self._delta(event, offsets, text + self._stops.release(), event.finish)

    def _feed(self, piece: str) -> str:
        self._num_chars += len(piece)
        return self._stops.feed(piece, armed=self.num_tokens > self._min_tokens)

    @staticmethod
    def _delta(event: TokenEvent, offsets: Sequence[int], text: str, finish: FinishReason | None) -> Delta:
        token_ids = event.token_ids[: len(offsets)]
        # No log probabilities where none were asked for: then this is empty.
        scored = tuple(map(ScoredToken, token_ids, event.logprobs, offsets))
        return Delta(text, token_ids, finish, scored, event.prompt_logprobs)
