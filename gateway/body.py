"""Read a request's body: bounded, and strictly a JSON object.

Knows no field of any request.
"""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json
from starlette.requests import Request

from common.errors import RequestRejected


def _too_large(limit_bytes: int) -> RequestRejected:
    return RequestRejected(
        f"the request body is larger than {limit_bytes} bytes", status=413, code="request_too_large"
    )


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """Read the body, holding no more than the limit whatever the headers say.

    Raises:
        RequestRejected: 413; what comes after the limit is not kept.
        starlette.requests.ClientDisconnect: the client left before the end.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit_bytes:
        raise _too_large(limit_bytes)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        parts.append(part)
    return b"".join(parts)


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object.

    pydantic's parser is as strict as needed: no NaN, no invalid UTF-8, no lone surrogate, bounded depth and
    digits.

    Raises:
        RequestRejected: it is not JSON, or no object.
    """
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestRejected(f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if type(value) is not dict:
        raise RequestRejected("the request body must be a JSON object", code="invalid_json")
    return value
