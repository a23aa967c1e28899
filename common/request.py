"""What a client asked for, as the nodes see it: token ids and numbers, never text.

SamplingParams travel in `Submit` and `Prefill`; both nodes sample with them, so a token is the same
wherever it is drawn. Stop *strings* are not here: text exists in the gateway alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from common.codec import MaxLen, Range

U64_MAX = 2**64 - 1


class FinishReason(Enum):
    """Why a request ended, in OpenAI's words."""

    STOP = "stop"  # EOS, a stop token, or (decided by the gateway) a stop string
    LENGTH = "length"  # max_tokens


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens and when to stop.

    `temperature == 0` is greedy; `top_k == 0`, `top_p == 1` and `min_p == 0` switch their filter off.
    `seed` is always set (the gateway draws one), so that any node draws the same token.
    """

    max_tokens: Annotated[int, Range(1, 2**31 - 1)]
    temperature: Annotated[float, Range(0, 1e6)] = 1.0
    top_k: Annotated[int, Range(0, 2**31 - 1)] = 0
    top_p: Annotated[float, Range(0, 1)] = 1.0
    min_p: Annotated[float, Range(0, 1)] = 0.0
    seed: Annotated[int, Range(0, U64_MAX)] = 0
    min_tokens: Annotated[int, Range(0, 2**31 - 1)] = 0
    stop_token_ids: Annotated[tuple[int, ...], MaxLen(1024)] = ()
    ignore_eos: bool = False

    def stop_ids(self, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """All token ids that end this request: its own, and the model's unless they are ignored."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids + eos_token_ids

    def finish_reason(
        self, token: int, num_outputs: int, eos_token_ids: tuple[int, ...]
    ) -> FinishReason | None:
        """Say whether `token`, the `num_outputs`-th of the answer (from 1), ends the request.

        A stop token on the last place is a stop, as in OpenAI's API.
        """
        if num_outputs >= self.min_tokens and token in self.stop_ids(eos_token_ids):
            return FinishReason.STOP
        if num_outputs >= self.max_tokens:
            return FinishReason.LENGTH
        return None
