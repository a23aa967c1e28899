"""What the page on troubleshooting says of servers is what they say: to clients, to nodes, in the log."""

from __future__ import annotations

import pytest

from tests.docs.provoke_served import Servers
from tests.docs.test_troubleshooting import COMMANDS, assert_said, kits
from tests.docs.troubleshooting import SECTIONS, Case, cases

__all__ = ["kits"]  # a fixture

pytestmark = pytest.mark.system


SERVED = list(cases(*(title for title in SECTIONS if title not in COMMANDS)))


@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.message[:60])
def test_server_says_so(kits: Servers, case: Case) -> None:
    assert_said(kits, case)
