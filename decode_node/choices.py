"""One prompt, several answers: one entry stands for all of them until the first tokens are in. Pure.

Then each is a request of its own. They share the prompt's pages: full ones are never written again; the
last one, where it is not full, is copied by all but the first of them, each with its first step (running.py).
Knows no queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from common.messages import Choice
from common.request import Request, SampledToken
from decode_node.entry import Entry, Phase, RequestKey
from decode_node.holdings import Holdings


class Drawing:
    """Prompts of several choices that were computed here, until all their first tokens are read."""

    def __init__(self) -> None:
        self._drawn: dict[RequestKey, list[Choice]] = {}

    def __len__(self) -> int:
        """Prompts whose first tokens are in flight."""
        return len(self._drawn)

    def append(self, entry: Entry) -> None:
        """Take a prompt whose last chunk was launched."""
        self._drawn[entry.key] = []

    def discard(self, key: RequestKey) -> None:
        """Forget a prompt that ended, if it is here."""
        self._drawn.pop(key, None)

    def take(
        self, entry: Entry, sampled: SampledToken, eos_token_ids: tuple[int, ...]
    ) -> list[Choice] | None:
        """Take the next choice's first token; with the last of them, give all back."""
        finish = entry.request.sampling.finish_reason(sampled.token, 1, eos_token_ids)
        drawn = self._drawn[entry.key]
        drawn.append(Choice(sampled.token, finish, sampled.logprobs))
        return self._drawn.pop(entry.key) if len(drawn) == entry.request.sampling.num_choices else None


def part(
    entry: Entry, first_tokens: Sequence[Choice], holdings: Holdings, page_size: int
) -> tuple[tuple[Entry, Choice], ...]:
    """Make a request of each choice that is wanted; what ends with its first token holds nothing.

    `first_tokens`: one for each choice, wanted or not. The entry of several holds nothing from now on, and is
    no request any more.
    """
    if entry.request.sampling.num_choices == 1:
        return ((entry, first_tokens[0]),)
    choices = tuple(_choices(entry, first_tokens))
    going_on = [choice for choice, first in choices if first.finish is None]
    for choice in going_on:
        holdings.share(entry, choice)
    holdings.release(entry)
    entry.phase = Phase.ENDED
    for choice in going_on[1:]:
        choice.request.shares_last_page = choice.request.prompt_len % page_size != 0
    return choices


def _choices(entry: Entry, first_tokens: Sequence[Choice]) -> Iterator[tuple[Entry, Choice]]:
    whole, wanted = entry.request, set(entry.keys)
    for i, (key, first) in enumerate(zip(entry.all_keys(), first_tokens, strict=True)):
        if key not in wanted:
            continue
        sampling = replace(whole.sampling, num_choices=1, choice=whole.sampling.choice + i)
        request = Request(whole.prompt_ids, sampling, whole.prompt_len, computed_len=whole.computed_len)
        request.prompt_logprobs = whole.prompt_logprobs if i == 0 else None
        request.compiled_grammar = whole.compiled_grammar
        choice = Entry(key, request, entry.submitted_s, age=entry.age + i)
        yield choice, first
