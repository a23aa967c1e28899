"""How nodes share a machine: what is decided, and what a process really gets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.config import EngineConfig
from common.engine.sizing import cpu_num_pages
from common.kv.layout import KVLayout
from common.supervision.small_machine import available_cores, num_threads

ROOT = Path(__file__).parents[2]
VARIABLES = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS")


@pytest.mark.parametrize(
    ("cores", "nodes", "colocated", "threads"),
    [
        (2, 2, False, 2),  # a pair: each phase may use all
        (8, 2, False, 8),
        (8, 4, False, 4),  # two of each
        (8, 3, False, 5),
        (2, 4, False, 1),
        (2, 16, False, 1),  # never none
        (8, 1, True, 8),
        (8, 2, True, 4),
        (1, 1, False, 1),  # never more than there are
    ],
)
def test_nodes_of_a_phase_divide_the_cores(cores: int, nodes: int, colocated: bool, threads: int) -> None:
    assert num_threads(cores, nodes, colocated=colocated) == threads


@pytest.mark.parametrize("nodes", [None, 1, 2, 3, 4, 7])
def test_pools_of_all_nodes_take_two_tenths_of_the_memory_at_most(nodes: int | None) -> None:
    layout = KVLayout(layers=2, page_size=16, kv_heads=2, head_dim=16, dtype="float32")
    memory_bytes = 1000 * layout.page_bytes
    num_pages = cpu_num_pages(EngineConfig(local_nodes=nodes), layout, memory_bytes)
    sharers = max(2, nodes or 2)  # one alone still takes a tenth
    assert 200 - sharers < num_pages * sharers <= 200
    assert cpu_num_pages(EngineConfig(local_nodes=nodes, kv_pages=5), layout, memory_bytes) == 5


def set_up(call: str, **env: str) -> list[str]:
    """Return a process's nice and variables after a call of `share_cores`."""
    code = (
        "import os; from common.supervision.small_machine import Role, share_cores; "
        f"share_cores({call}); print(os.nice(0), *(os.environ.get(v) for v in {VARIABLES}))"
    )
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**clean, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_prefill_gives_way_to_decode() -> None:
    nice = os.nice(0)
    # Where a node may use all cores of its affinity, the number of threads is left to torch.
    own = "None" if available_cores() == len(os.sched_getaffinity(0)) else str(available_cores())
    assert set_up("Role.PREFILL") == [str(min(19, nice + 5)), "PASSIVE", own]
    assert set_up("Role.DECODE") == [str(nice), "None", own]


def test_node_on_a_gpu_keeps_its_priority_and_threads() -> None:
    for role in ("PREFILL", "DECODE"):
        assert set_up(f"Role.{role}, 10_000, on_gpu=True") == [str(os.nice(0)), "None", "None"]


def test_many_nodes_get_fewer_threads() -> None:
    one = "1" if len(os.sched_getaffinity(0)) > 1 else "None"
    assert set_up("Role.DECODE, 10_000")[2] == one


def test_what_the_user_has_set_stays() -> None:
    given = {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "ACTIVE"}
    assert set_up("Role.PREFILL, 10_000", **given)[1:] == ["ACTIVE", "3"]
