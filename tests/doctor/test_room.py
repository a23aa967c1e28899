"""Where nodes run and what room there is: as the loader and the supervisor will have it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.config import EngineConfig, ModelConfig
from common.engine import loader
from common.engine.loader import Duties, load_engine
from common.engine.sizing import StepSizes
from common.supervision.gpu_plan import GpuShare
from doctor.finding import Level
from doctor.gpus import Gpu
from doctor.machine import GIB
from doctor.model import KnownModel, known_model
from doctor.room import cpu_need, describe_places, judge_cpu_room, judge_gpu_room, sizes_of_steps
from tests.doctor.look import asked, find_one

LLAMA = Path(__file__).parents[2] / "benchmarks" / "llama-3.1-8b"
H200 = Gpu(0, "NVIDIA H200", (9, 0), total_bytes=150_000_000_000, free_bytes=149_000_000_000)


@pytest.mark.parametrize("check", ["nodes", "room"])
def test_a_tiny_model_finds_room_here(tiny_model: Path, check: str) -> None:
    assert find_one(check, tiny_model).level is Level.OK


def known(model: Path, **values: Any) -> KnownModel:
    found = known_model(asked(model, **values))
    assert found is not None
    return found


def test_the_pool_is_what_the_loader_makes(tiny_model: Path) -> None:
    for values in ({"kv_pages": 77}, {"page_size": 8}):
        need = cpu_need(asked(tiny_model, **values).config, known(tiny_model), available := 8 * GIB)
        engine = EngineConfig(device="cpu", local_nodes=2, **values)
        pages = loader.cpu_num_pages(
            engine, known(tiny_model).spec.kv_layout(engine.page_size, "float32"), available
        )
        assert need.pool_tokens == pages * engine.page_size


def test_more_nodes_need_more_and_share_the_default_pools(tiny_model: Path) -> None:
    model = known(tiny_model)
    two, four, one = (
        cpu_need(asked(tiny_model, **values).config, model, 16 * GIB)
        for values in ({}, {"prefill": 2, "decode": 2}, {"colocated": True})
    )
    assert one.least_bytes < two.least_bytes < four.least_bytes
    assert two.pool_tokens > four.pool_tokens
    # A tenth of the memory for each of two.
    assert two.most_bytes - two.least_bytes == pytest.approx(2 * 16 * GIB / 10, rel=0.001)


def test_memory_that_does_not_do(tiny_model: Path) -> None:
    need = cpu_need(asked(tiny_model).config, known(tiny_model), 16 * GIB)
    assert judge_cpu_room(need, 16 * GIB, 512).level is Level.OK
    assert judge_cpu_room(need, need.most_bytes - 1, 512).level is Level.WARNING
    assert judge_cpu_room(need, need.least_bytes - 1, 512).level is Level.PROBLEM


def test_a_model_that_does_not_fit_is_a_problem() -> None:
    # 8 billion weights, twice, in float32.
    need = cpu_need(
        asked(LLAMA).config, replace(known(LLAMA, load_format="dummy"), dtype="float32"), 24 * GIB
    )
    assert need.least_bytes > 2 * 8e9 * 4
    assert judge_cpu_room(need, 24 * GIB, 8192).level is Level.PROBLEM


def test_a_pool_below_the_context_is_a_warning(tiny_model: Path) -> None:
    finding = find_one("room", tiny_model, kv_pages=31)
    assert finding.level is Level.WARNING
    assert "holds 496 tokens" in finding.found
    assert find_one("room", tiny_model, kv_pages=32).level is Level.OK


@pytest.mark.parametrize(
    "duties", [Duties(decodes=False), Duties(prefills=False), Duties()], ids=["prefill", "decode", "both"]
)
@pytest.mark.parametrize("values", [{}, {"max_running": 3, "prefill_budget": 5000}])
def test_steps_are_as_large_as_the_loader_makes_them(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, duties: Duties, values: dict[str, int]
) -> None:
    made: list[StepSizes] = []
    ask = loader.step_bytes

    def step_bytes(spec: Any, dtype: str, sizes: StepSizes, page_size: int) -> int:
        made.append(sizes)
        return ask(spec, dtype, sizes, page_size)

    monkeypatch.setattr(loader, "step_bytes", step_bytes)
    engine = EngineConfig(device="cpu", kv_pages=8, **values)
    load_engine(tiny_model, ModelConfig(dtype="float32"), engine, duties)
    spec = known(tiny_model).spec
    mine = sizes_of_steps(engine, spec, "float32", "cpu", 0, prefills=duties.prefills, decodes=duties.decodes)
    assert [StepSizes(*mine)] == made


def test_options_that_do_not_go_together_are_a_problem(tiny_model: Path) -> None:
    for values, words in (
        ({"prefill_gpus": "0"}, "--prefill-gpus is set, but the nodes run on the CPU"),
        ({"transfer": "cuda-ipc"}, "--transfer cuda-ipc is for nodes on GPUs"),
        ({"attention": "triton"}, "it needs a GPU"),
    ):
        finding = find_one("nodes", tiny_model, **values)
        assert finding.level is Level.PROBLEM
        assert words in finding.found


def test_places_are_said() -> None:
    config = asked(prefill=2, decode=1).config
    assert describe_places(config, {}, 4) == "2 prefill nodes and 1 decode node on the CPU, 2 threads each"
    shares = {"prefill-0": GpuShare(0, 0.9), "decode-0": GpuShare(1, 0.45)}
    assert describe_places(config, shares, 4) == (
        "prefill-0 on GPU 0 with 0.9 of its memory, decode-0 on GPU 1 with 0.45 of its memory"
    )


# On a GPU, by numbers ---------------------------------------------------------------------------------------


def test_a_large_model_on_a_large_gpu() -> None:
    model = replace(known(LLAMA, load_format="dummy"), dtype="bfloat16")
    config = asked(LLAMA, attention="triton").config
    for name in ("prefill-0", "decode-0"):
        finding = judge_gpu_room(config, model, name, GpuShare(0, 0.9), H200)
        assert finding.level is Level.OK
        # 16 GB of weights and some for steps of 135 GB; a token takes 128 KiB.
        assert 700_000 < int(finding.facts["pool_tokens"]) < (135e9 - 16e9) / (128 << 10)


def test_a_gpu_that_is_too_small_or_taken_is_a_problem() -> None:
    model = replace(known(LLAMA, load_format="dummy"), dtype="bfloat16")
    config = asked(LLAMA, attention="triton").config
    small = replace(H200, total_bytes=16 * GIB, free_bytes=15 * GIB)
    taken = replace(H200, free_bytes=10 * GIB)
    for gpu in (small, taken):
        finding = judge_gpu_room(config, model, "decode-0", GpuShare(0, 0.9), gpu)
        assert finding.level is Level.PROBLEM
        assert "does not fit on the GPU" in finding.found
