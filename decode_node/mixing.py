"""How many prompt tokens go beside those that decode, so that their next token takes at most twice as long.

Pure arithmetic on what steps took; knows no clock, no request and no device.

A DECODE step's time D is the median of the last few. A MIXED step of n prompt tokens that took t says how
many would have taken 2 D:

    too slow     n * 2 D / t, and so many as n are not tried again until D is measured anew
    fast enough  n * D / (t - D), as if all above D grew with n; but t may have been flat so far, like a GPU's
                 that reads weights, and grow from here: so not past n * 2 D / t, or one page more

The number halves or doubles at most from step to step, so a single slow one does little harm. Where prompts
keep coming no step decodes alone, and D would grow old; so now and then one does.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low

_REMEMBERED = 5  # DECODE steps
_MAX_MIXED_IN_A_ROW = 32
# Fewer tokens save no time on a GPU: their arithmetic hides behind the reading of the weights. A CPU's budget
# is small, and a part of it saves time: there a page is the least.
_MIN_TOKENS, _MIN_PART = 128, 64


class MixingBudget:
    """The prompt tokens of a MIXED step.

    Args:
        page_size: tokens of a page; no chunk is smaller, so that prompts get on.
        prefill_budget: tokens; no chunk is larger.
    """

    def __init__(self, page_size: int, prefill_budget: int) -> None:
        self._page_size = page_size
        self._min_tokens = max(page_size, min(_MIN_TOKENS, prefill_budget // _MIN_PART))
        self._max_tokens = max(page_size, prefill_budget)
        self._too_many = self._max_tokens + 1
        self._tokens = float(self._min_tokens)  # the cautious start
        self._decode_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._mixed_in_a_row = _MAX_MIXED_IN_A_ROW  # nothing is known: the first to be seen decodes alone

    def next_chunk(self) -> int:
        """Return the tokens of the next step, where prompts wait and others decode.

        0: none, until `observe_decode` has been told of a step without prompts.
        """
        if self._mixed_in_a_row >= _MAX_MIXED_IN_A_ROW:
            return 0
        self._mixed_in_a_row += 1
        return int(self._tokens)

    def observe_decode(self, took_s: float) -> None:
        """Learn from a DECODE step."""
        self._mixed_in_a_row = 0
        self._too_many = self._max_tokens + 1
        if took_s > 0:
            self._decode_s.append(took_s)

    def observe_mixed(self, took_s: float, tokens: int) -> None:
        """Learn from a MIXED step with that many prompt tokens."""
        if not self._decode_s or took_s <= 0:
            return
        decode_s = median_low(self._decode_s)
        in_proportion = tokens * 2 * decode_s / took_s
        is_full = tokens + self._page_size > self._tokens
        if took_s > 2 * decode_s:
            if is_full:
                self._too_many = tokens
            fitting = max(in_proportion, self._tokens / 2)
        elif is_full:
            as_if_linear = tokens * decode_s / max(took_s - decode_s, decode_s / 2)
            fitting = min(as_if_linear, max(in_proportion, tokens + self._page_size), self._too_many - 1)
        else:
            return  # a prompt's short end says nothing about longer chunks
        self._tokens = min(max(fitting, self._min_tokens), self._max_tokens)
