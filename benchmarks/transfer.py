"""KV pages from P's pool to D's, between two processes, beside one plain copy: `baton bench transfer`.

The planes are the nodes' own. A time goes from the moment in which P gives the pages to its plane, all of
them computed, to the moment in which D has them. On GPUs P is on the first and D on the second, where there
are two; otherwise both are on one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import zmq

from benchmarks.device_limits import PlainCopy, seconds_of
from benchmarks.options import choices_of, whole_numbers
from benchmarks.parts import Parts
from benchmarks.percentiles import median
from benchmarks.plane_peer import Context, PageSource
from benchmarks.plane_receiver import Moved, Peer, PlaneReceiver, peer
from benchmarks.report import Report
from benchmarks.targets import Targets, takes_targets
from common.config import EngineConfig, LogConfig
from common.errors import ConfigError
from common.gpus import count_gpus
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.log import set_up_logging
from common.model.spec import load_spec
from common.node import PLANES
from common.supervision.small_machine import keep_freed_memory

_PAGE_SIZE = 16
_LLAMA = Path(__file__).parent / "llama-3.1-8b"


@dataclass(frozen=True, slots=True)
class _Ends:
    """Where the two pools are."""

    source: torch.device
    target: torch.device

    @classmethod
    def of(cls, device: str) -> _Ends:
        num_gpus = count_gpus(EngineConfig(device=device))
        if num_gpus == 0:
            return cls(torch.device("cpu"), torch.device("cpu"))
        return cls(torch.device("cuda", 0), torch.device("cuda", 1 if num_gpus > 1 else 0))

    @property
    def name(self) -> str:
        if self.source.type == "cpu":
            return "on the CPU"
        if self.source == self.target:
            return f"within GPU {self.source.index}"
        return f"GPU {self.source.index} to GPU {self.target.index}"


def _planes(asked: str | None, ends: _Ends) -> Sequence[str]:
    """Return the planes to measure.

    Raises:
        ConfigError: one that was asked for is none, or does not work there.
    """
    possible = PLANES[ends.source.type]
    planes = asked.split(",") if asked else possible
    if wrong := [plane for plane in planes if plane not in possible]:
        raise ConfigError(f"--plane {wrong[0]}: the planes {ends.name} are {' and '.join(possible)}")
    return planes


@contextmanager
def _target(ends: _Ends, layout: KVLayout, num_pages: int) -> Iterator[tuple[Context, KVPool]]:
    """Make D's pool, and what its sockets need."""
    if ends.target.type == "cuda":
        torch.cuda.set_device(ends.target)
    context: Context = zmq.Context()
    try:
        yield context, KVPool(layout, num_pages, ends.target, shared=True)
    finally:
        context.destroy(linger=0)


def _connect(
    parts: Parts, stack: ExitStack, other: Peer, planes: Sequence[str], context: Context, pool: KVPool
) -> list[PlaneReceiver]:
    """Connect the planes that work, and move every page once: the first use of memory takes longer."""
    receivers = []
    for plane in planes:
        with parts.part(f"plane {plane}"):
            receiver = stack.enter_context(closing(PlaneReceiver(context, other, plane, pool)))
            receiver.connect()
            pool.data.zero_()
            if pool.device.type == "cuda":
                torch.cuda.synchronize(pool.device)
            receiver.hand_over(pool.num_pages)
            receiver.check()
            receivers.append(receiver)
    return receivers


@dataclass(frozen=True, slots=True)
class _Bench:
    """Planes that are connected, and where figures go."""

    targets: Targets
    layout: KVLayout
    receivers: Sequence[PlaneReceiver]
    copy: PlainCopy
    rounds: int

    def measure(self, tokens: int) -> None:
        """Time planes and copy in turns, and add their figures."""
        num_pages = self.layout.pages_for(tokens)
        num_bytes = num_pages * self.layout.page_bytes
        moved: dict[str, list[Moved]] = {receiver.plane: [] for receiver in self.receivers}
        copies_s = []
        for _ in range(self.rounds):
            for receiver in self.receivers:
                moved[receiver.plane].append(receiver.hand_over(num_pages))
            copies_s.append(self.copy.copy_s(num_bytes))
        copy_s = median(copies_s)
        self.targets.add(f"one plain copy, {tokens} tokens", copy_s * 1000, "ms")
        for plane, values in moved.items():
            self._add(f"{plane}, {tokens} tokens", values, num_bytes, copy_s)

    def _add(self, what: str, values: Sequence[Moved], num_bytes: int, copy_s: float) -> None:
        seconds = median([value.from_post_s for value in values])
        rate, limit = num_bytes / seconds / 1e9, num_bytes / copy_s / 1e9
        add = self.targets.add
        add(what, seconds * 1000, "ms", limit=copy_s * 1000, limit_name="one plain copy")
        add(what, rate, "GB/s", limit=limit, limit_name="one plain copy")
        add(f"{what}: share of a copy", rate / limit * 100, "%")
        add(f"{what}: from D's asking", median([value.from_grant_s for value in values]) * 1000, "ms")


def _add_pages_alone(
    targets: Targets, ends: _Ends, pool: KVPool, lengths: Sequence[int], rounds: int
) -> None:
    """Time the copy of scattered pages by this process: a one-sided plane without its messages."""
    layout, num_pages = pool.layout, pool.num_pages
    source = KVPool(layout, num_pages, ends.source)
    target = pool.pages
    if pool.device_memory is not None:
        from common.kv.device_pages import DevicePages  # needs triton

        # D's memory, as a kernel of P's GPU sees it.
        target = DevicePages(layout, num_pages, ends.source, pool.device_memory.address, pool)
    ours, theirs = PageSource(num_pages, seed=1), PageSource(num_pages, seed=2)
    for tokens in lengths:
        count = layout.pages_for(tokens)
        times_s = []
        for _ in range(rounds + 1):
            copy = partial(target.copy_from, theirs.take(count), source.pages, ours.take(count))
            times_s.append(seconds_of(copy, ends.source))
        rate = count * layout.page_bytes / median(times_s[1:]) / 1e9
        targets.add(f"pages alone, {tokens} tokens", rate, "GB/s")


@click.command()
@click.option(
    "--model", default=str(_LLAMA), help="Folder whose config.json has the shape  [default: Llama-3.1-8B]"
)
@click.option("--device", type=choices_of(EngineConfig, "device"), default="auto", show_default=True)
@click.option(
    "--tokens", default="128,1024,8192", show_default=True, callback=whole_numbers, help="Lengths of prompts."
)
@click.option("--plane", help="Planes, separated by commas  [default: those of the device]")
@click.option(
    "--rounds", type=click.IntRange(1), default=15, show_default=True, help="Of each; the median counts."
)
@click.option("--label", default="", help="Stands in the name of the saved file.")
@click.option("--save", is_flag=True, help="Keep the result in benchmarks/results.")
@takes_targets
def main(*, save: bool, **options: Any) -> None:
    """Time KV pages on their way from one process to another."""
    set_up_logging(LogConfig(log_level="warning"))
    keep_freed_memory()  # as the nodes do
    report = Report.of_command("transfer")
    parts = Parts(Targets.of(report, options["aim"], options["limit"]))
    ends = _Ends.of(options["device"])
    report.options["ends"] = ends.name
    planes = _planes(options["plane"], ends)
    spec = load_spec(Path(options["model"]), "dummy")
    layout = spec.kv_layout(_PAGE_SIZE, spec.dtype)
    click.echo(f"{ends.name}\n")
    # More than a prompt needs, so that its pages are scattered and not in a cache.
    num_pages = layout.pages_for(max(options["tokens"])) * 5 // 4 + 1
    with (
        peer(layout, num_pages, str(ends.source), planes) as other,
        _target(ends, layout, num_pages) as (context, pool),
        ExitStack() as stack,
    ):
        copy = PlainCopy(ends.source, ends.target, num_pages * layout.page_bytes)
        receivers = _connect(parts, stack, other, planes, context, pool)
        bench = _Bench(parts.targets, layout, receivers, copy, options["rounds"])
        for tokens in options["tokens"]:
            with parts.part(f"{tokens} tokens"):
                bench.measure(tokens)
        # Last, as what a kernel of this process breaks on a GPU stays broken.
        with parts.part("pages alone"):
            _add_pages_alone(parts.targets, ends, pool, options["tokens"], options["rounds"])
    parts.publish(save=save, label=options["label"])


if __name__ == "__main__":
    main()
