"""Pages in a GPU's memory: this process's own, or another's that is mapped here.

One kernel launch moves all layers of all pages. Needs triton, so it is imported where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.device.pinned import to_device
from common.errors import ConfigError
from common.kernels.pages import ALIGNMENT_BYTES, PagePlace, copy_pages
from common.kv.layout import KVLayout
from common.kv.pages import Pages


class DevicePages:
    """Pages from `address` on, moved by kernels of `device`; keeps `owner` alive, and the memory with it."""

    def __init__(
        self, layout: KVLayout, num_pages: int, device: torch.device, address: int, owner: object
    ) -> None:
        """See memory that `device` can address as pages.

        Raises:
            ConfigError: pages of this layout cannot be moved in whole words.
        """
        self.num_pages = num_pages
        self._layout = layout
        self._device = device
        self._owner = owner
        if layout.layer_page_bytes % ALIGNMENT_BYTES:
            raise ConfigError(
                f"a KV page of {layout.layer_page_bytes} bytes a layer is no multiple of {ALIGNMENT_BYTES}: "
                "choose an even --page-size"
            )
        self._place = PagePlace(address, (num_pages + 1) * layout.layer_page_bytes)

    def gather(self, page_ids: Sequence[int]) -> Tensor:
        """See Pages."""
        count = len(page_ids)
        out = torch.empty(count * self._layout.page_bytes, dtype=torch.uint8, device=self._device)
        self._copy(self._place, page_ids, self._staging(out, count), range(count))
        return out

    def scatter(self, page_ids: Sequence[int], data: Tensor) -> None:
        """See Pages; `data` may come from another stream, which the current one has waited for."""
        count = len(page_ids)
        if data.nbytes != count * self._layout.page_bytes:
            raise RuntimeError(f"{data.nbytes} bytes for {count} pages")
        self._copy(self._staging(data, count), range(count), self._place, page_ids)
        # Its memory is given out again on its own stream: not before this one is done with it.
        data.record_stream(torch.cuda.current_stream(self._device))

    def copy_from(self, page_ids: Sequence[int], source: Pages, source_ids: Sequence[int]) -> None:
        """See Pages."""
        assert isinstance(source, DevicePages)
        self._copy(source._place, source_ids, self._place, page_ids)

    def _staging(self, data: Tensor, count: int) -> PagePlace:
        return PagePlace(data.data_ptr(), count * self._layout.layer_page_bytes)

    def _copy(
        self, source: PagePlace, source_ids: Sequence[int], target: PagePlace, target_ids: Sequence[int]
    ) -> None:
        if len(source_ids) != len(target_ids):
            raise RuntimeError(f"{len(source_ids)} pages to {len(target_ids)}")
        if not source_ids:
            return
        with torch.cuda.device(self._device):
            here, there = to_device([*source_ids, *target_ids], torch.int64, self._device).chunk(2)
            copy_pages(source, here, target, there, self._layout.layers, self._layout.layer_page_bytes)
