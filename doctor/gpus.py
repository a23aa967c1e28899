"""GPUs: which there are, what they can, what is free, who reaches whose memory. Reads, and sets nothing.

What torch and nvidia-smi say becomes `Gpu` records; what is made of those needs no GPU.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from common.errors import ConfigError
from common.gpus import count_gpus, wants_gpu
from common.supervision.serve import place_nodes
from doctor.asked import Asked, Check
from doctor.finding import Fact, Finding, ok, problem, warning
from doctor.machine import GIB

_SMI_FIELDS = (
    "uuid",
    "driver_version",
    "memory.free",  # MiB
    "compute_mode",
    "mig.mode.current",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
)
_SMI_S = 20.0
_LEAST_CAPABILITY = (8, 0)  # bfloat16 in its tensor cores
_BUSY_FRACTION = 0.1


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as CUDA numbers it; "" where nobody says."""

    index: int
    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    driver: str = ""
    compute_mode: str = ""
    mig: str = ""
    ecc: str = ""
    ecc_errors: int = 0  # uncorrected, since the driver was loaded


def parse_smi(text: str) -> dict[str, dict[str, str]]:
    """Read what `nvidia-smi --query-gpu` printed, by the UUID without its prefix."""
    rows = [dict(zip(_SMI_FIELDS, line.split(", "), strict=False)) for line in text.splitlines() if line]
    return {row["uuid"].removeprefix("GPU-"): row for row in rows}


def gpu_of(
    index: int,
    name: str,
    capability: tuple[int, int],
    total_bytes: int,
    free_bytes: int,
    said: Mapping[str, str],
) -> Gpu:
    """Put together what torch and nvidia-smi say of one GPU."""

    def word(field: str) -> str:
        text = said.get(field, "")
        return "" if text.startswith("[") else text  # [N/A], [Not Supported]

    free = word("memory.free")
    errors = word("ecc.errors.uncorrected.volatile.total")
    return Gpu(
        index=index,
        name=name,
        capability=capability,
        total_bytes=total_bytes,
        free_bytes=int(free) << 20 if free.isdecimal() else free_bytes,
        driver=word("driver_version"),
        compute_mode=word("compute_mode"),
        mig=word("mig.mode.current"),
        ecc=word("ecc.mode.current"),
        ecc_errors=int(errors) if errors.isdecimal() else 0,
    )


def read_gpus(num_gpus: int) -> tuple[Gpu, ...]:
    """Ask torch and nvidia-smi."""
    import torch

    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SMI_S).stdout
    except (OSError, subprocess.SubprocessError):
        text = ""  # torch's facts do
    said = parse_smi(text)
    gpus = []
    for index in range(num_gpus):
        facts = torch.cuda.get_device_properties(index)
        row = said.get(str(facts.uuid).removeprefix("GPU-"), {})
        free_bytes = 0 if row else torch.cuda.mem_get_info(index)[0]  # that makes a context there
        capability = (facts.major, facts.minor)
        gpus.append(gpu_of(index, facts.name, capability, facts.total_memory, free_bytes, row))
    return tuple(gpus)


def judge_gpu(gpu: Gpu, num_nodes: int) -> Finding:
    """Say what a GPU is good for. `num_nodes` of the server run there."""
    about = [f"compute capability {gpu.capability[0]}.{gpu.capability[1]}"]
    about += [f"driver {gpu.driver}"] if gpu.driver else []
    about += [f"{name} {value.lower()}" for name, value in (("ECC", gpu.ecc), ("MIG", gpu.mig)) if value]
    free, total = gpu.free_bytes / GIB, gpu.total_bytes / GIB
    found = f"GPU {gpu.index}: {gpu.name}, {free:.1f} of {total:.1f} GiB free, {', '.join(about)}"
    facts: dict[str, Fact] = {
        "gpu": gpu.index,
        "free_bytes": gpu.free_bytes,
        "total_bytes": gpu.total_bytes,
        "driver": gpu.driver,
    }
    if gpu.compute_mode == "Prohibited" or (gpu.compute_mode == "Exclusive_Process" and num_nodes > 1):
        return problem(
            f"{found}: its compute mode is {gpu.compute_mode}, and {num_nodes} nodes are to run there",
            "give each node a GPU of its own (--prefill-gpus, --decode-gpus), or ask whoever set the mode",
            **facts,
        )
    if gpu.ecc_errors:
        return warning(
            f"{found}: {gpu.ecc_errors} memory errors that ECC could not correct",
            "run other diagnostics, and take another GPU until it is known to be sound",
            **facts,
        )
    if gpu.capability < _LEAST_CAPABILITY:
        return warning(
            f"{found}: it has no units for bfloat16, and our kernels were not tried on it",
            "try --dtype float16, or take a GPU of compute capability 8.0 or more",
            **facts,
        )
    if num_nodes and gpu.free_bytes < gpu.total_bytes * (1 - _BUSY_FRACTION):
        return warning(
            f"{found}: others hold {total - free:.1f} GiB",
            "end what runs there (nvidia-smi lists it), or lower --gpu-memory-fraction",
            **facts,
        )
    return ok(found, **facts)


def judge_peers(pairs: Mapping[tuple[int, int], bool], needed: Collection[tuple[int, int]]) -> Finding:
    """Say which GPUs reach each other's memory.

    Args:
        pairs: from, to -> whether the first reaches the second.
        needed: those between a prefill node and a decode node.
    """
    cut = [pair for pair, reaches in pairs.items() if not reaches]
    lacking = sorted(set(cut) & set(needed))
    names = ", ".join(f"{a} to {b}" for a, b in lacking or cut)
    if lacking:
        return warning(
            f"no peer access from GPU {names}: pages travel there as frames, through the host",
            "place prefill and decode nodes on GPUs that reach each other (nvidia-smi topo -m; "
            "--prefill-gpus, "
            "--decode-gpus); in a virtual machine or container, ask its host",
        )
    if cut:
        return ok(f"no peer access from GPU {names}, which this server does not need")
    return ok(f"all {len({a for a, _ in pairs})} GPUs reach each other's memory")


def gpus_of_nodes(asked: Asked, num_gpus: int) -> dict[str, int]:
    """Return the GPU of each node; nothing where the placing fails (see the check `nodes`)."""
    try:
        return {name: share.gpu for name, share in place_nodes(asked.config, num_gpus).items()}
    except ConfigError:
        return {}


def pairs_of_nodes(places: Mapping[str, int]) -> list[tuple[int, int]]:
    """Return each prefill node's GPU with each decode node's, where they differ."""
    sources = {gpu for name, gpu in places.items() if name.startswith("prefill")}
    targets = {gpu for name, gpu in places.items() if name.startswith("decode")}
    return sorted((a, b) for a in sources for b in targets if a != b)


def judge_absence(device: str, why: str | None) -> Finding:
    """Say what it means that no GPU is used. `why`: a driver is here, and still no GPU can be used."""
    if device == "cpu":
        return ok("not looked for: --device cpu")
    if why is None:
        return ok("none (no NVIDIA driver): nodes run on the CPU")
    return warning(
        f"{why}: nodes run on the CPU",
        "install torch's CUDA build and a driver that fits it; or say --device cpu, if that is what you want",
    )


def _gpus(asked: Asked) -> Iterator[Finding]:
    engine = asked.config.engine
    try:
        is_wanted = wants_gpu(engine)
        num_gpus = count_gpus(engine) if is_wanted else 0
    except ConfigError as error:
        yield problem(str(error), "install what it names, or leave --device and --gpu out")
        return
    if num_gpus == 0:
        yield judge_absence(engine.device, _why_none() if is_wanted else None)
        return
    nodes = Counter(gpus_of_nodes(asked, num_gpus).values())
    for gpu in read_gpus(num_gpus):
        yield judge_gpu(gpu, nodes[gpu.index])


def _why_none() -> str:
    """Return why `--device cuda` would be refused."""
    from common.config import EngineConfig

    try:
        count_gpus(EngineConfig(device="cuda"))
    except ConfigError as error:
        return str(error).removeprefix("--device cuda: ")
    return "a GPU came up just now"


def usable_gpus(asked: Asked) -> int:
    """Return how many GPUs nodes choose from; 0 also where the options do not go with them."""
    try:
        return count_gpus(asked.config.engine)
    except ConfigError:
        return 0


def _peer_access(asked: Asked) -> Iterator[Finding]:
    num_gpus = usable_gpus(asked)
    if num_gpus < 2:
        return
    yield judge_peers(read_peers(range(num_gpus)), pairs_of_nodes(gpus_of_nodes(asked, num_gpus)))


def read_peers(indices: Sequence[int]) -> dict[tuple[int, int], bool]:
    """Ask the driver of each pair."""
    import torch

    return {(a, b): torch.cuda.can_device_access_peer(a, b) for a in indices for b in indices if a != b}


CHECKS = (
    Check(
        "gpus",
        "Each GPU: name, free memory, driver, compute capability, compute mode, ECC and MIG. Where there is "
        "none, "
        "that is said, and well.",
        "There is a driver, and torch can use no GPU; a GPU is older than compute capability 8.0, has memory "
        "errors, or "
        "a tenth of its memory is taken.",
        "`--device cuda` or `--gpu` asks for a GPU that is not there, or its compute mode forbids the nodes.",
        _gpus,
        limit_s=60.0,
    ),
    Check(
        "peer-access",
        "For each pair of GPUs, whether kernels of one reach the memory of the other.",
        "Those of a prefill node and a decode node do not: pages travel as frames.",
        "",
        _peer_access,
        limit_s=60.0,
    ),
)
