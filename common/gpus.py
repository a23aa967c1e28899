"""Which GPUs this process sees, and which one a node runs on.

Loads torch only where there is a driver: a node asks `wants_gpu` before it sets the environment that torch
reads, and on a machine without GPUs nobody waits for torch to say so. It must not know what runs on them.
"""

from __future__ import annotations

import ctypes
import logging
import os
import warnings

from common.config import EngineConfig, TransferConfig
from common.errors import ConfigError

log = logging.getLogger("baton.gpus")


def wants_gpu(config: EngineConfig) -> bool:
    """Say whether a node of these settings is to run on a GPU, as far as is known without torch.

    Raises:
        ConfigError: --gpu with --device cpu.
    """
    if config.device == "cpu" and config.gpu is not None:
        raise ConfigError(f"--gpu {config.gpu} does not go with --device cpu")
    return config.device == "cuda" or (config.device == "auto" and _has_driver())


def count_gpus(config: EngineConfig) -> int:
    """Return how many GPUs nodes of these settings can choose from, as CUDA counts; 0 is the CPU.

    Raises:
        ConfigError: --device cuda without a GPU, or a `gpu` that is not there.
    """
    wanted = wants_gpu(config)
    num_gpus, why_none = _visible_gpus() if wanted else (0, "this machine has no driver for GPUs")
    if num_gpus == 0 and config.device == "cuda":
        raise ConfigError(f"--device cuda: {why_none}")
    if config.gpu is not None and config.gpu >= num_gpus:
        there = f"torch sees {num_gpus}, numbered from 0" if num_gpus else why_none
        raise ConfigError(f"--gpu {config.gpu}: {there}")
    if wanted and num_gpus == 0:
        log.warning("running on the CPU: %s", why_none)
    return num_gpus


def check_device(engine: EngineConfig, transfer: TransferConfig, num_gpus: int) -> None:
    """See that nodes can do there what they are asked for; to be known before a model is fetched or loaded.

    Args:
        num_gpus: as from `count_gpus`.

    Raises:
        ConfigError: what needs a GPU, and there is none, or what only a CPU does.
    """
    if num_gpus == 0 and transfer.transfer == "cuda-ipc":
        raise ConfigError("--transfer cuda-ipc is for nodes on GPUs; on the CPU take auto, shm or frames")
    if num_gpus > 0 and transfer.transfer == "shm":
        raise ConfigError("--transfer shm is for nodes on the CPU; on GPUs take auto, cuda-ipc or frames")
    if num_gpus == 0 and engine.attention in ("flashinfer", "triton"):
        raise ConfigError(f"--attention {engine.attention}: it needs a GPU")
    if engine.cuda_graphs == "on" and (num_gpus == 0 or engine.attention == "sdpa"):
        raise ConfigError("--cuda-graphs on needs a GPU, and no --attention sdpa")


def node_gpu(config: EngineConfig) -> int | None:
    """Return the number of the GPU that this node runs on, None for the CPU. ConfigError: see count_gpus."""
    return None if count_gpus(config) == 0 else config.gpu or 0


def _has_driver() -> bool:
    """Say whether CUDA's driver library is here, without which torch finds no GPU."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _visible_gpus() -> tuple[int, str]:
    """Return what torch counts, and what it says where that is nothing."""
    import torch  # the rest of this file comes before it

    if torch.version.cuda is None:
        without = f"torch {torch.__version__} was built without CUDA"
        return 0, f"{without}: install torch's CUDA build, or use --device cpu"
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    why = "" if chosen is None else f" with CUDA_VISIBLE_DEVICES={chosen}"
    # device_count alone asks the driver's own tools, which also see GPUs that this torch cannot use.
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    reasons = [str(warning.message).splitlines()[0] for warning in said]
    what = "; ".join([f"no GPU is usable by torch {torch.__version__}{why}", *reasons])
    return torch.cuda.device_count() if usable else 0, what
