"""The data planes between two processes: pages really moved, and how fast; by the parts of `baton bench`.

The other process is a prefill node's end without a model; this one is a decode node's. Each plane is a check
of its own, with another pair of processes: one that hangs does not hide the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from common.errors import ConfigError, LocalError
from common.kv.layout import KVLayout
from doctor.asked import Asked, Check
from doctor.finding import Finding, ok, problem, warning
from doctor.gpus import gpus_of_nodes, usable_gpus
from doctor.last_words import last_words

if TYPE_CHECKING:
    import torch

# What is moved: 128 pages of SmolLM2's shape (47 MB), or 256 of Llama-3.1-8B's (512 MiB).
_SHAPES = {
    "cpu": (KVLayout(30, 16, 3, 64, "bfloat16"), 128),
    "cuda": (KVLayout(32, 16, 8, 128, "bfloat16"), 256),
}
_QUICK_PAGES = 8
_ROUNDS = 7
_PATIENCE_S = {"cpu": 25.0, "cuda": 60.0}  # on a GPU the copying kernel may have to be built
# Of one plain copy's speed: a third to a fifth of what a quiet machine measured (README.md).
_LEAST_SHARE = {"shm": 0.1, "frames": 0.03, "cuda-ipc": 0.15}


def judge_rate(plane: str, rate: float, copy_rate: float) -> Finding:
    """Hold a plane's rate against that of one plain copy of the same bytes; both in GB/s."""
    share = rate / copy_rate
    found = f"{rate:.1f} GB/s between two processes; one plain copy {copy_rate:.1f} GB/s"
    facts = {"gb_per_s": round(rate, 3), "plain_copy_gb_per_s": round(copy_rate, 3)}
    if share < _LEAST_SHARE[plane]:
        return warning(
            f"{found}: less than {_LEAST_SHARE[plane]:.0%} of that is less than it should be",
            "look again when the machine is quiet; baton bench transfer measures more",
            **facts,
        )
    return ok(found, **facts)


def judge_failure(plane: str, why: str, transfer: str) -> Finding:
    """Say what follows from a plane that does not work."""
    if plane != "frames" and transfer != plane:
        remedy = "see what it names; the checks process-memory (shm) and peer-access (cuda-ipc) look closer"
        if transfer == "frames":
            return ok(f"does not work ({why}); --transfer frames does not need it")
        return warning(f"does not work ({why}): pages travel as frames, which is slower", remedy)
    return problem(f"does not work: {why}", "see what the reason names; no prompt can be handed over so")


def _ends(asked: Asked) -> tuple[torch.device, torch.device]:
    """Return where the first prefill node and the first decode node have their pools."""
    import torch

    places = gpus_of_nodes(asked, usable_gpus(asked))
    if not places:
        return torch.device("cpu"), torch.device("cpu")
    target = places["decode-0"]
    return torch.device("cuda", places.get("prefill-0", target)), torch.device("cuda", target)


def _try(plane: str, asked: Asked) -> Iterator[Finding]:
    from common.node import PLANES

    source, target = _ends(asked)
    if plane not in PLANES[source.type] or asked.config.decode.colocated:
        return
    try:
        yield _moved(plane, source, target, is_quick=asked.doctor.quick)
    except (LocalError, ConfigError) as error:
        reason = last_words(2, f"no plane {plane}").partition(f"no plane {plane}")[2]
        why = reason.partition(": ")[2] or str(error)
        yield judge_failure(plane, why, asked.config.transfer.transfer)


def _moved(plane: str, source: torch.device, target: torch.device, *, is_quick: bool) -> Finding:
    """Move pages over a plane.

    Raises:
        LocalError: they do not come.
        ConfigError: there is no memory for them.
    """
    import torch
    import zmq

    from benchmarks.device_limits import PlainCopy
    from benchmarks.plane_receiver import PlaneReceiver, peer
    from common.kv.pool import KVPool
    from common.supervision.small_machine import keep_freed_memory

    keep_freed_memory()  # as the nodes do
    layout, num_pages = _SHAPES[source.type]
    num_pages = _QUICK_PAGES if is_quick else num_pages
    if target.type == "cuda":
        torch.cuda.set_device(target)
    pool_pages = num_pages * 5 // 4  # so that pages are scattered
    with peer(layout, pool_pages, str(source), (plane,)) as other, zmq.Context() as context:
        pool = KVPool(layout, pool_pages, target, shared=True)
        pool.data.zero_()  # so that the system has given the memory
        if target.type == "cuda":
            torch.cuda.synchronize(target)
        with closing(PlaneReceiver(context, other, plane, pool, _PATIENCE_S[source.type])) as receiver:
            receiver.connect()
            receiver.hand_over(pool_pages)
            receiver.check()
            ends = "" if source.type == "cpu" else f" from {source} to {target}"
            if is_quick:
                return ok(f"pages move between two processes{ends}")
            copy = PlainCopy(source, target, pool_pages * layout.page_bytes)
            num_bytes = num_pages * layout.page_bytes
            copy.copy_s(num_bytes)
            times_s, copies_s = [], []
            for _ in range(_ROUNDS):  # in turns; the best counts, as others use this machine too
                times_s.append(receiver.hand_over(num_pages).from_post_s)
                copies_s.append(copy.copy_s(num_bytes))
    return judge_rate(plane, num_bytes / min(times_s) / 1e9, num_bytes / min(copies_s) / 1e9)


CHECKS = (
    Check(
        "plane-shm",
        "Nodes on the CPU: pages moved by shared memory, with the rate beside that of a plain copy.",
        "It does not work, so that frames are taken; or it is much slower than it should be.",
        "It does not work, and `--transfer shm` was asked for.",
        partial(_try, "shm"),
        limit_s=75.0,
    ),
    Check(
        "plane-cuda-ipc",
        "Nodes on GPUs: pages moved by CUDA IPC from the first prefill node's GPU to the first decode "
        "node's, with the "
        "rate beside that of a plain copy.",
        "It does not work, so that frames are taken; or it is much slower than it should be.",
        "It does not work, and `--transfer cuda-ipc` was asked for.",
        partial(_try, "cuda-ipc"),
        limit_s=180.0,
    ),
    Check(
        "plane-frames",
        "Pages moved in ZeroMQ frames, with the rate beside that of a plain copy.",
        "It is much slower than it should be.",
        "It does not work: there is nothing else to fall back to.",
        partial(_try, "frames"),
        limit_s=180.0,
    ),
)
