"""Kernels launched ahead of their inputs (programmatic dependent launch, from Hopper on).

A kernel launched so starts while the one before it still runs, as soon as multiprocessors have room, and
waits for it on the device: the microsecond between two kernels is gone. What it reads before the wait must
not come from a kernel of the chain.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_HOPPER = 9
# A kernel that fills the GPU releases the next one at its start in steps of so few tokens, and at its end in
# others: the waiting programs would take the room of the running ones (H200: 4.34 against 4.44 ms a step for
# one request, 6.90 against 6.84 for 64).
EARLY_TOKENS = 32


@triton.jit
def release_next(AHEAD: tl.constexpr):
    """Let the next kernel start where there is room, to wait there for this one; nothing without AHEAD."""
    if AHEAD:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(AHEAD: tl.constexpr):
    """Wait until the kernel before this one is done; nothing without AHEAD."""
    if AHEAD:
        gdc_wait()


@cache
def launches_ahead(device: torch.device) -> bool:
    """Say whether kernels can be launched ahead on a device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _HOPPER
