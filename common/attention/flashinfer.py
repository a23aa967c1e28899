"""Attention on NVIDIA GPUs: long prompts by flashinfer, short ones and decode steps by our own (triton.py).

Measured on an H200, Llama-3.1-8B shape: flashinfer's prefill over contiguous keys reaches 650 TFLOP/s, over
pages 530 to 590, so prompts without a prefix take the first way. Our decode kernel is 3 to 15 % faster than
flashinfer's, needs no plan on the host, and takes any head size.

flashinfer's `plan` fills one pinned workspace and copies it to the device asynchronously: written again while
that copy is queued, it would be torn. So there are several, in a ring, each behind an event.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.attention.base import AttentionInputs, StepPlan, is_short
from common.attention.triton import TritonAttention
from common.device.packed import PackedBlock
from common.kv.pool import KVPool

log = logging.getLogger("baton.engine")

_WORKSPACE_BYTES = 384 << 20  # flashinfer's own advice is 128 MiB; long prompts in many pieces need more
_SLOTS = 4  # pinned workspaces: steps that can be planned before the first one's copy is done


@dataclass(eq=False, slots=True)
class _Slot:
    """A pinned workspace, and the copy that still reads it."""

    workspace: Tensor
    copied: torch.cuda.Event


@dataclass(frozen=True, slots=True)
class _Prefill:
    """What extends in a step: all of it over contiguous keys, or all of it over pages."""

    num_tokens: int
    attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, q, k, v)


def has_prefill_kernels(head_dim: int, dtype: torch.dtype) -> bool:
    """Say whether flashinfer's cache has kernels for prompts of this kind."""
    from flashinfer.jit import env

    kind = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    name = f"batch_prefill*dtype_q_{kind}_*head_dim_qk_{head_dim}_*/*.so"
    caches = [Path(folder) for folder in (env.FLASHINFER_AOT_DIR, env.FLASHINFER_JIT_DIR)]
    return any(cache.is_dir() and any(cache.glob(name)) for cache in caches)


def announce_build(head_dim: int, dtype: torch.dtype) -> None:
    """Say what is going to be built, where flashinfer's cache does not have it."""
    if not has_prefill_kernels(head_dim, dtype):
        log.info(
            "building flashinfer's prefill kernels for heads of %d in %s: 1 to 10 minutes, by the number of "
            "cores; once, then they are cached",
            head_dim,
            dtype,
        )


class FlashInferAttention:
    """An AttentionBackend for one GPU.

    Args:
        pool: on that GPU.
        num_heads: query heads.
        max_requests: of a step, padding included.
    """

    def __init__(self, pool: KVPool, num_heads: int, max_requests: int) -> None:
        import flashinfer

        layout, device = pool.layout, pool.device
        self._heads, self._layout, self._dtype = num_heads, layout, pool.data.dtype
        self._pages = pool.data.unbind(0)
        properties = torch.cuda.get_device_properties(device)
        backend = "fa3" if properties.major == 9 else "fa2"
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._ragged: Any = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=backend)
        self._paged: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        pinned = self._ragged._pin_memory_int_workspace_buffer
        self._slots = [
            _Slot(torch.empty(pinned.shape, dtype=pinned.dtype, pin_memory=True), torch.cuda.Event())
            for _ in range(_SLOTS)
        ]
        self._next_slot = 0
        self._own = TritonAttention(pool, num_heads, max_requests)
        self._inputs: AttentionInputs | None = None
        self._prefill: _Prefill | None = None

    def pack(
        self,
        block: PackedBlock,
        prefix_lens: Sequence[int],
        extend_lens: Sequence[int],
        num_decode: int,
        pad: int,
    ) -> StepPlan:
        """See AttentionBackend."""
        num_extend = len(extend_lens) - num_decode
        prefixes, chunks = prefix_lens[:num_extend], extend_lens[:num_extend]
        seq_lens = [prefix + chunk for prefix, chunk in zip(prefixes, chunks, strict=True)]
        if self.can_capture(seq_lens, sum(chunks)):
            return self._own.pack(block, prefix_lens, extend_lens, num_decode, pad)
        return StepPlan(self._own.pack_decode(block, prefix_lens, num_decode, pad), None)

    def can_capture(self, seq_lens: Sequence[int], tokens: int) -> bool:
        """See AttentionBackend: where prompts are ours to attend with, short ones."""
        return is_short(seq_lens, tokens)

    def plan(self, inputs: AttentionInputs) -> None:
        """See AttentionBackend."""
        self._inputs = inputs
        self._own.plan(inputs)
        num_extend = len(inputs.extend_lens_cpu) - inputs.num_decode
        self._prefill = None
        assert inputs.plan is not None
        if num_extend and inputs.plan.blocks is None:
            prefix_lens = inputs.prefix_lens_cpu[:num_extend]
            extend_lens = inputs.extend_lens_cpu[:num_extend]
            if any(prefix_lens):
                self._prefill = self._plan_paged(inputs, prefix_lens, extend_lens)
            else:
                self._prefill = self._plan_ragged(extend_lens)

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See AttentionBackend."""
        inputs, prefill = self._inputs, self._prefill
        assert inputs is not None
        if prefill is None:
            return self._own.forward(layer, q, k, v)
        n = prefill.num_tokens
        extended = prefill.attend(layer, q[:n], k[:n], v[:n])
        if not inputs.num_decode:
            return extended
        return torch.cat((extended, self._own.decode(layer, q[n:], inputs)))

    def _plan_ragged(self, extend_lens: Sequence[int]) -> _Prefill:
        """No prompt has a prefix: its keys and values are all at hand, contiguous."""
        indptr = _pinned((0, *accumulate(extend_lens)))
        layout, wrapper = self._layout, self._ragged

        def plan() -> None:
            wrapper.plan(
                indptr,
                indptr,
                self._heads,
                layout.kv_heads,
                layout.head_dim,
                causal=True,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
            )

        self._in_slot(wrapper, plan)
        return _Prefill(sum(extend_lens), lambda _, q, k, v: wrapper.run(q, k, v))

    def _plan_paged(
        self, inputs: AttentionInputs, prefix_lens: Sequence[int], extend_lens: Sequence[int]
    ) -> _Prefill:
        layout, wrapper = self._layout, self._paged
        size = layout.page_size
        lens = [prefix + extend for prefix, extend in zip(prefix_lens, extend_lens, strict=True)]
        num_pages = [layout.pages_for(length) for length in lens]
        # The ids come from the mirror, on the device: the host's would be copied blocking.
        tables = [
            inputs.page_table.index_select(0, inputs.rows[i : i + 1])[0, :count]
            for i, count in enumerate(num_pages)
        ]
        ids = torch.cat(tables).int()
        qo_indptr, kv_indptr = _pinned((0, *accumulate(extend_lens))), _pinned((0, *accumulate(num_pages)))
        last_page_lens, seq_lens = _pinned([(length - 1) % size + 1 for length in lens]), _pinned(lens)

        def plan() -> None:
            wrapper.plan(
                qo_indptr,
                kv_indptr,
                ids,
                last_page_lens,
                self._heads,
                layout.kv_heads,
                layout.head_dim,
                size,
                causal=True,
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
                seq_lens=seq_lens,  # it would make them itself, in pageable memory
            )

        self._in_slot(wrapper, plan)
        return _Prefill(sum(extend_lens), lambda layer, q, k, v: wrapper.run(q, self._pages[layer]))

    def _in_slot(self, wrapper: Any, plan: Callable[[], None]) -> None:
        """Plan with a pinned workspace that no copy reads any more."""
        slot = self._slots[self._next_slot]
        self._next_slot = (self._next_slot + 1) % _SLOTS
        # Done long ago, unless more steps than slots are planned ahead of the device.
        slot.copied.synchronize()
        wrapper._pin_memory_int_workspace_buffer = slot.workspace
        plan()
        slot.copied.record()


def _pinned(values: Sequence[int]) -> Tensor:
    """Return [len(values)] i32 in fresh pinned memory, which flashinfer copies without blocking."""
    host = torch.empty(len(values), dtype=torch.int32, pin_memory=True)
    host.numpy()[:] = np.asarray(values, np.int32)
    return host
