"""`baton bench transfer` on the CPU: both planes between two processes, beside a plain copy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import transfer
from common.errors import ConfigError
from tests.bench.test_benchmarks import names, run

TOKENS = (20, 100)
PAGE_BYTES = 2 * 2 * 16 * 2 * 16 * 2  # layers, K and V, tokens, heads, size of a head, bytes
LLAMA = Path(__file__).parents[2] / "benchmarks" / "llama-3.1-8b"


@pytest.fixture
def small(tmp_path: Path) -> tuple[str, ...]:
    """Options for a model of two small layers."""
    config = json.loads((LLAMA / "config.json").read_text())
    config |= {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = ",".join(map(str, TOKENS))
    return ("--model", str(tmp_path), "--device", "cpu", "--tokens", tokens, "--rounds", "3")


def test_planes_and_copy(small: tuple[str, ...]) -> None:
    record = run(transfer.main, *small)
    assert record["options"]["ends"] == "on the CPU"
    found = {(figure["name"], figure["unit"]): figure["value"] for figure in record["figures"]}
    for tokens in TOKENS:
        num_bytes = -(-tokens // 16) * PAGE_BYTES
        for plane in ("shm", "frames"):
            what = f"{plane}, {tokens} tokens"
            seconds = found[what, "ms"] / 1000
            assert found[what, "GB/s"] == pytest.approx(num_bytes / seconds / 1e9)
            assert found[f"{what}: from D's asking", "ms"] > found[what, "ms"] > 0
        assert found[f"one plain copy, {tokens} tokens", "ms"] > 0
        assert found[f"pages alone, {tokens} tokens", "GB/s"] > 0


def test_planes_that_are_asked_for_are_measured_alone(small: tuple[str, ...]) -> None:
    found = names(run(transfer.main, *small, "--plane", "shm"))
    assert "shm, 20 tokens" in found
    assert "frames, 20 tokens" not in found


@pytest.mark.parametrize("plane", ["cuda-ipc", "foo"])
def test_a_plane_that_does_not_work_here_is_refused_before_anything_is_measured(
    small: tuple[str, ...], plane: str
) -> None:
    result = CliRunner().invoke(transfer.main, [*small, "--plane", f"shm,{plane}"])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == f"--plane {plane}: the planes on the CPU are shm and frames"
    assert result.stdout == ""
