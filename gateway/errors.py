"""Every failure as an OpenAI error object: `{"error": {"message", "type", "param", "code"}}`.

Translates what pydantic and starlette raise; decides nothing about what is an error.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from common.errors import RequestRejected

DEFAULT_RETRY_AFTER_S = 1
MAX_NAME = 100  # characters of a client's own words that an error repeats
INTERNAL_ERROR = RequestRejected(
    "internal error: the server's log has more", status=500, code="internal_error"
)


class ErrorObject(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is an error, and of the error event in a stream."""

    error: ErrorObject


def error_type(status: int) -> str:
    """Return OpenAI's `error.type` for an HTTP status."""
    if status >= 500:
        return "server_error"
    return "rate_limit_error" if status == 429 else "invalid_request_error"


def error_object(error: RequestRejected) -> dict[str, Any]:
    """Return the error object of a failure."""
    return {
        "error": {
            "message": error.message,
            "type": error_type(error.status),
            "param": error.param,
            "code": error.code,
        }
    }


def error_headers(error: RequestRejected) -> dict[str, str]:
    """Return Retry-After for what passes by itself, and the end of a connection that still sends."""
    if error.status == 408:
        return {"Connection": "close"}
    if error.status not in (429, 503):
        return {}
    return {"Retry-After": str(error.retry_after_s or DEFAULT_RETRY_AFTER_S)}


def clipped(text: str) -> str:
    """Shorten a client's own words to what an error message may repeat, on one line."""
    text = "".join(c if c.isprintable() else "?" for c in text[: MAX_NAME + 1])
    return text if len(text) <= MAX_NAME else text[:MAX_NAME] + "..."


def deadline_exceeded(message: str) -> RequestRejected:
    """Return the failure of a request that did not end within its deadline."""
    return RequestRejected(message, status=504, code="deadline_exceeded")


def unknown_field(param: str) -> RequestRejected:
    """Return the refusal of a field that this API does not have."""
    name = clipped(param)
    return RequestRejected(f"unknown field {name!r}", param=name, code="unknown_parameter")


def from_validation(error: ValidationError) -> RequestRejected:
    """Translate the first thing that pydantic found wrong, naming it as OpenAI does: `messages[0].role`."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ""
    for part in first["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f".{part}"
    param = param.lstrip(".")
    match first["type"]:
        case "extra_forbidden":
            return unknown_field(param)
        case "missing":
            return RequestRejected(f"{param!r} is required", param=param, code="missing_required_parameter")
        case _:
            reason = first["msg"].removeprefix("Value error, ")
            return RequestRejected(f"{param}: {reason}", param=param or None)


def from_http(error: HTTPException) -> RequestRejected:
    """Translate what the routing raises: no such route, or not with this method."""
    status = HTTPStatus(error.status_code)
    return RequestRejected(status.phrase.lower(), status=status, code=status.phrase.lower().replace(" ", "_"))
