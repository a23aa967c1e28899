"""A browser for the tests of the page; without one they are skipped, and say why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from common.config import GatewayConfig
from gateway.text import TextPipeline
from tests.gateway.conftest import LiveServer, byte_level, text
from tests.gateway.live import live_gateway
from tests.web.browser import MISSING, Watched, browser, chromium_path, opened

__all__ = ["byte_level", "text"]


@pytest.fixture(scope="module")  # not longer: its driver leaves a loop running in this thread
def chromium() -> Iterator[Browser]:
    """Chromium, running."""
    if chromium_path() is None:
        pytest.skip(MISSING)
    with browser() as running:
        yield running


@pytest.fixture
def server(text: TextPipeline) -> Iterator[LiveServer]:
    """A gateway before fake nodes, which nobody asked before."""
    with live_gateway(text, GatewayConfig()) as server:
        yield server


@pytest.fixture
def watched(chromium: Browser, server: LiveServer) -> Iterator[Watched]:
    """A page for a gateway before fake nodes; whatever a test does, the page has to behave."""
    with opened(chromium, server.url) as page:
        yield page
        page.assert_behaved()
