"""The servers that rows share, for the whole run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.setup import Models, Servers


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The models of all rows."""
    folder: Path = tmp_path_factory.mktemp("models")
    return Models(folder)


@pytest.fixture(scope="session")
def servers(models: Models) -> Iterator[Servers]:
    """The last few servers, by their options."""
    servers = Servers(models)
    yield servers
    servers.close()
