"""Prompts of the tests on a world, what must follow them, and what must hold when all is over."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tests.faults.world import World
from tests.faults.world_asked import Asked
from tests.system.oracle import Oracle
from tests.tiny import VOCAB_SIZE

CLEAN_WITHIN_S = 2.0
Prompt = tuple[int, ...]


def prompt(seed: int, length: int) -> Prompt:
    """Some tokens."""
    return tuple(3 + (seed * 7919 + i * i * 31 + i * 17) % (VOCAB_SIZE - 3) for i in range(length))


@cache
def _oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@cache
def answer(folder: Path, ids: Prompt, num_tokens: int) -> list[int]:
    """What transformers says; a longer answer begins with it."""
    return _oracle(folder).continuation(ids, num_tokens)


def check_answer(folder: Path, asked: Asked) -> None:
    """It was answered in full, token for token right."""
    assert asked.error is None, asked.error
    assert asked.finish is not None
    assert asked.tokens == answer(folder, tuple(asked.prompt), len(asked.tokens))


def check_next(folder: Path, world: World, seed: int = 99) -> None:
    """The next request is answered rightly, and its pages come back too."""
    asked = world.ask(prompt(seed, 40), 6)
    world.until_ended(asked)
    check_answer(folder, asked)
    assert len(asked.tokens) == 6
    world.until(world.is_clean, CLEAN_WITHIN_S)
