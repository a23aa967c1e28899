"""Bring the generated documents up to date: `python -m tests.docs.generate`."""

from __future__ import annotations

from pathlib import Path

from tests.docs.api import api_page
from tests.docs.faults import fill_tables
from tests.docs.options import options_page
from tests.docs.protocol import fill_sections

DOCS = Path(__file__).parents[2] / "docs"
OPTIONS, PROTOCOL, FAULTS = DOCS / "options.md", DOCS / "protocol.md", DOCS / "faults.md"
API = DOCS / "api.md"


def main() -> None:
    """Write what has changed."""
    API.write_text(api_page())
    OPTIONS.write_text(options_page())
    PROTOCOL.write_text(fill_sections(PROTOCOL.read_text()))
    FAULTS.write_text(fill_tables(FAULTS.read_text()))


if __name__ == "__main__":
    main()
