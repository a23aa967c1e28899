"""Copy KV pages between any two places that this GPU can address: pools, its own or not, and staging buffers.

A place is a base address and the bytes from one layer to the next; a page is `page_bytes` at page id *
page_bytes in every layer. One launch moves all layers of all pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

ALIGNMENT_BYTES = 16  # of addresses and of a page in one layer
_WORD_BYTES = 8
_BLOCK_WORDS = 1024


# One build for all addresses and counts: a build for a count that is new would hold up the node's loop.
@triton.jit(
    do_not_specialize=[
        "source",
        "target",
        "source_ids",
        "target_ids",
        "source_layer_words",
        "target_layer_words",
    ]
)
def _copy_pages_kernel(
    source,
    target,
    source_ids,  # [pages] i64
    target_ids,  # [pages] i64
    source_layer_words,
    target_layer_words,
    page_words: tl.constexpr,
    block: tl.constexpr,
):
    page = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    read = source.to(tl.pointer_type(tl.int64)) + layer * source_layer_words
    read += tl.load(source_ids + page) * page_words
    write = target.to(tl.pointer_type(tl.int64)) + layer * target_layer_words
    write += tl.load(target_ids + page) * page_words
    # The compiler does not see through a pointer made of a number: two words go at once.
    read = tl.multiple_of(read, 16)
    write = tl.multiple_of(write, 16)
    for start in range(0, page_words, block):
        words = start + tl.arange(0, block)
        inside = words < page_words
        tl.store(write + words, tl.load(read + words, inside), inside)


@dataclass(frozen=True, slots=True)
class PagePlace:
    """Where pages lie: [layers, pages, page_bytes] from `address` on, layers `layer_bytes` apart."""

    address: int  # of device memory, on a 16-byte boundary
    layer_bytes: int


def copy_pages(
    source: PagePlace, source_ids: Tensor, target: PagePlace, target_ids: Tensor, layers: int, page_bytes: int
) -> None:
    """Copy pages on the current stream.

    Args:
        source: where they are.
        source_ids: [pages] i64 on the device.
        target: where they go.
        target_ids: [pages] i64 on the device.
        layers: layers of each.
        page_bytes: bytes of a page in one layer, a multiple of 16.
    """
    _copy_pages_kernel[(len(source_ids), layers)](
        source.address,
        target.address,
        source_ids,
        target_ids,
        source.layer_bytes // _WORD_BYTES,
        target.layer_bytes // _WORD_BYTES,
        page_bytes // _WORD_BYTES,
        _BLOCK_WORDS,
        num_warps=8,
    )
