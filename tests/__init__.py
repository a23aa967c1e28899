"""So that a failed assertion in what tests share says what it compared; done before anything is imported."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "tests.system.server", "conformance.client", "tests.system.load", "tests.system.oracle"
)
