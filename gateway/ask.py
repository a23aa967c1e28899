"""Ask a running server one question from the command line, and print the answer as it comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.config import AskConfig, ClientConfig
from gateway.api_client import connect, request, served_model, stream, text_of

STAGES = (
    ("queue", "queue_ms"),
    ("prefill", "prefill_ms"),
    ("transfer", "transfer_ms"),
    ("first decode step", "first_decode_ms"),
)


def format_timings(timings: dict[str, float]) -> str:
    """Return the stages of a request as lines, in the order in which they happened."""
    width = max(len(name) for name, _ in STAGES)
    return "".join(f"{name:<{width}}  {timings[key]:9.1f} ms\n" for name, key in STAGES if key in timings)


def _question(config: AskConfig, prompt: str) -> tuple[str, dict[str, Any]]:
    """Return the path that `prompt` is posted to, and the fields that ask it."""
    timings = {"timings": True} if config.timings else {}
    if config.raw:
        return "/v1/completions", {"prompt": prompt, **timings}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}], **timings}


def ask(client: ClientConfig, config: AskConfig, prompt: str, write: Callable[[str], None]) -> None:
    """Stream the answer to `prompt` into `write`, then the stages if they were asked for.

    Raises:
        AskFailed: the server cannot be reached, or reported an error.
    """
    with connect(client) as server:
        path, question = _question(config, prompt)
        timings: dict[str, float] | None = None
        for event in stream(server, path, request(client, served_model(server)) | question):
            write(text_of(event))
            timings = event.get("timings") or timings
        write("\n")
        if timings is not None:
            write("\n" + format_timings(timings))
