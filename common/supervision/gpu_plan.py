"""Give each node of a server a GPU, and its part of that GPU's memory.

Pure; the number of GPUs is an argument. It must not know what nodes do, nor import torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from common.config import MIN_GPU_MEMORY_FRACTION
from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GpuShare:
    """One node's GPU, as CUDA counts, and the part of its memory that the node may take."""

    gpu: int
    memory_fraction: float


def parse_gpus(option: str, text: str | None) -> tuple[int, ...] | None:
    """Read a list like 0,1; None stays None.

    Raises:
        ConfigError: it is none. `option` is what the user calls it.
    """
    if text is None:
        return None
    numbers = [part.strip() for part in text.split(",")]
    if not all(number.isascii() and number.isdecimal() for number in numbers):
        raise ConfigError(f"{option} {text!r} is no list of GPU numbers like 0,1")
    return tuple(map(int, numbers))


def plan_gpus(
    num_gpus: int, phases: Sequence[tuple[int, Sequence[int] | None]], memory_fraction: float
) -> tuple[GpuShare, ...]:
    """Return each node's share, in the order of the phases.

    Nodes whose phase has a list take its GPUs in turn. Each of the others then takes the GPU that the fewest
    nodes are on, the first of them: in turn, where there is no list at all.

    Args:
        num_gpus: GPUs that are there, at least one.
        phases: how many nodes, and which GPUs were asked for them.
        memory_fraction: part of a GPU's memory for all nodes on it together.

    Raises:
        ConfigError: a GPU that is not there, or more nodes on one than it has room for.
    """
    missing = [gpu for _, chosen in phases for gpu in chosen or () if gpu >= num_gpus]
    if missing:
        raise ConfigError(
            f"GPU {missing[0]} is not there: torch sees {num_gpus}, numbered from 0 (CUDA_VISIBLE_DEVICES, "
            "where it is set, says which)"
        )
    for num_nodes, chosen in phases:
        if chosen and len(set(chosen)) > num_nodes:
            raise ConfigError(
                f"{len(set(chosen))} GPUs are named for {num_nodes} node{'s' * (num_nodes > 1)} "
                f"({','.join(map(str, chosen))}): a node runs on one; more nodes are --prefill N, --decode N"
            )
    asked = [
        chosen[i % len(chosen)] if chosen else None for num_nodes, chosen in phases for i in range(num_nodes)
    ]
    nodes = Counter(gpu for gpu in asked if gpu is not None)
    placed: list[int] = []
    for gpu in asked:
        if gpu is None:
            gpu = min(range(num_gpus), key=nodes.__getitem__)
            nodes[gpu] += 1
        placed.append(gpu)
    fractions = {gpu: round(memory_fraction / n, 4) for gpu, n in nodes.items()}
    for gpu, fraction in fractions.items():
        if fraction < MIN_GPU_MEMORY_FRACTION:
            raise ConfigError(
                f"{nodes[gpu]} nodes on GPU {gpu} have {fraction:g} of its memory each, but a node needs "
                f"{MIN_GPU_MEMORY_FRACTION:g}: start fewer, or raise --gpu-memory-fraction"
            )
    return tuple(GpuShare(gpu, fractions[gpu]) for gpu in placed)
