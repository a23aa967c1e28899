"""What "auto" becomes on a GPU, and that what is not the fastest is known as such. No GPU is touched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.config import EngineConfig
from common.engine.attention_choice import choose_attention, fell_back
from common.model.spec import load_spec

GPU, CPU = torch.device("cuda"), torch.device("cpu")
ASKED_FOR = EngineConfig(attention="triton")


@pytest.mark.parametrize(
    ("config", "dtype", "device", "prefills", "backend", "falls_back"),
    [
        (EngineConfig(), "float32", GPU, True, "sdpa", True),
        (EngineConfig(), "float32", GPU, False, "sdpa", True),
        (EngineConfig(), "bfloat16", GPU, True, "triton", True),  # its heads are too small for flashinfer
        (EngineConfig(), "bfloat16", GPU, False, "triton", False),
        (ASKED_FOR, "bfloat16", GPU, True, "triton", False),
        (EngineConfig(attention="sdpa"), "bfloat16", GPU, True, "sdpa", False),
        (EngineConfig(), "float32", CPU, True, "sdpa", False),
    ],
)
def test_what_is_not_the_fastest_is_said_and_counted(
    tiny_model: Path,
    config: EngineConfig,
    dtype: str,
    device: torch.device,
    prefills: bool,
    backend: str,
    falls_back: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec = load_spec(tiny_model)
    with caplog.at_level("WARNING"):
        chosen = choose_attention(config, spec, dtype, device, prefills=prefills)
    assert chosen == backend
    assert fell_back(config, chosen, device, prefills=prefills) is falls_back
    assert bool(caplog.records) is falls_back
