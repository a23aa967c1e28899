"""What an engine is put through by a local node: decode steps, PREBUILT batches, prompts. Judges nothing.

A run leaves nothing behind: each has a node of its own on the engine, which it closes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from benchmarks.local_node import LocalNode, Turn
from common.codec import IntArray
from common.engine.loader import Engine
from common.errors import ConfigError
from common.messages import int32s
from common.request import SamplingParams

WARM_STEPS = 10
PROFILED_STEPS = 20
SLACK_STEPS = 4  # that are launched beyond those which count
GREEDY = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Steps of one batch in steady state."""

    steps_s: list[float]  # from one processed result to the next
    device_s: list[float]  # of each step, on the device
    turns: list[Turn]

    def host_ms(self, part: Callable[[Turn], float]) -> float:
        """Return the milliseconds a step of a part of the host's work, on average."""
        return sum(map(part, self.turns)) * 1000 / max(1, len(self.steps_s))


def prompt_of(num_tokens: int, vocab_size: int) -> IntArray:
    """Return random token ids, the same for the same length."""
    return int32s(np.random.default_rng(num_tokens).integers(3, vocab_size, num_tokens).tolist())


def tokens_needed(context: int, steps: int) -> int:
    """Return the most tokens that a request of `start_batch` can come to."""
    return max(context, 2 * WARM_STEPS + steps) + steps + WARM_STEPS + SLACK_STEPS


def check_context(context: int, steps: int, context_length: int) -> None:
    """See that the middle one of so many steps can have `context` tokens.

    Args:
        context_length: the model's.

    Raises:
        ConfigError: the requests would begin before their first token, or end beyond the model's last.
    """
    least = 1 + WARM_STEPS + steps // 2
    most = context_length - SLACK_STEPS - (steps - steps // 2)
    if not least <= context <= most:
        raise ConfigError(
            f"--context {context}: with so many --steps, and the model's {context_length} tokens, "
            + (f"it can be {least} to {most}" if least <= most else "no context can be timed")
        )


def start_batch(
    node: LocalNode, engine: Engine, size: int, context: int, steps: int, sampling: SamplingParams
) -> None:
    """Have so many requests arrive and run warm; of the next `steps` the middle one has `context` tokens."""
    prompt = prompt_of(max(1, context - steps // 2 - WARM_STEPS), engine.spec.vocab_size)
    sampling = replace(sampling, max_tokens=WARM_STEPS + steps + SLACK_STEPS)
    node.arrive([node.submit(prompt, sampling) for _ in range(size)])
    node.run(WARM_STEPS)
    node.clock.forget()


def decode(
    engine: Engine, size: int, context: int, steps: int, sampling: SamplingParams = GREEDY
) -> DecodeRun:
    """Decode with so many requests that arrived as from a prefill node."""
    with closing(LocalNode(engine)) as node:
        start_batch(node, engine, size, context, steps, sampling)
        turns = node.run(steps + 1)
        device_s = node.clock.take_s()
    results_s = [at_s for turn in turns for at_s in turn.results_at_s]
    return DecodeRun([after - before for before, after in pairwise(results_s)], device_s, turns)


def prebuilt_ms(engine: Engine, lengths: Sequence[int], rounds: int) -> dict[int, list[float]]:
    """Return the milliseconds of PREBUILT batches of one prompt, by its length, measured in turns."""
    times: dict[int, list[float]] = {length: [] for length in lengths}
    prompts = {length: prompt_of(length, engine.spec.vocab_size) for length in lengths}
    with closing(LocalNode(engine)) as node:
        for _ in range(rounds):
            for length, prompt in prompts.items():
                key = node.submit(prompt, replace(GREEDY, max_tokens=2))
                times[length].append(node.arrive([key]) * 1000)
                node.end([key])
    return times


def prefill_s(engine: Engine, num_tokens: int, rounds: int) -> list[float]:
    """Return the seconds of a prompt alone, from its first launch to its token on the host."""
    prompt = prompt_of(num_tokens, engine.spec.vocab_size)
    times_s = []
    with closing(LocalNode(engine, colocated=True)) as node:
        for _ in range(rounds + 1):  # the first warms up
            node.submit(prompt, GREEDY)
            started_s = time.perf_counter()
            results_s: tuple[float, ...] = ()
            while (turn := node.turn()) is not None:
                results_s = turn.results_at_s or results_s
            times_s.append(results_s[-1] - started_s)
    return times_s[1:]
