"""Fuzzing with atheris: libFuzzer, told by instrumented bytecode which inputs reach new code.

A process of its own, because atheris ends the process that it runs in: `python -m fuzz.guided TARGET SEED
[libFuzzer's arguments]`. `python -m fuzz` starts it.
"""

from __future__ import annotations

import random
import sys

import atheris

from fuzz.targets import TARGETS

INSTRUMENTED = ["common", "transfer", "gateway"]


def main(name: str, arguments: list[str]) -> None:
    """Fuzz a target until libFuzzer has enough."""
    with atheris.instrument_imports(include=INSTRUMENTED):  # what the target imports
        target = TARGETS[name]()

    def one_input(data: bytes) -> None:
        target.run(data)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        draw = random.Random(seed)
        if draw.random() < 0.4:
            return bytes(atheris.Mutate(data, max_size))
        return target.mutate(data, draw)[:max_size]

    atheris.Setup([sys.argv[0], f"-max_len={target.max_bytes}", *arguments], one_input, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
