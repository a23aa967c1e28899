"""Steps of the engine as a node runs them, beside what the device can do: `baton bench step`.

One engine, loaded as a node loads it, with the scheduler and the loop of a decode node in this process. A
decode step is held against the time to read weights and KV once at the speed of a copy, a prompt against the
speed of a large matrix product.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import click

from benchmarks import device_profile
from benchmarks.device_limits import copy_bytes_per_s, matmul_flops_per_s
from benchmarks.engine_runs import (
    GREEDY,
    PROFILED_STEPS,
    DecodeRun,
    decode,
    prebuilt_ms,
    prefill_s,
    start_batch,
)
from benchmarks.local_node import LocalNode, Turn
from benchmarks.options import choices_of, whole_numbers
from benchmarks.parts import Parts
from benchmarks.percentiles import median, percentile
from benchmarks.report import Report
from benchmarks.step_engine import load_for_steps
from benchmarks.targets import Targets, takes_targets
from common.config import EngineConfig, LogConfig, ModelConfig
from common.engine.loader import Engine
from common.kv.layout import DTYPE_BYTES
from common.kv.pool import TORCH_DTYPES
from common.log import set_up_logging
from common.model.spec import ModelSpec
from common.request import SamplingParams

_PENALTIES = SamplingParams(
    max_tokens=1,
    temperature=0.0,
    ignore_eos=True,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.1,
)
_PENALTY_BATCHES = (1, 64)
_PENALTY_ROUNDS = 3
_PREBUILT_ROUNDS = 30
_PREFILL_ROUNDS = 5
_PROFILED_NAMES = 14
_PARTS_OF_TURN = {
    "plan": lambda turn: turn.plan_s,
    "launch": lambda turn: turn.inputs_s,
    "process": lambda turn: turn.process_s,
    "outbox": lambda turn: turn.outbox_s,
}


def linear_sizes(spec: ModelSpec) -> tuple[int, int]:
    """Return the number of weights in the matrices of all layers, and in the output matrix."""
    qkv = spec.hidden * (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    o = spec.heads * spec.head_dim * spec.hidden
    return spec.layers * (qkv + o + 3 * spec.hidden * spec.intermediate), spec.hidden * spec.vocab_size


def step_bytes(engine: Engine, requests: int, context: int) -> int:
    """Return the bytes that a decode step has to read: the matrices, and the KV of its requests."""
    layout = engine.layout
    kv_bytes = requests * context * layout.page_bytes // layout.page_size
    return sum(linear_sizes(engine.spec)) * DTYPE_BYTES[layout.dtype] + kv_bytes


def prefill_flops(spec: ModelSpec, num_tokens: int) -> int:
    """Return the operations of a prompt: products of all its tokens, causal attention, logits of the last."""
    layers, output = linear_sizes(spec)
    attention = 4 * num_tokens**2 // 2 * spec.heads * spec.head_dim * spec.layers
    return 2 * layers * num_tokens + 2 * output + attention


@dataclass(frozen=True, slots=True)
class _Bench:
    """An engine, what its device can do, and where figures go."""

    engine: Engine
    parts: Parts
    copy_rate: float  # bytes a second
    matmul_rate: float  # operations a second
    context: int
    steps: int

    @property
    def targets(self) -> Targets:
        return self.parts.targets

    @property
    def is_on_gpu(self) -> bool:
        return self.engine.streams.device.type == "cuda"

    def decode(self, size: int) -> None:
        """Time steps of a batch, and add their figures."""
        run = decode(self.engine, size, self.context, self.steps)
        num_bytes = step_bytes(self.engine, size, self.context)
        floor_ms = num_bytes / self.copy_rate * 1000
        step_ms, device_ms = median(run.steps_s) * 1000, median(run.device_s) * 1000
        add = self.targets.add
        add(f"step of {size}", step_ms, "ms", limit=floor_ms, limit_name="weights and KV / copy")
        add(f"step of {size} p99", percentile(run.steps_s, 99) * 1000, "ms")
        add(f"step of {size}: share of the floor", floor_ms / step_ms * 100, "%")
        add(f"step of {size}: bytes", num_bytes / 1e9, "GB")
        add(f"step of {size}: read", num_bytes / step_ms / 1e9, "TB/s", limit=self.copy_rate / 1e12)
        add(f"step of {size} on the device", device_ms, "ms", limit=step_ms, limit_name="the step")
        add(f"step of {size}: the device's share", device_ms / step_ms * 100, "%")
        self._add_host(size, run)

    def _add_host(self, size: int, run: DecodeRun) -> None:
        self.targets.add(f"host's work in a step of {size}", run.host_ms(_host_s), "ms")
        for name, part in _PARTS_OF_TURN.items():
            self.targets.add(f"  {name}, step of {size}", run.host_ms(part), "ms")

    def penalties(self, size: int) -> None:
        """Time steps with penalties on every request and without, in turns."""
        steps_s: dict[str, list[float]] = {"without": [], "with": []}
        for _ in range(_PENALTY_ROUNDS):
            for name, sampling in (("without", GREEDY), ("with", _PENALTIES)):
                steps = max(1, self.steps // 2)
                steps_s[name] += decode(self.engine, size, self.context, steps, sampling).steps_s
        plain_ms, with_ms = (median(steps_s[name]) * 1000 for name in ("without", "with"))
        what = f"step of {size} with penalties"
        self.targets.add(what, with_ms, "ms", limit=plain_ms, limit_name="without")
        self.targets.add(f"{what} / without", with_ms / plain_ms, "x")

    def prebuilt(self, lengths: Sequence[int]) -> None:
        """Time PREBUILT batches of short and long prompts."""
        times_ms = prebuilt_ms(self.engine, lengths, _PREBUILT_ROUNDS)
        medians = {length: median(values) for length, values in times_ms.items()}
        for length, value in medians.items():
            self.targets.add(f"PREBUILT of {length} tokens", value, "ms")
        if len(medians) > 1:
            difference_ms = abs(medians[max(lengths)] - medians[min(lengths)])
            self.targets.add("PREBUILT, longest and shortest differ by", difference_ms, "ms")

    def prefill(self, num_tokens: int) -> None:
        """Time a prompt alone."""
        seconds = median(prefill_s(self.engine, num_tokens, _PREFILL_ROUNDS))
        flops = prefill_flops(self.engine.spec, num_tokens)
        what = f"prefill of {num_tokens}"
        best_ms = flops / self.matmul_rate * 1000
        self.targets.add(what, seconds * 1000, "ms", limit=best_ms, limit_name="operations / matmul")
        self.targets.add(f"{what}: tokens", num_tokens / seconds, "1/s")
        self.targets.add(f"{what}: operations", flops / seconds / 1e12, "TFLOP/s")
        self.targets.add(f"{what}: share of matmul", flops / seconds / self.matmul_rate * 100, "%")

    def profile(self, size: int) -> None:
        """Record steps on the GPU; say how busy it is, and with what."""
        with closing(LocalNode(self.engine)) as node:
            start_batch(node, self.engine, size, self.context, PROFILED_STEPS, GREEDY)
            activities = device_profile.record(lambda: node.run(PROFILED_STEPS))
        usage = device_profile.usage_of(activities)
        self.targets.add(f"busy at {size}", usage.busy * 100, "%")
        self.targets.add(f"  kernels and copies run, at {size}", usage.working * 100, "%")
        self.targets.add(f"  longest gap, at {size}", usage.longest_gap_ns / 1e3, "us")
        for name, total_ns, count in device_profile.longest(activities, _PROFILED_NAMES):
            per_step_us = total_ns / 1e3 / PROFILED_STEPS
            line = f"{per_step_us:9.1f} us a step, {count / PROFILED_STEPS:7.1f} x  {name[:100]}"
            click.echo(line, err=True)


def _host_s(turn: Turn) -> float:
    return turn.host_s


@click.command()
@click.argument("model")
@click.option("--load-format", type=choices_of(ModelConfig, "load_format"), default="auto", show_default=True)
@click.option("--dtype", type=choices_of(ModelConfig, "dtype"), default="auto", show_default=True)
@click.option("--device", type=choices_of(EngineConfig, "device"), default="auto", show_default=True)
@click.option("--attention", type=choices_of(EngineConfig, "attention"), default="auto", show_default=True)
@click.option(
    "--cuda-graphs", type=choices_of(EngineConfig, "cuda_graphs"), default="auto", show_default=True
)
@click.option("--prefill-budget", type=click.IntRange(1), help="Tokens of a chunk  [default: the node's]")
@click.option(
    "--batch",
    default="1,16,64,128,256",
    show_default=True,
    callback=whole_numbers,
    help="Requests that decode together.",
)
@click.option(
    "--context", type=click.IntRange(1), default=1024, show_default=True, help="Tokens at the middle step."
)
@click.option(
    "--steps", type=click.IntRange(1), default=200, show_default=True, help="Decode steps that are timed."
)
@click.option(
    "--prefill",
    default="512,8192,16000",
    show_default=True,
    callback=whole_numbers,
    help="Tokens of prompts.",
)
@click.option(
    "--prebuilt",
    default="100,100000",
    show_default=True,
    callback=whole_numbers,
    help="Tokens of prompts that were computed elsewhere.",
)
@click.option(
    "--penalties/--no-penalties", default=True, show_default=True, help="Steps with penalties, too."
)
@click.option("--label", default="", help="Stands in the name of the saved file.")
@click.option("--save", is_flag=True, help="Keep the result in benchmarks/results.")
@takes_targets
def main(*, save: bool, **options: Any) -> None:
    """Time decode steps, PREBUILT batches and prompts of MODEL on this machine."""
    set_up_logging(LogConfig())
    report = Report.of_command("step")
    parts = Parts(Targets.of(report, options["aim"], options["limit"]))
    engine = load_for_steps(options)
    device = engine.streams.device
    copy_rate = copy_bytes_per_s(device)
    matmul_rate = matmul_flops_per_s(device, TORCH_DTYPES[engine.layout.dtype])
    parts.targets.add("device copy, read + written", copy_rate / 1e12, "TB/s")
    parts.targets.add("matmul", matmul_rate / 1e12, "TFLOP/s")
    bench = _Bench(engine, parts, copy_rate, matmul_rate, options["context"], options["steps"])
    _run(bench, options)
    parts.publish(save=save, label=options["label"])


def _run(bench: _Bench, options: dict[str, Any]) -> None:
    sizes, part = options["batch"], bench.parts.part
    for size in sizes:
        with part(f"decode {size}"):
            bench.decode(size)
    if options["penalties"]:
        for size in [size for size in _PENALTY_BATCHES if size <= max(sizes, default=0)]:
            with part(f"penalties {size}"):
                bench.penalties(size)
    longest = bench.engine.spec.context_length - 2
    if lengths := [length for length in options["prebuilt"] if length <= longest]:
        with part("PREBUILT"):
            bench.prebuilt(lengths)
    for length in [length for length in options["prefill"] if length < longest]:
        with part(f"prefill {length}"):
            bench.prefill(length)
    # Last: the profiler, once it has run, may leave something behind that takes time.
    for size in sizes if bench.is_on_gpu else ():
        with part(f"profile {size}"):
            bench.profile(size)


if __name__ == "__main__":
    main()
