"""Decode steps of our engine against `transformers.generate`, in turns, in one process.

The floor is the time to read the weights once from memory: a step cannot be faster.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import click
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

from benchmarks.local_node import LocalNode, load_local
from benchmarks.measure import memory_bandwidth, model_folder, random_prompt
from benchmarks.percentiles import median
from benchmarks.report import Report
from common.request import SamplingParams

# Design aims on 2 cores with AVX512-BF16, SmolLM2 in bfloat16, milliseconds a step by streams.
_AIMS_MS = {1: 14.0, 8: 18.0}
_WARM_STEPS = 2
_COPIED_BYTES = 256 << 20  # more than any cache


class _Clock(LogitsProcessor):
    """Notes when each step of `generate` has its logits."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """See LogitsProcessor."""
        self.times_s.append(time.perf_counter())
        return scores


def step_of_transformers(model: Any, prompts: Sequence[Sequence[int]], steps: int) -> float:
    """Return the median seconds of a decode step of `generate`, greedy."""
    ids = torch.tensor(prompts)
    clock = _Clock()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=steps + _WARM_STEPS + 1,
        logits_processor=LogitsProcessorList([clock]),
    )
    times = clock.times_s[_WARM_STEPS:]
    return median([after - before for before, after in pairwise(times)])


def step_of_ours(node: LocalNode, prompts: Sequence[Sequence[int]], steps: int) -> float:
    """Return the median seconds of a decode step of our engine, greedy."""
    sampling = SamplingParams(max_tokens=steps + _WARM_STEPS + 1, temperature=0.0, ignore_eos=True)
    keys = [node.submit(prompt, sampling) for prompt in prompts]
    turns = []
    while (turn := node.turn()) is not None:
        turns.append(turn)
    node.end(keys)
    return median([turn.total_s for turn in turns[-steps:]])


@click.command()
@click.option("--model", default="smollm2-135m", help="Model: a name, a folder, or `tiny`.")
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--streams", default="1,8", show_default=True, help="Requests that decode together.")
@click.option("--context", default=256, show_default=True, help="Tokens before the middle step.")
@click.option("--steps", default=32, show_default=True, help="Steps a round.")
@click.option("--rounds", default=3, show_default=True, help="Rounds of each; the best counts.")
@click.option("--save", is_flag=True, help="Keep the result in benchmarks/results.")
def main(model: str, dtype: str, streams: str, context: int, steps: int, rounds: int, *, save: bool) -> None:
    """Time decode steps: our engine and transformers.generate in turns."""
    report = Report.of_command("decode")
    sizes = [int(size) for size in streams.split(",")]
    prompt_len = context - steps // 2
    max_len = prompt_len + steps + _WARM_STEPS + 1
    with model_folder(model, max_len) as folder:
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        theirs.generation_config.eos_token_id = None
        weights = sum(p.numel() * p.element_size() for p in theirs.parameters())
        bandwidth = memory_bandwidth(max(2 * weights, _COPIED_BYTES))
        engine = load_local(folder, dtype, num_requests=max(sizes), max_len=max_len)
        ours = LocalNode(engine, colocated=True)
        floor_ms = weights / bandwidth * 1000
        report.add("memory, read + written", bandwidth / 1e9, "GB/s")
        for size in sizes:
            prompts = [random_prompt(prompt_len, engine.spec.vocab_size, seed) for seed in range(size)]
            their_s, our_s = [], []
            for _ in range(rounds):
                their_s.append(step_of_transformers(theirs, prompts, steps))
                our_s.append(step_of_ours(ours, prompts, steps))
            report.add(
                f"our step, {size} streams",
                min(our_s) * 1000,
                "ms",
                limit=floor_ms,
                limit_name="weights / memory bandwidth",
                at_most=_AIMS_MS.get(size) if model == "smollm2-135m" else None,
            )
            report.add(f"transformers' step, {size} streams", min(their_s) * 1000, "ms")
            report.add(f"ours / theirs, {size} streams", min(our_s) / min(their_s), "x", at_most=1.0)
    report.publish(save=save)


if __name__ == "__main__":
    main()
