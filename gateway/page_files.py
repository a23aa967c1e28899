"""The page at `/`: the files of `web/`, as they are. Knows nothing of what they ask for.

They say nothing of the server and are open without a key. The policy lets the page load and ask this server
alone, and run no script that is not a file of it: text of a model or a node cannot become one.
"""

from __future__ import annotations

import os
from pathlib import Path

from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).parent / "web"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # ask each time, by ETag: a new version of Baton is seen at once
}


class PageFiles(StaticFiles):
    """An application that answers GET and HEAD for `/` and, mounted, for the files by name."""

    def __init__(self) -> None:
        super().__init__(directory=FOLDER)

    def get_path(self, scope: Scope) -> str:
        """Return the file that is asked for."""
        return "index.html" if scope["path"] == "/" else super().get_path(scope)

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        """Answer with a file, or that it is the one that the client has."""
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(_HEADERS)
        return response
