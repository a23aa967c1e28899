"""The options of `baton generate`.

Apart from `ask`: the command line describes them without loading an HTTP client.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.config import option


@dataclass(frozen=True, slots=True)
class AskConfig:
    """What `baton generate` can be told."""

    url: str = option("http://127.0.0.1:8000", "Where the server is.")
    raw: bool = option(False, "Continue the prompt as it stands, without the chat template.")
    max_tokens: int | None = option(
        None, "Tokens of the answer at the most [default: the server's].", minimum=1
    )
    temperature: float | None = option(None, "0 takes the likeliest token each time [default: the server's].")
    seed: int | None = option(None, "The same seed gives the same answer.")
    timings: bool = option(False, "Say afterwards where the time went.")
