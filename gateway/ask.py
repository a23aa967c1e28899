"""Ask a running server one question from the command line, and print the answer as it comes.

A plain client of the HTTP API: it must not know anything of the server that another client would not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from common.config import AskConfig

CONNECT_TIMEOUT_S = 10.0
STAGES = (
    ("queue", "queue_ms"),
    ("prefill", "prefill_ms"),
    ("transfer", "transfer_ms"),
    ("first decode step", "first_decode_ms"),
)


class AskFailed(Exception):
    """No answer, or not a whole one. The text is one line for the user."""


def _error_text(body: Any) -> str:
    """Return the message of an OpenAI error object."""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message")) if isinstance(error, dict) else "the server's answer is no error object"


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    try:
        text = _error_text(json.loads(response.read()))
    except ValueError:
        text = response.reason_phrase
    raise AskFailed(f"{text} (HTTP {response.status_code})")


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream up to [DONE].

    Raises:
        AskFailed: an error event, or an end without [DONE].
    """
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise AskFailed(_error_text(event))
        yield event
    raise AskFailed("the server ended the answer early")


def _request(config: AskConfig, model: str, prompt: str) -> tuple[str, dict[str, Any]]:
    """Return the path and the body that ask `prompt`."""
    body: dict[str, Any] = {"model": model, "stream": True}
    for name in ("max_tokens", "temperature", "seed"):
        if (value := getattr(config, name)) is not None:
            body[name] = value
    if config.timings:
        body["timings"] = True
    if config.raw:
        return "/v1/completions", {**body, "prompt": prompt}
    return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": prompt}]}


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return str(choice.get("text") or delta.get("content") or "")


def format_timings(timings: dict[str, float]) -> str:
    """Return the stages of a request as lines, in the order in which they happened."""
    width = max(len(name) for name, _ in STAGES)
    return "".join(f"{name:<{width}}  {timings[key]:9.1f} ms\n" for name, key in STAGES if key in timings)


def ask(config: AskConfig, prompt: str, write: Callable[[str], None]) -> None:
    """Stream the answer to `prompt` into `write`, then the stages if they were asked for.

    Raises:
        AskFailed: the server cannot be reached, or reported an error.
    """
    try:
        # No read timeout: a long queue is no failure, and the user has Ctrl-C.
        with httpx.Client(
            base_url=config.url, timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S), trust_env=False
        ) as client:
            models = client.get("/v1/models")
            _check(models)
            path, body = _request(config, models.json()["data"][0]["id"], prompt)
            timings: dict[str, float] | None = None
            with client.stream("POST", path, json=body) as response:
                _check(response)
                for event in _events(response):
                    for choice in event.get("choices", ()):
                        write(_text(choice))
                    timings = event.get("timings") or timings
            write("\n")
            if timings is not None:
                write("\n" + format_timings(timings))
    except httpx.ConnectError:
        raise AskFailed(f"no server answers at {config.url}: start one with `baton serve`") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise AskFailed(f"{config.url}: {error or type(error).__name__}") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise AskFailed(f"what answers at {config.url} is no OpenAI-compatible server") from None
