"""GPUs, by facts of real machines and by such as are not well; tests/gpu looks at real ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from doctor.finding import Level
from doctor.gpus import (
    Gpu,
    gpu_of,
    judge_absence,
    judge_gpu,
    judge_peers,
    pairs_of_nodes,
    parse_smi,
)
from doctor.kernels import find_compiler, judge_attention, judge_triton, triton_cache
from tests.doctor.look import find, find_elsewhere, find_one

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
UUIDS = ("0a1b2c3d-0000-0000-0000-000000000000", "0a1b2c3d-0000-0000-0000-000000000001")


def recorded() -> list[dict[str, str]]:
    """What nvidia-smi said on a machine with two H200, as a benchmark kept it."""
    [path] = RESULTS.glob("transfer-2xH200-*.json")
    gpus: list[dict[str, str]] = json.loads(path.read_text())["machine"]["gpus"]
    return gpus


def smi_text(free_mib: int = 143_000, errors: str = "0", mode: str = "Default") -> str:
    """The same GPUs as `--query-gpu` of the doctor's own fields prints them."""
    return "".join(
        f"GPU-{uuid}, {gpu['driver_version']}, {free_mib}, {mode}, Disabled, Enabled, {errors}\n"
        for uuid, gpu in zip(UUIDS, recorded(), strict=True)
    )


def gpus(**said: Any) -> list[Gpu]:
    total = int(recorded()[0]["memory.total"].removesuffix(" MiB")) << 20
    rows = parse_smi(smi_text(**said))
    return [
        gpu_of(i, gpu["name"], (9, 0), total, 7, rows[uuid])
        for i, (uuid, gpu) in enumerate(zip(UUIDS, recorded(), strict=True))
    ]


def test_real_gpus_are_well() -> None:
    first, second = gpus()
    assert (first.free_bytes, first.driver, first.mig, first.ecc) == (
        143_000 << 20,
        "580.159.04",
        "Disabled",
        "Enabled",
    )
    finding = judge_gpu(second, 1)
    assert finding.level is Level.OK
    assert finding.found == (
        "GPU 1: NVIDIA H200, 139.6 of 140.4 GiB free, compute capability 9.0, driver 580.159.04, "
        "ECC enabled, MIG disabled"
    )


@pytest.mark.parametrize(
    ("said", "nodes", "level", "words"),
    [
        ({"free_mib": 100_000}, 1, Level.WARNING, "others hold 42.7 GiB"),
        ({"free_mib": 100_000}, 0, Level.OK, ""),  # no node is to run there
        ({"errors": "3"}, 1, Level.WARNING, "3 memory errors"),
        ({"errors": "[N/A]"}, 1, Level.OK, ""),
        ({"mode": "Exclusive_Process"}, 1, Level.OK, ""),
        (
            {"mode": "Exclusive_Process"},
            2,
            Level.PROBLEM,
            "its compute mode is Exclusive_Process, and 2 nodes",
        ),
        ({"mode": "Prohibited"}, 1, Level.PROBLEM, "its compute mode is Prohibited"),
    ],
)
def test_a_gpu_that_is_not_well(said: dict[str, Any], nodes: int, level: Level, words: str) -> None:
    finding = judge_gpu(gpus(**said)[0], nodes)
    assert finding.level is level
    assert words in finding.found


def test_an_old_gpu_is_a_warning() -> None:
    assert judge_gpu(replace(gpus()[0], capability=(7, 5)), 1).level is Level.WARNING


def test_without_nvidia_smi_torch_says_what_is_free() -> None:
    gpu = gpu_of(0, "A GPU", (8, 9), 24 << 30, 23 << 30, {})
    finding = judge_gpu(gpu, 1)
    assert (finding.level, finding.found) == (
        Level.OK,
        "GPU 0: A GPU, 23.0 of 24.0 GiB free, compute capability 8.9",
    )


def test_no_gpu_is_well_unless_there_is_a_driver_or_one_is_asked_for() -> None:
    assert judge_absence("auto", None).level is Level.OK
    assert judge_absence("cpu", None).level is Level.OK
    broken = judge_absence("auto", "torch 2.13.0 was built without CUDA")
    assert (broken.level, "torch 2.13.0 was built" in broken.found) == (Level.WARNING, True)
    assert find_one("gpus").level is Level.OK
    [asked_for] = find_elsewhere("gpus", env={"CUDA_VISIBLE_DEVICES": ""}, device="cuda")
    assert asked_for.level is Level.PROBLEM
    assert asked_for.found.startswith("--device cuda: ")


def test_checks_of_gpus_say_nothing_where_none_is_used() -> None:
    assert [find(check) for check in ("peer-access", "triton", "attention", "plane-cuda-ipc")] == [[]] * 4


def test_peers() -> None:
    all_reach = {(0, 1): True, (1, 0): True}
    assert judge_peers(all_reach, [(0, 1)]).level is Level.OK
    cut = all_reach | {(0, 1): False}
    finding = judge_peers(cut, [(0, 1)])
    assert (finding.level, "from GPU 0 to 1" in finding.found) == (Level.WARNING, True)
    assert judge_peers(cut, [(1, 0)]).level is Level.OK


def test_pairs_are_those_of_prefill_to_decode_nodes() -> None:
    places = {"prefill-0": 0, "prefill-1": 1, "decode-0": 1, "decode-1": 2}
    assert pairs_of_nodes(places) == [(0, 1), (0, 2), (1, 2)]
    assert pairs_of_nodes({"decode-0": 0, "decode-1": 1}) == []


# What builds kernels ----------------------------------------------------------------------------------------


def test_triton_and_what_it_needs(tmp_path: Path) -> None:
    header, cache = tmp_path / "Python.h", tmp_path / "cache"
    assert judge_triton("3.7.1", "/usr/bin/gcc", header, cache).level is Level.PROBLEM
    header.touch()
    assert judge_triton(None, "/usr/bin/gcc", header, cache).level is Level.PROBLEM
    assert judge_triton("3.7.1", None, header, cache).level is Level.PROBLEM
    cold = judge_triton("3.7.1", "/usr/bin/gcc", header, cache)
    assert (cold.level, "is empty" in cold.found) == (Level.OK, True)
    (tmp_path / "file").touch()
    unwritable = judge_triton("3.7.1", "/usr/bin/gcc", header, tmp_path / "file" / "cache")
    assert (unwritable.level, "cannot be written" in unwritable.found) == (Level.PROBLEM, True)
    (cache / "one").mkdir(parents=True)
    assert judge_triton("3.7.1", "/usr/bin/gcc", header, cache).facts == {"built": 1}


def test_where_triton_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert triton_cache({"HOME": "/home/me"}) == Path("/home/me/.triton/cache")
    assert triton_cache({"HOME": "/home/me", "TRITON_CACHE_DIR": "/fast"}) == Path("/fast")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_compiler({}) is None
    for name in ("cc", "my-cc"):
        (tmp_path / name).touch(0o755)
    assert find_compiler({}) == str(tmp_path / "cc")
    assert find_compiler({"CC": "my-cc"}) == str(tmp_path / "my-cc")


def test_attention() -> None:
    assert judge_attention("flashinfer", [], is_built=True).level is Level.OK
    assert judge_attention("triton", [], is_built=True).level is Level.OK
    cold = judge_attention("flashinfer", [], is_built=False)
    assert (cold.level, "1 to 10 minutes" in cold.found) == (Level.WARNING, True)
    slow = judge_attention("triton", ["long prompts are slower than they could be"], is_built=True)
    assert (slow.level, slow.found) == (Level.WARNING, "triton: long prompts are slower than they could be")
