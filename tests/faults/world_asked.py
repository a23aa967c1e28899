"""A request as its client sees it: what came, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.errors import RequestRejected
from common.request import FinishReason, TokenLogprobs
from gateway.nodes import RequestStream


@dataclass(eq=False, slots=True)
class Asked:
    """A request that was submitted."""

    stream: RequestStream
    prompt: Sequence[int]
    since_s: float
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    error: RequestRejected | None = None
    is_aborted: bool = False
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of the first event

    @property
    def ended(self) -> bool:
        """It has an answer, an error, or nobody who waits."""
        return self.finish is not None or self.error is not None or self.is_aborted

    async def follow(self) -> None:
        """Read to the end."""
        try:
            while self.finish is None:
                event = await self.stream.next()
                if not self.tokens:
                    self.prompt_logprobs = event.prompt_logprobs
                self.tokens += event.token_ids
                self.finish = event.finish
        except RequestRejected as error:
            self.error = error
