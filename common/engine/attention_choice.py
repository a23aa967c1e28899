"""Which code computes attention on this node, and whether its steps are captured as CUDA graphs."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from pathlib import Path

import torch

from common.attention.base import AttentionBackend
from common.attention.sdpa import SdpaAttention
from common.config import EngineConfig
from common.engine.cuda_graphs import decode_sizes
from common.errors import ConfigError
from common.kv.pool import KVPool
from common.model.spec import ModelSpec

log = logging.getLogger("baton.engine")

FLASHINFER_HEAD_DIMS = (64, 128, 256)  # that its prefill kernels are built for
MAX_FLOAT32_HEAD_DIM = 128  # of our own kernels: shared memory holds no more on every GPU
FLASHINFER_HINT = 'install it with: pip install -e ".[cuda]"'


def choose_attention(
    config: EngineConfig, spec: ModelSpec, dtype: str, device: torch.device, *, prefills: bool
) -> str:
    """Return "flashinfer", "triton" or "sdpa"; what is not the fastest says why.

    `prefills`: this node computes prompts.

    Raises:
        ConfigError: what was asked for by name cannot be had.
    """
    wanted = config.attention
    if device.type == "cpu" and wanted in ("flashinfer", "triton"):
        raise ConfigError(f"--attention {wanted}: it needs a GPU")
    if wanted == "sdpa" or device.type == "cpu":
        return "sdpa"
    if dtype == "float32":
        if wanted == "flashinfer":
            raise ConfigError("--attention flashinfer computes in bfloat16 and float16, not in float32")
        if wanted == "triton" and spec.head_dim > MAX_FLOAT32_HEAD_DIM:
            raise ConfigError(f"--attention triton has no room for heads of {spec.head_dim} in float32")
        if wanted == "auto":
            log.warning("attention is sdpa, the slow reference, without CUDA graphs: the model is in float32")
            return "sdpa"
    if wanted == "triton" or not prefills:  # decode steps are ours in any case
        return "triton"
    reason = _why_no_flashinfer(spec)
    if reason is None:
        return "flashinfer"
    if wanted == "flashinfer":
        raise ConfigError(f"--attention flashinfer: {reason}")
    log.warning("long prompts are slower than they could be, without flashinfer: %s", reason)
    return "triton"


def fell_back(config: EngineConfig, backend: str, device: torch.device, *, prefills: bool) -> bool:
    """Say whether "auto" became what is not the fastest on a GPU."""
    best = "flashinfer" if prefills else "triton"
    return device.type == "cuda" and config.attention == "auto" and backend != best


def make_attention(backend: str, pool: KVPool, heads: int, max_running: int) -> AttentionBackend:
    """Make the backend that `choose_attention` named, over a pool."""
    if backend == "sdpa":
        return SdpaAttention(pool, heads)
    most = max(decode_sizes(max_running)[-1], max_running)
    # Both need what only torch's CUDA builds bring along.
    if backend == "triton":
        from common.attention.triton import TritonAttention

        return TritonAttention(pool, heads, most)
    from common.attention.flashinfer import FlashInferAttention, announce_build

    announce_build(pool.layout.head_dim, pool.data.dtype)
    return FlashInferAttention(pool, heads, most)


def captures_graphs(config: EngineConfig, backend: str) -> bool:
    """Say whether steps are captured as CUDA graphs; one of sdpa has shapes of its own each time.

    Raises:
        ConfigError: graphs were asked for by name, and cannot be had.
    """
    if config.cuda_graphs == "off" or (config.cuda_graphs == "auto" and backend == "sdpa"):
        return False
    if backend == "sdpa":
        raise ConfigError(
            "--cuda-graphs on needs attention other than sdpa, which float32 has: take --dtype bfloat16 or "
            "--attention triton"
        )
    return True


def _why_no_flashinfer(spec: ModelSpec) -> str | None:
    if spec.head_dim not in FLASHINFER_HEAD_DIMS:
        return f"it has no kernels for heads of {spec.head_dim}"
    if importlib.util.find_spec("flashinfer") is None:
        return f"it is not installed; {FLASHINFER_HINT}"
    if importlib.util.find_spec("flashinfer_jit_cache") is None and not _has_nvcc():
        return (
            "it builds its kernels with nvcc, which is not here; install NVIDIA's CUDA toolkit (and set "
            "CUDA_HOME where it is not /usr/local/cuda), or the package flashinfer-jit-cache"
        )
    return None


def _has_nvcc() -> bool:
    """Look for the compiler where flashinfer does."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    return shutil.which("nvcc") is not None or any(
        Path(home, "bin", "nvcc").is_file() for home in homes if home
    )
