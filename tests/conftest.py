"""Models that tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from model_store.store import resolve_model
from tests.tiny import write_tiny_model

# On two busy cores a second thread costs a tiny model ten times the time that it saves.
torch.set_num_threads(1)
settings.register_profile("untimed", deadline=None)  # a busy machine fails no test
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model; do not write there."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the default model, fetched and converted by the first test run on a machine."""
    cache = os.environ.get("BATON_CACHE")
    return resolve_model("smollm2-135m", print, Path(cache) if cache else None)
