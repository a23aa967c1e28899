"""Small tools of the benchmarks: the speed of memory, models and prompts to measure with."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import torch

from model_store.store import resolve_model

TINY = "tiny"


def memory_bandwidth(num_bytes: int, *, rounds: int = 5) -> float:
    """Return the bytes a second that all threads read and write together in the best of some large copies."""
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    times = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - started_s)
    return 2 * num_bytes / min(times)


def random_prompt(num_tokens: int, vocab_size: int, seed: int) -> list[int]:
    """Return token ids, the same for the same seed."""
    draw = random.Random(seed)
    return [draw.randrange(3, vocab_size) for _ in range(num_tokens)]


@contextmanager
def model_folder(model: str, context_length: int) -> Iterator[Path]:
    """Find a model, or write the tiny one with room for `context_length` tokens."""
    if model != TINY:
        yield resolve_model(model, lambda line: click.echo(line, err=True))
        return
    # The command `baton` is installed without the tests, and does not look where it was called.
    if (root := str(Path(__file__).parents[1])) not in sys.path:
        sys.path.append(root)
    from tests.tiny import write_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        yield write_tiny_model(Path(folder), max_position_embeddings=context_length)
