"""A plain client of an OpenAI-compatible server, for the commands that talk to one.

It must not know anything of the server that another client would not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from common.api_key import read_api_key
from common.config import ClientConfig

CONNECT_TIMEOUT_S = 10.0


class AskFailed(Exception):
    """No answer, or not a whole one. The text is one line for the user."""


@contextmanager
def connect(config: ClientConfig) -> Iterator[httpx.Client]:
    """Talk to a server; what was not read to its end is broken off at the end, which the server sees.

    Raises:
        AskFailed: whatever goes wrong with the server inside.
        ConfigError: the API key cannot be used.
    """
    url, key = config.url, read_api_key(config.api_key)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        # No read timeout: a long queue is no failure, and the user has Ctrl-C.
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        with httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False) as client:
            yield client
    except httpx.ConnectError:
        raise AskFailed(f"no server answers at {url}: start one with `baton serve`") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise AskFailed(f"{url}: {error or type(error).__name__}") from None
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise AskFailed(f"what answers at {url} is no OpenAI-compatible server") from None


def served_model(client: httpx.Client) -> str:
    """Return the name of the server's model."""
    models = client.get("/v1/models")
    _check(models)
    return str(models.json()["data"][0]["id"])


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Post a request and yield the events of its answer up to [DONE].

    Raises:
        AskFailed: an error answer, an error event, or an end without [DONE].
    """
    with client.stream("POST", path, json=body | {"stream": True}) as response:
        _check(response)
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


def request(config: ClientConfig, model: str) -> dict[str, Any]:
    """Return the body of a request, without what is asked."""
    chosen = {name: getattr(config, name) for name in ("max_tokens", "temperature", "seed")}
    return {"model": model, **{name: value for name, value in chosen.items() if value is not None}}


def text_of(event: dict[str, Any]) -> str:
    """Return the text that an event adds to the answer."""
    text = ""
    for choice in event.get("choices", ()):
        text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    return text


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
