"""Ask a running server one question from the command line, and print the answer as it comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.config import AskConfig, ClientConfig
from gateway.api_client import connect, request, served_model, stream, text_of

# The first six add up to the time to the first token, that and `decode` to the whole.
STAGES = (
    ("tokenize", "tokenize_ms"),
    ("submit", "submit_ms"),
    ("queue", "queue_ms"),
    ("prefill", "prefill_ms"),
    ("transfer", "transfer_ms"),
    ("send", "send_ms"),
    ("= first token", "ttft_ms"),
    ("decode", "decode_ms"),
    ("= total", "total_ms"),
)


def format_timings(timings: dict[str, Any]) -> str:
    """Return the stages of a request as lines, in the order in which they happened."""
    width = max(len(name) for name, _ in STAGES)
    known = ((name, timings.get(key)) for name, key in STAGES)
    return "".join(f"{name:<{width}}  {ms:9.1f} ms\n" for name, ms in known if ms is not None)


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
        timings: dict[str, Any] | None = None
        for event in stream(server, path, request(client, served_model(server)) | question):
            write(text_of(event))
            timings = event.get("timings") or timings
        write("\n")
        if timings is not None:
            write("\n" + format_timings(timings))
