"""Which node gets which GPU: a table of servers, and what holds for all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.supervision.gpu_plan import parse_gpus, plan_gpus

Phases = tuple[tuple[int, tuple[int, ...] | None], tuple[int, tuple[int, ...] | None]]


@pytest.mark.parametrize(
    ("num_gpus", "phases", "gpus", "fractions"),
    [
        (1, ((1, None), (1, None)), [0, 0], [0.4, 0.4]),
        (2, ((1, None), (1, None)), [0, 1], [0.8, 0.8]),
        (4, ((2, None), (2, None)), [0, 1, 2, 3], [0.8] * 4),
        (8, ((1, None), (1, None)), [0, 1], [0.8, 0.8]),
        (2, ((2, None), (1, None)), [0, 1, 0], [0.4, 0.8, 0.4]),
        (3, ((2, None), (3, None)), [0, 1, 2, 0, 1], [0.4, 0.4, 0.8, 0.4, 0.4]),
        (2, ((0, None), (2, None)), [0, 1], [0.8, 0.8]),  # colocated
        (2, ((1, (1,)), (1, (0,))), [1, 0], [0.8, 0.8]),
        (4, ((1, (0,)), (3, (1, 2, 3))), [0, 1, 2, 3], [0.8] * 4),
        (4, ((1, (3,)), (4, (2, 1))), [3, 2, 1, 2, 1], [0.8, 0.4, 0.4, 0.4, 0.4]),
        (2, ((1, (1,)), (1, None)), [1, 0], [0.8, 0.8]),  # the other phase keeps away from them
        (2, ((1, None), (1, (0,))), [1, 0], [0.8, 0.8]),
        (3, ((1, None), (2, (0, 0))), [1, 0, 0], [0.8, 0.4, 0.4]),
        (1, ((1, None), (2, None)), [0, 0, 0], [0.2667] * 3),
    ],
)
def test_nodes_take_gpus_in_turn_and_share_their_memory(
    num_gpus: int, phases: Phases, gpus: list[int], fractions: list[float]
) -> None:
    shares = plan_gpus(num_gpus, phases, 0.8)
    assert [share.gpu for share in shares] == gpus
    assert [share.memory_fraction for share in shares] == fractions


@given(st.integers(1, 8), st.integers(0, 8), st.integers(1, 8), st.floats(0.8, 0.98))
def test_no_gpu_has_two_nodes_more_than_another_nor_more_than_its_memory(
    num_gpus: int, num_prefill: int, num_decode: int, fraction: float
) -> None:
    shares = plan_gpus(num_gpus, ((num_prefill, None), (num_decode, None)), fraction)
    nodes = [sum(share.gpu == gpu for share in shares) for gpu in range(num_gpus)]
    assert sum(nodes) == num_prefill + num_decode
    assert max(nodes) - min(nodes) <= 1
    for gpu in range(num_gpus):
        taken = sum(share.memory_fraction for share in shares if share.gpu == gpu)
        assert taken == pytest.approx(fraction if nodes[gpu] else 0, abs=0.001)


def test_more_gpus_than_nodes_are_not_left_idle_in_silence() -> None:
    with pytest.raises(ConfigError, match=r"2 GPUs are named for 1 node \(0,1\)"):
        plan_gpus(4, [(1, (0, 1)), (1, None)], 0.9)
    assert len(plan_gpus(4, [(3, (0, 1)), (1, (2, 2))], 0.9)) == 4


def test_gpu_that_is_not_there_is_named_with_how_many_there_are() -> None:
    with pytest.raises(ConfigError, match=r"GPU 2 is not there: torch sees 2,"):
        plan_gpus(2, ((1, (0,)), (1, (2,))), 0.9)
    with pytest.raises(ConfigError, match=r"GPU 7 is not there: torch sees 2,"):
        plan_gpus(2, ((1, (0, 7)), (1, None)), 0.9)  # also where no node would take it


def test_too_many_nodes_on_one_gpu_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"19 nodes on GPU 0 .* 0\.0474 .* a node needs 0\.05"):
        plan_gpus(2, ((1, (1,)), (19, (0,))), 0.9)
    plan_gpus(2, ((1, (1,)), (18, (0,))), 0.9)


def test_list_of_gpus_is_read() -> None:
    assert parse_gpus("--prefill-gpus", None) is None
    assert parse_gpus("--prefill-gpus", "3") == (3,)
    assert parse_gpus("--prefill-gpus", "0, 1,1") == (0, 1, 1)


@pytest.mark.parametrize("text", ["", "0,", ",", "one", "-1", "0 1", "1.5", "0-3", "²"])
def test_what_is_no_list_of_gpus_is_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--decode-gpus .* is no list of GPU numbers like 0,1$"):
        parse_gpus("--decode-gpus", text)
