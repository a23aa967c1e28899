"""How many pages a node's KV pool gets. Arithmetic over numbers of bytes; asks no device.

On a GPU a node takes its part of the memory: weights, what a step needs beside them, and the pool the rest.
On a CPU it takes a tenth of what is available, and its part of two tenths where several nodes share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from common.config import EngineConfig
from common.engine.chunking import SATURATING_TOKENS
from common.errors import ConfigError
from common.kv.layout import DTYPE_BYTES, KVLayout
from common.kv.pool import default_num_pages
from common.model.spec import ModelSpec
from common.model.weights import tensor_shapes

GIB = 2**30
# A CUDA context with its loaded kernels, what cuBLAS and flashinfer work in, and the allocator's leftovers.
FIXED_BYTES = 3 * GIB // 2
# At the peak of sampling with filters, for a sampled token and vocabulary entry: f32 logits, their softmax,
# f64 sums, sorted copies with their i64 order.
_SAMPLING_BYTES = 52
_ACTIVATION_PARTS = 16  # of a node's memory may be one for activations
_PENALTY_BYTES = 5  # an i32 count and a mark, a row and vocabulary entry


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The largest step of a node, and its rows."""

    tokens: int
    samples: int
    rows: int


def weight_bytes(spec: ModelSpec, dtype: str) -> int:
    """Return the bytes of a model's weights on a GPU."""
    return sum(prod(shape) for shape in tensor_shapes(spec).values()) * DTYPE_BYTES[dtype]


def activation_bytes(spec: ModelSpec, dtype: str, tokens: int) -> int:
    """Return the bytes that a step's tokens take at its peak, in the feed-forward network."""
    qkv = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    # Residual, input, gate and up, their product, output.
    widest = max(4 * spec.hidden + 3 * spec.intermediate, 4 * spec.hidden + 2 * qkv)
    return tokens * widest * DTYPE_BYTES[dtype]


def gpu_prefill_budget(spec: ModelSpec, dtype: str, budget: int, part_bytes: int, page_size: int) -> int:
    """Return a budget whose activations take little of a node's part of a GPU: `budget`, or half of it, ...

    No batch is larger than the longest prompt, or what several prompts share; and it holds a page.
    """
    least = max(SATURATING_TOKENS, page_size)
    budget = min(budget, max(spec.context_length, least))
    while budget > least and activation_bytes(spec, dtype, budget) * _ACTIVATION_PARTS > part_bytes:
        budget = max(least, budget // 2)
    return budget


def step_bytes(spec: ModelSpec, dtype: str, sizes: StepSizes, page_size: int) -> int:
    """Return the bytes of device memory that steps take beside weights and pool."""
    activations = activation_bytes(spec, dtype, sizes.tokens)
    sampling = sizes.samples * spec.vocab_size * (_SAMPLING_BYTES + DTYPE_BYTES[dtype])
    penalties = (sizes.rows + 1) * spec.vocab_size * _PENALTY_BYTES
    page_table = (sizes.rows + 1) * -(-spec.context_length // page_size) * 8
    rope = spec.context_length * 2 * spec.head_dim * DTYPE_BYTES[dtype]
    return FIXED_BYTES + activations + sampling + penalties + page_table + rope


def gpu_num_pages(
    config: EngineConfig,
    layout: KVLayout,
    *,
    total_bytes: int,
    free_bytes: int,
    weight_bytes: int,
    beside_bytes: int,
) -> int:
    """Return the pages of a pool on a GPU.

    Args:
        config: its `kv_pages`, else its `gpu_memory_fraction`.
        layout: of a page.
        total_bytes: the GPU's memory.
        free_bytes: what nobody has taken, the weights in place.
        weight_bytes: what they took.
        beside_bytes: what `step_bytes` says.

    Raises:
        ConfigError: not a single page fits, or not as many as were asked for.
    """
    part = int(total_bytes * config.gpu_memory_fraction)
    room = min(part - weight_bytes, free_bytes) - beside_bytes
    wanted = config.kv_pages
    need = (1 + (wanted or 1)) * layout.page_bytes  # page 0 is padding
    if wanted is not None:
        room = free_bytes - beside_bytes  # who names a number does not mean a fraction
    if room < need:
        least = weight_bytes + beside_bytes + need
        raise ConfigError(
            f"a KV pool of {wanted or 1} pages does not fit on the GPU: weights {_gib(weight_bytes)}, steps "
            f"{_gib(beside_bytes)} and pool {_gib(need)} GiB need {_gib(least)} GiB; this node may take "
            f"{_gib(min(part, free_bytes + weight_bytes))} of {_gib(total_bytes)} GiB (--gpu-memory-fraction "
            f"{config.gpu_memory_fraction:g}, {_gib(free_bytes)} GiB free). Raise the fraction, free memory, "
            "or lower --kv-pages, --prefill-budget or --max-running"
        )
    return wanted or room // layout.page_bytes - 1


def cpu_num_pages(config: EngineConfig, layout: KVLayout, memory_bytes: int) -> int:
    """Pages of the pool: a tenth of the memory, and a node's part of the two tenths for all at most."""
    return config.kv_pages or default_num_pages(layout, memory_bytes * 2 // max(2, config.local_nodes or 2))


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
