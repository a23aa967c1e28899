"""Moving KV pages by id: out of a pool, into it, and between pools. One class for each kind of memory.

Knows no tensor of the model and no owner of a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from common.kv.layout import KVLayout


class Pages(Protocol):
    """Pages 1 .. num_pages of one layout that this process can address, behind page 0, the padding.

    On a GPU everything happens on the current stream, and the host goes on.
    """

    num_pages: int

    def gather(self, page_ids: Sequence[int]) -> Tensor:
        """Copy pages out: uint8, flat and contiguous, [layers, n, 2, page_size, kv_heads, head_dim]."""

    def scatter(self, page_ids: Sequence[int], data: Tensor) -> None:
        """Write pages from bytes in the order of `gather`; RuntimeError where their number is wrong."""

    def copy_from(self, page_ids: Sequence[int], source: Pages, source_ids: Sequence[int]) -> None:
        """Copy pages of another place, of the same layout and kind of memory, into these."""


class HostPages:
    """Pages in main memory."""

    def __init__(self, layout: KVLayout, num_pages: int, memory: Tensor) -> None:
        """See `memory`, [bytes] u8 in the order of the pool, as pages."""
        self.num_pages = num_pages
        # A page is copied as `layers` blocks of some KiB: numpy does that 5 to 20 times faster than torch's
        # indexing, whose threads wait for each other.
        self._pages = memory.numpy().reshape(layout.layers, num_pages + 1, layout.layer_page_bytes)

    def gather(self, page_ids: Sequence[int]) -> Tensor:
        """See Pages."""
        layers, _, page_bytes = self._pages.shape
        out = np.empty((layers, len(page_ids), page_bytes), np.uint8)
        for index, page in enumerate(page_ids):
            out[:, index] = self._pages[:, page]
        return torch.from_numpy(out).view(-1)

    def scatter(self, page_ids: Sequence[int], data: Tensor) -> None:
        """See Pages."""
        layers, _, page_bytes = self._pages.shape
        source = data.view(layers, len(page_ids), page_bytes).numpy()
        for index, page in enumerate(page_ids):
            self._pages[:, page] = source[:, index]

    def copy_from(self, page_ids: Sequence[int], source: Pages, source_ids: Sequence[int]) -> None:
        """See Pages; one copy a page."""
        assert isinstance(source, HostPages)
        for here, there in zip(page_ids, source_ids, strict=True):
            self._pages[:, here] = source._pages[:, there]
