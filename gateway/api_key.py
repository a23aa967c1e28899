"""Asks HTTP clients for the key of the API, before anything of a request is read but its head.

Knows no route but those that are open: what asks whether the process lives has no key, and a browser can send
none for the page that asks its user for one. What the page shows comes from routes that are not open.
"""

from __future__ import annotations

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import RequestRejected
from gateway.reply import error_response

OPEN_PATHS = ("/health", "/ready")
PAGE, PAGE_FILES = "/", "/web/"
CHALLENGE = {"WWW-Authenticate": "Bearer"}


class ApiKeyCheck:
    """An application that lets in whoever sends `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._digest = _digest(key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        app = self._app
        if scope["type"] == "http" and not _is_open(scope["path"]):
            error = self._refusal(Headers(scope=scope).getlist("authorization"))
            if error is not None:
                app = error_response(error, CHALLENGE)
        await app(scope, receive, send)

    def _refusal(self, values: list[str]) -> RequestRejected | None:
        scheme, _, key = values[0].partition(" ") if len(values) == 1 else ("", "", "")
        if scheme.lower() != "bearer":
            return _unauthorized("no API key: send it as the header `Authorization: Bearer KEY`")
        # Of digests: neither the key nor its length can be learned from the time that it takes.
        if not hmac.compare_digest(_digest(key.strip().encode("latin-1")), self._digest):
            return _unauthorized("this API key is not the server's")
        return None


def _is_open(path: str) -> bool:
    return path in (*OPEN_PATHS, PAGE) or path.startswith(PAGE_FILES)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _unauthorized(message: str) -> RequestRejected:
    return RequestRejected(message, status=401, code="invalid_api_key")
