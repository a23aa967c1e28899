"""How much shared memory a program may have: what its pipelines are cut to.

CUDA's programming guide, technical specifications: "maximum amount of shared memory per thread block".
"""

from __future__ import annotations

from functools import cache

import torch

_KIB = 1 << 10
_BY_CAPABILITY = {
    (7, 5): 64 * _KIB,
    (8, 0): 163 * _KIB,
    (8, 7): 163 * _KIB,
    (9, 0): 227 * _KIB,
    (10, 0): 227 * _KIB,
    (10, 3): 227 * _KIB,
    (11, 0): 227 * _KIB,
}
_ELSEWHERE = 99 * _KIB  # consumer cards


@cache
def shared_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that a program on a device may have."""
    if device.type != "cuda":  # Triton's interpreter
        return _ELSEWHERE
    return _BY_CAPABILITY.get(torch.cuda.get_device_capability(device), _ELSEWHERE)


def pipeline_stages(device: torch.device, stage_bytes: int, most: int) -> int:
    """Return how many stages of loads fit, a little room left for the rest; at least one."""
    return max(1, min(most, (shared_bytes(device) - 3 * _KIB) // stage_bytes))
