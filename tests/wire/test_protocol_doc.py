"""What tests/docs does not write into docs/protocol.md, and must be true there: the version, the counters."""

from __future__ import annotations

import re
from pathlib import Path

from common.codec import PROTOCOL_VERSION
from gateway.node_metrics import LINK_COUNTERS

TEXT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


def test_the_version_is_that_of_the_code() -> None:
    assert f"What Baton's processes say to each other: version {PROTOCOL_VERSION}." in TEXT


def test_every_counter_of_a_link_is_explained() -> None:
    table = TEXT[TEXT.index("| counter | counts |") :]
    explained = {name for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for name in row.split("`")}
    assert set(LINK_COUNTERS) <= explained
