"""The device's mirror of the page table: row -> page ids. The host's is the truth; this is never read back.

A row is written when its pages are granted, so that building a PREBUILT batch costs nothing that grows with
the prompt; what a request gets later comes with a step's other numbers. Entries past a request's pages are 0,
the padding page.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.device.pinned import to_device


class PageTableMirror:
    """[rows + 1, pages] i64 on the device; row 0 is padding."""

    def __init__(self, num_rows: int, max_pages: int, device: torch.device) -> None:
        self.table = torch.zeros((num_rows + 1, max_pages), dtype=torch.int64, device=device)

    def set_row(self, row: int, page_ids: Sequence[int]) -> None:
        """Mirror a row's pages, on the current stream."""
        self.table[row].zero_()
        self.table[row, : len(page_ids)] = to_device(page_ids, torch.int64, self.table.device)

    def places_of(
        self, entries: Sequence[tuple[int, int, int]]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where (row, column, page) entries lie in the flat table, and their pages: [entries] each."""
        rows, columns, pages = np.asarray(entries, np.int64).T
        return rows * self.table.shape[1] + columns, pages

    def set_places(self, places: Tensor, pages: Tensor) -> None:
        """Write pages [entries] i64 at places [entries] i64 of the flat table, on the current stream."""
        self.table.view(-1).index_copy_(0, places, pages)
