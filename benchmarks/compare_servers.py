"""The servers that `baton bench compare` compares: which they are on this machine, and when each runs.

Knows neither load nor figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from benchmarks.server import running
from common.errors import ConfigError

DISAGGREGATED, COLOCATED, ONE_GPU = "disaggregated", "colocated", "colocated, 1 GPU"
MODEL_NAME = "bench"
_GPU_FRACTION = 0.9  # of a GPU's memory for all nodes on it: the default of `baton serve`
_WEIGHTS = 0.25  # of the free memory may be weights of servers that run together


@dataclass(frozen=True, slots=True)
class Side:
    """A server: how `baton serve` is told to start it, or where it runs already."""

    name: str
    options: tuple[str, ...] = ()
    url: str = ""
    model: str = MODEL_NAME
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user wants: the nodes, and further options of `baton serve` for all servers."""

    prefill: int
    decode: int
    colocated_nodes: int | None
    options: tuple[str, ...]


def plan_sides(asked: Asked, num_gpus: int) -> list[Side]:
    """Return the servers to compare; the first two have the same of the machine, and make the verdict.

    On a CPU all nodes share the cores, so one colocated node has what the others have. On GPUs the nodes of
    the disaggregated server have one each, as far as there are; as many colocated ones take requests in turn.
    Where that is more than one, a single colocated node comes third: it has less, and is there to look at.
    """
    gpus = min(num_gpus, asked.prefill + asked.decode)
    nodes = asked.colocated_nodes or max(1, gpus)
    pair = ("--prefill", str(asked.prefill), "--decode", str(asked.decode))
    sides = [
        Side(DISAGGREGATED, (*pair, *asked.options)),
        Side(COLOCATED, ("--colocated", "--decode", str(nodes), *asked.options)),
    ]
    if gpus > 1 and nodes > 1:
        sides.append(Side(ONE_GPU, ("--colocated", *asked.options)))
    return sides


def fit_together(folder: Path, num_nodes: int) -> bool:
    """Say whether the weights of so many nodes fit into the free memory with much to spare (proc(5))."""
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    return num_nodes * weights <= _WEIGHTS * free


def order_of(sides: Sequence[Side], round_: int) -> Sequence[Side]:
    """Return the servers in the order of a round: A B, then B A, so that drift hits both alike."""
    return sides if round_ % 2 == 0 else list(reversed(sides))


@dataclass(slots=True)
class Servers:
    """Servers that are started when they are asked for; a context manager that ends them.

    Args:
        folder: of the model.
        together: all may run at the same time, one under load; else one ends before the next starts.
        num_on_gpu: servers that share the memory of a GPU; 0 on a CPU.
    """

    folder: Path
    together: bool
    num_on_gpu: int = 0
    _running: dict[str, str] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, e, t)

    def runs(self, side: Side) -> bool:
        """Say whether a server need not be started."""
        return bool(side.url) or side.name in self._running

    def url(self, side: Side) -> str:
        """Return where a server is; it is started if it does not run.

        Raises:
            ConfigError: it does not come up.
        """
        if side.url:
            return side.url
        if side.name not in self._running:
            if not self.together:
                self._stack.close()
                self._running.clear()
            options = ("--served-model-name", MODEL_NAME, *side.options, *self._memory())
            try:
                self._running[side.name] = self._stack.enter_context(running(self.folder, *options))
            except ConfigError as error:
                raise ConfigError(f"the {side.name} server: {error}") from None
        return self._running[side.name]

    def _memory(self) -> tuple[str, ...]:
        if not self.together or self.num_on_gpu < 2:
            return ()
        return ("--gpu-memory-fraction", f"{_GPU_FRACTION / self.num_on_gpu:.3f}")
