"""Bring the generated documents up to date: `python -m tests.docs.generate`."""

from __future__ import annotations

from pathlib import Path

from tests.docs.api import api_page
from tests.docs.doctor import fill_checks
from tests.docs.faults import fill_tables
from tests.docs.metrics import fill_page
from tests.docs.options import options_page
from tests.docs.protocol import fill_sections
from tests.docs.troubleshooting import page as troubleshooting_page
from tests.docs.waterfall import fill_waterfall

DOCS = Path(__file__).parents[2] / "docs"
OPTIONS, PROTOCOL, FAULTS = DOCS / "options.md", DOCS / "protocol.md", DOCS / "faults.md"
API = DOCS / "api.md"
DOCTOR = DOCS / "doctor.md"
METRICS = DOCS / "metrics.md"
TROUBLESHOOTING = DOCS / "troubleshooting.md"
HOW_IT_WORKS = DOCS / "how_it_works.md"


def main() -> None:
    """Write what has changed."""
    API.write_text(api_page())
    DOCTOR.write_text(fill_checks(DOCTOR.read_text()))
    METRICS.write_text(fill_page(METRICS.read_text()))
    TROUBLESHOOTING.write_text(troubleshooting_page())
    HOW_IT_WORKS.write_text(fill_waterfall(HOW_IT_WORKS.read_text()))
    OPTIONS.write_text(options_page())
    PROTOCOL.write_text(fill_sections(PROTOCOL.read_text()))
    FAULTS.write_text(fill_tables(FAULTS.read_text()))


if __name__ == "__main__":
    main()
