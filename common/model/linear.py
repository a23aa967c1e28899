"""A linear layer whose weight lies as the device's matrix kernels want it.

On a CPU, oneDNN packs a plain weight into its blocks anew at every call. Packed once, a decode step takes
half the time, in float32 a prefill too; the products are the same. Knows no model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

# The number of tokens that the blocks are made for. More than a few give one format, good for any number.
_PACK_TOKENS = 512


def can_pack(weight: Tensor) -> bool:
    """Say whether oneDNN computes with this weight natively here."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    match weight.dtype:
        case torch.float32:
            return True
        case torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        case torch.float16:
            return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
        case _:
            return False


class Linear:
    """x [tokens, in] -> x @ weight.T + bias [tokens, out]. Keeps no plain copy of a weight that it packs."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.bias = bias
        self._is_packed = can_pack(weight)
        # What torch's own compiler calls for a frozen model (torch/_inductor/fx_passes/mkldnn_fusion.py).
        self.weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_TOKENS) if self._is_packed else weight
        )
        self._multiply = torch.ops.mkldnn._linear_pointwise.default if self._is_packed else None

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Multiply; into `out` [tokens, out], where it is given."""
        if out is not None and self._multiply is None and self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        if self._multiply is None:
            product = F.linear(x, self.weight, self.bias)
        else:
            product = self._multiply(x, self.weight, self.bias, "none", [], "")
        return product if out is None else out.copy_(product)
