"""The KV pool on a GPU: pages go where they are to go, checksums are a CPU's, memory comes back."""

from __future__ import annotations

import gc

import pytest
import torch

from common.device.memory import free_and_total_bytes
from common.errors import ConfigError
from common.kv.checksum import page_checksums
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from tests.wire.endpoint_world import CPU, filled_pool

LAYOUTS = [
    KVLayout(layers=1, page_size=1, kv_heads=1, head_dim=4, dtype="float32"),  # 32 bytes a page
    KVLayout(layers=3, page_size=16, kv_heads=3, head_dim=64, dtype="bfloat16"),
    KVLayout(layers=32, page_size=16, kv_heads=8, head_dim=128, dtype="bfloat16"),  # 64 KiB a page and layer
]
GIBIBYTE = 1 << 30

layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.layer_page_bytes} bytes")


def test_a_new_pool_is_zero_and_is_one_allocation(gpu: torch.device) -> None:
    pool = KVPool(LAYOUTS[1], 9, gpu)
    assert pool.data.shape == (3, 10, 2, 16, 3, 64)
    assert pool.data.device == gpu == pool.device
    assert not pool.data.any()
    assert pool.device_memory is not None
    assert pool.data.data_ptr() == pool.device_memory.address
    assert len(pool.device_memory.handle()) == 64


@layouts
def test_gathered_pages_are_scattered_elsewhere_unchanged(gpu: torch.device, layout: KVLayout) -> None:
    source, target = filled_pool(layout, 9, 1, device=gpu), filled_pool(layout, 12, 2, device=gpu)
    before = target.data.clone()
    data = source.gather([7, 2, 9])
    assert torch.equal(data.cpu(), filled_pool(layout, 9, 1).gather([7, 2, 9]))  # the bytes of a message
    target.scatter([1, 12, 4], data)
    assert torch.equal(target.data[:, [1, 12, 4]], source.data[:, [7, 2, 9]])
    others = [0, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    assert torch.equal(target.data[:, others], before[:, others])
    with pytest.raises(RuntimeError):
        target.scatter([1, 2], data)


@layouts
def test_pages_go_from_pool_to_pool(gpu: torch.device, layout: KVLayout) -> None:
    source, target = filled_pool(layout, 9, 1, device=gpu), filled_pool(layout, 12, 2, device=gpu)
    before = target.data.clone()
    target.pages.copy_from([3, 1, 12], source.pages, [9, 1, 5])
    target.pages.copy_from([], source.pages, [])
    assert torch.equal(target.data[:, [3, 1, 12]], source.data[:, [9, 1, 5]])
    others = [0, 2, 4, 5, 6, 7, 8, 9, 10, 11]
    assert torch.equal(target.data[:, others], before[:, others])


@layouts
def test_checksums_are_those_of_a_cpu(gpu: torch.device, layout: KVLayout) -> None:
    on_gpu, on_cpu = filled_pool(layout, 40, 1, device=gpu), filled_pool(layout, 40, 1, device=CPU)
    pages = [7, 40, *range(1, 30)]
    assert page_checksums(on_gpu, pages, 5) == page_checksums(on_cpu, pages, 5)


def test_a_pool_that_does_not_fit_is_refused_and_nothing_is_left_behind(gpu: torch.device) -> None:
    layout = LAYOUTS[2]
    _, total_bytes = free_and_total_bytes(gpu)
    with pytest.raises(
        ConfigError, match=r"needs \d+ MiB, which is not there: \d+ MiB are free .*--kv-pages"
    ):
        KVPool(layout, 2 * total_bytes // layout.page_bytes, gpu)
    assert torch.ones(3, device=gpu).sum().item() == 3  # the error is not torch's


def test_the_memory_of_a_pool_comes_back(gpu: torch.device) -> None:
    layout = LAYOUTS[2]
    before, _ = free_and_total_bytes(gpu)
    pool = KVPool(layout, 2 * GIBIBYTE // layout.page_bytes, gpu)
    assert free_and_total_bytes(gpu)[0] < before - GIBIBYTE
    torch.cuda.synchronize(gpu)
    del pool
    gc.collect()
    assert free_and_total_bytes(gpu)[0] > before - GIBIBYTE
