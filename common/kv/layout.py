"""The shape of KV pages: what both ends of a hand-over must agree on.

Knows no tensor; `kv/pool.py` builds one of this shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from common.codec import Range

_Dim = Annotated[int, Range(1, 2**20)]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """A page holds `page_size` tokens of every layer: [layers, 2 (K, V), page_size, kv_heads, head_dim]."""

    layers: _Dim
    page_size: _Dim
    kv_heads: _Dim
    head_dim: _Dim
    dtype: str

    @property
    def layer_page_bytes(self) -> int:
        """Bytes of one page in one layer, K and V."""
        return 2 * self.page_size * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers: what a hand-over moves."""
        return self.layers * self.layer_page_bytes

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)
