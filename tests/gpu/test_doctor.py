"""`baton doctor` on a machine with GPUs: what it says of them is so, and planes really move pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.config import EngineConfig, ModelConfig
from common.engine.loader import Duties, load_engine
from doctor.finding import Level
from doctor.gpus import read_gpus
from tests.doctor.look import find_elsewhere, find_one

LLAMA = Path(__file__).parents[2] / "benchmarks" / "llama-3.1-8b"
OF_LLAMA = {"model": str(LLAMA), "load_format": "dummy", "device": "auto"}


def test_each_gpu_is_found_with_its_memory() -> None:
    found = find_elsewhere("gpus", **OF_LLAMA)
    assert len(found) == torch.cuda.device_count()
    for index, (finding, gpu) in enumerate(zip(found, read_gpus(len(found)), strict=True)):
        assert finding.level is not Level.PROBLEM, finding
        assert finding.facts["gpu"] == index
        assert gpu.total_bytes == torch.cuda.get_device_properties(index).total_memory
        assert 0 < gpu.free_bytes <= gpu.total_bytes
        assert gpu.driver.split(".")[0].isdecimal()


@pytest.mark.parametrize("check", ["triton", "attention", "nodes", "room"])
def test_what_nodes_on_gpus_need_is_looked_at(check: str) -> None:
    found = find_elsewhere(check, **OF_LLAMA)
    assert found
    assert all(finding.level is not Level.PROBLEM for finding in found), found


@pytest.mark.parametrize("plane", ["cuda-ipc", "frames"])
def test_pages_move_between_processes(plane: str) -> None:
    [finding] = find_elsewhere(f"plane-{plane}", **OF_LLAMA)
    assert finding.level is not Level.PROBLEM, finding
    assert float(finding.facts["gb_per_s"]) > 0


def test_shared_memory_is_not_for_gpus() -> None:
    assert find_elsewhere("plane-shm", **OF_LLAMA) == []


def test_peers_are_looked_at_where_there_are_several() -> None:
    assert len(find_elsewhere("peer-access", **OF_LLAMA)) == (torch.cuda.device_count() > 1)


def test_the_pool_is_as_large_as_the_loader_makes_it(tiny_model: Path) -> None:
    values = {"device": "cuda", "gpu_memory_fraction": 0.1, "colocated": True, "gpu": 0}
    finding = find_one("room", tiny_model, dtype="bfloat16", **values)
    engine = EngineConfig(device="cuda", gpu=0, gpu_memory_fraction=0.1)
    loaded = load_engine(tiny_model, ModelConfig(dtype="bfloat16"), engine, Duties())
    tokens = loaded.pool.num_pages * loaded.layout.page_size
    assert finding.facts["pool_tokens"] == pytest.approx(tokens, rel=0.05)
