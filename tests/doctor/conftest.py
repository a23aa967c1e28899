"""Fixtures that other tests have."""

from tests.wire.conftest import address  # noqa: F401
