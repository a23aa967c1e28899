"""Servers that tests share, and what their answers must be.

The model is the tiny one; one of its end-of-sequence tokens is what it says at once to EOS_PROMPT.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.model import EOS_PROMPT, write_eos_model
from tests.system.client import Client
from tests.system.oracle import Case, Oracle
from tests.system.server import running
from tests.tiny import VOCAB_SIZE

__all__ = ["EOS_PROMPT"]
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 300)
NUM_TOKENS = 64


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model that the servers serve."""
    return write_eos_model(tmp_path_factory.mktemp("eos"))


@pytest.fixture(scope="session")
def oracle(model: Path) -> Oracle:
    """What transformers says with the same weights."""
    return Oracle(model)


@pytest.fixture(scope="session")
def cases(oracle: Oracle) -> list[Case]:
    """Prompts of many lengths with their greedy answers."""
    draw = random.Random(5)
    return [oracle.case([draw.randrange(3, VOCAB_SIZE) for _ in range(n)], NUM_TOKENS) for n in LENGTHS]


@pytest.fixture(scope="session")
def _pair(model: Path) -> Iterator[Client]:
    with running(model) as server:
        yield Client(server.url, server.model)


@pytest.fixture(scope="session")
def _colocated(model: Path) -> Iterator[Client]:
    with running(model, "--colocated", "--overlap", "on") as server:
        yield Client(server.url, server.model)


@pytest.fixture
def pair(_pair: Client) -> Iterator[Client]:
    """A prefill node and a decode node with the defaults; every test leaves them idle."""
    yield _pair
    _pair.assert_ledger_clean()


@pytest.fixture
def colocated(_colocated: Client) -> Iterator[Client]:
    """One node that does both, overlapped; every test leaves it idle."""
    yield _colocated
    _colocated.assert_ledger_clean()
