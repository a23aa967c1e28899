"""Pages go out and in whole, and their checksums see every difference."""

from __future__ import annotations

import itertools
import mmap
from pathlib import Path

import pytest
import torch

from common.errors import ConfigError
from common.kv.checksum import page_checksums
from common.kv.layout import KVLayout
from common.kv.pool import KVPool, available_memory_bytes, default_num_pages

LAYOUT = KVLayout(layers=3, page_size=4, kv_heads=2, head_dim=8, dtype="bfloat16")
CPU = torch.device("cpu")


@pytest.fixture
def pool() -> KVPool:
    return filled(1)


def filled(seed: int, layout: KVLayout = LAYOUT) -> KVPool:
    pool = KVPool(layout, 9, CPU)
    pool.data[:, 1:].normal_(generator=torch.Generator().manual_seed(seed))
    return pool


def words(pool: KVPool, page: int) -> torch.Tensor:
    """The page's int32 words in one layer after the other, as a view that can be written."""
    return pool.data.view(LAYOUT.layers, 10, -1).view(torch.int32)[:, page]


def test_a_new_pool_is_zero_and_has_a_padding_page() -> None:
    pool = KVPool(LAYOUT, 9, CPU)
    assert pool.data.shape == (3, 10, 2, 4, 2, 8)
    assert pool.num_pages == 9
    assert not pool.data.any()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_memory_is_taken_only_where_it_is_written() -> None:
    before = resident_bytes()
    pool = KVPool(LAYOUT, 2**30 // LAYOUT.page_bytes, CPU)
    pool.data[:, -1] = 1
    assert resident_bytes() - before < 2**28


def test_a_pool_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs \d+ MiB, which is not there; lower --kv-pages"):
        KVPool(LAYOUT, 2**45, CPU)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gathered_pages_are_scattered_elsewhere_unchanged(dtype: str) -> None:
    layout = KVLayout(3, 4, 2, 8, dtype)
    source, target = filled(1, layout), filled(2, layout)
    before = target.data.clone()
    data = source.gather([7, 2, 9])
    assert data.dtype == torch.uint8
    assert data.shape == (3 * layout.page_bytes,)
    assert data.is_contiguous()
    target.scatter([1, 9, 4], data)
    assert torch.equal(target.data[:, [1, 9, 4]], source.data[:, [7, 2, 9]])
    others = [0, 2, 3, 5, 6, 7, 8]
    assert torch.equal(target.data[:, others], before[:, others])


def test_gathered_bytes_are_layer_by_layer(pool: KVPool) -> None:
    expected = b"".join(
        bytes(pool.data[layer, page].view(torch.uint8).flatten().tolist())
        for layer in range(3)
        for page in (5, 1)
    )
    assert bytes(pool.gather([5, 1]).tolist()) == expected


def test_scattering_bytes_of_a_wrong_length_fails(pool: KVPool) -> None:
    with pytest.raises(RuntimeError):
        pool.scatter([1, 2], pool.gather([3]))


def test_default_size_is_a_tenth_of_memory_and_at_most_4_gib() -> None:
    layout = KVLayout(30, 16, 3, 64, "bfloat16")
    assert default_num_pages(layout, 10 * 100 * layout.page_bytes) == 100
    assert default_num_pages(layout, 2**40) == 2**32 // layout.page_bytes
    assert default_num_pages(layout, 0) == 1
    assert available_memory_bytes() > 2**20


def test_checksum_is_its_formula(pool: KVPool) -> None:
    # A page of one word w at position p has checksum w * weight(p, index): linear, odd, wrapping.
    pool.data.zero_()
    words(pool, 1)[0, 5] = 1
    words(pool, 2)[0, 5] = -3
    one, minus_three = page_checksums(pool, [1], 4)[0], page_checksums(pool, [2], 4)[0]
    assert one % 2 == 1
    assert minus_three == -3 * one % 2**64


def test_checksum_is_the_same_wherever_the_page_lies(pool: KVPool) -> None:
    other = filled(2)
    other.scatter([8, 3, 4], pool.gather([1, 2, 9]))
    assert page_checksums(other, [8, 3, 4], 5) == page_checksums(pool, [1, 2, 9], 5)
    assert page_checksums(pool, [9], 7)[0] == page_checksums(pool, [1, 2, 9], 5)[2]
    assert len(page_checksums(pool, [], 0)) == 0


def test_checksum_sees_every_flipped_bit(pool: KVPool) -> None:
    expected = page_checksums(pool, [3], 0)
    page = words(pool, 3)
    for layer, word, bit in itertools.product(range(3), (0, 17, page.shape[1] - 1), range(32)):
        mask = 1 << bit if bit < 31 else -(2**31)
        page[layer, word] ^= mask
        assert page_checksums(pool, [3], 0) != expected
        page[layer, word] ^= mask
    assert page_checksums(pool, [3], 0) == expected


def test_checksum_sees_swapped_pages(pool: KVPool) -> None:
    ab, ba = page_checksums(pool, [1, 2], 0), page_checksums(pool, [2, 1], 0)
    assert ab[0] != ba[0]
    assert ab[0] != ba[1]
    assert ab[1] != ba[0]


def test_checksum_sees_words_that_changed_places(pool: KVPool) -> None:
    expected = page_checksums(pool, [3], 0)
    page = words(pool, 3)
    for other in range(1, page.shape[1]):
        first, second = page[0, 0].item(), page[0, other].item()
        page[0, 0], page[0, other] = second, first
        assert page_checksums(pool, [3], 0) != expected
        page[0, 0], page[0, other] = first, second
    pool.data[:, 3] = pool.data[[1, 0, 2], 3]  # two layers
    assert page_checksums(pool, [3], 0) != expected
