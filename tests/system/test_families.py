"""Every model family through real servers: equal to transformers alone and batched, streamed and not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.model.test_families import FAMILIES
from tests.system.client import Client
from tests.system.oracle import Oracle
from tests.system.server import running
from tests.system.test_parity import check_alone_and_together
from tests.tiny import VOCAB_SIZE, write_tiny_model

pytestmark = pytest.mark.system

SERVED = ("llama3 rope", "mistral", "qwen2", "qwen3")
SET_UPS = {"pair": (), "colocated": ("--colocated", "--overlap", "on")}
NUM_TOKENS = 64


@pytest.mark.parametrize("set_up", SET_UPS)
@pytest.mark.parametrize("family", SERVED)
def test_family(family: str, set_up: str, tmp_path: Path) -> None:
    config_type, settings = FAMILIES[family]
    model = write_tiny_model(tmp_path, config_type=config_type, **settings)
    oracle, draw = Oracle(model), random.Random(3)
    cases = [
        oracle.case([draw.randrange(3, VOCAB_SIZE) for _ in range(length)], NUM_TOKENS)
        for length in (1, 16, 33, 200)
    ]
    with running(model, *SET_UPS[set_up]) as server:
        client = Client(server.url, server.model)
        check_alone_and_together(client, cases)
        client.assert_ledger_clean()
