"""What builds kernels on GPUs, and whether they are built already. Says nothing where there is no GPU."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from doctor.asked import Asked, Check
from doctor.finding import Finding, ok, problem, warning
from doctor.gpus import usable_gpus
from doctor.model import KnownModel, known_model


def triton_cache(env: Mapping[str, str]) -> Path:
    """Return where triton keeps what it built (triton/knobs.py)."""
    if folder := env.get("TRITON_CACHE_DIR"):
        return Path(folder)
    return Path(env.get("TRITON_HOME") or env.get("HOME") or "~").expanduser() / ".triton" / "cache"


def judge_triton(version: str | None, compiler: str | None, header: Path, cache: Path) -> Finding:
    """Say whether our own kernels can be built.

    Args:
        version: of triton, None where it is not installed.
        compiler: of C, with which triton builds what launches a kernel.
        header: Python.h, which that needs.
        cache: of what was built.
    """
    if version is None:
        return problem(
            "triton is not installed: our kernels need it", "install torch's CUDA build, which brings it"
        )
    if compiler is None:
        return problem(
            f"triton {version}, but no C compiler, with which it builds what launches a kernel",
            "install gcc or clang, or name one in CC",
        )
    if not header.is_file():
        return problem(
            f"triton {version} with {compiler}, but {header} is not here",
            "install Python's headers (Debian: python3-dev), or take a Python that brings them",
        )
    num_built = sum(1 for _ in cache.iterdir()) if cache.is_dir() else 0
    if not num_built and not _can_be_written(cache):
        return problem(
            f"triton {version} with {compiler}, but {cache} cannot be written: no kernel can be built",
            "set TRITON_CACHE_DIR to a folder that you can write",
        )
    state = f"{num_built} kernels and launchers are in {cache}"
    if not num_built:
        state = f"{cache} is empty: the first start builds all kernels, once, and logs how long that took"
    return ok(f"triton {version} with {compiler}; {state}", built=num_built)


def _can_be_written(folder: Path) -> bool:
    """Say whether a folder is ours to write, or to make."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def find_compiler(env: Mapping[str, str]) -> str | None:
    """Return the C compiler that triton takes (triton/runtime/build.py)."""
    named = env.get("CC")
    candidates = (named,) if named else ("clang", "gcc", "cc")
    return next((path for name in candidates if (path := shutil.which(name))), None)


class _Said(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def attention_of(asked: Asked, model: KnownModel) -> tuple[str, list[str]]:
    """Return the attention of a node that computes prompts on a GPU, and what is said of the choice.

    Raises:
        ConfigError: what was asked for by name cannot be had.
    """
    import torch

    from common.engine.attention_choice import choose_attention, log

    said = _Said()
    log.addHandler(said)
    try:
        device = torch.device("cuda")
        backend = choose_attention(asked.config.engine, model.spec, model.dtype, device, prefills=True)
    finally:
        log.removeHandler(said)
    return backend, said.lines


def judge_attention(backend: str, said: list[str], *, is_built: bool) -> Finding:
    """Say which attention prompts get. `is_built`: its kernels are in a cache."""
    if said:
        return warning(
            f"{backend}: {'; '.join(said)}",
            "do what it says; without it a server runs all the same",
            backend=backend,
        )
    if backend == "flashinfer" and not is_built:
        return warning(
            "flashinfer, whose kernels for such heads are not built: the first start takes 1 to 10 minutes "
            "more, once",
            "nothing, or start a server once before it is needed; the package flashinfer-jit-cache has them "
            "built",
            backend=backend,
        )
    return ok(f"{backend}, with its kernels built" if backend == "flashinfer" else backend, backend=backend)


def _triton(asked: Asked) -> Iterator[Finding]:
    if usable_gpus(asked) == 0:
        return
    version = None
    if importlib.util.find_spec("triton") is not None:
        import triton

        version = str(triton.__version__)
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    yield judge_triton(version, find_compiler(os.environ), header, triton_cache(os.environ))


def _attention(asked: Asked) -> Iterator[Finding]:
    model = known_model(asked)
    if usable_gpus(asked) == 0 or model is None:
        return
    backend, said = attention_of(asked, model)
    is_built = True
    if backend == "flashinfer":
        from common.attention.flashinfer import has_prefill_kernels
        from common.kv.pool import TORCH_DTYPES

        is_built = has_prefill_kernels(model.spec.head_dim, TORCH_DTYPES[model.dtype])
    yield judge_attention(backend, said, is_built=is_built)


CHECKS = (
    Check(
        "triton",
        "On GPUs: triton, the C compiler and the headers that it needs, and its cache.",
        "",
        "One of them is not here, or the cache is empty and cannot be written.",
        _triton,
        limit_s=60.0,
    ),
    Check(
        "attention",
        "On GPUs: the attention that prompts of this model get; flashinfer, nvcc, and whether kernels are "
        "built.",
        "It is not the fastest (flashinfer or nvcc is missing, the model is in float32), or flashinfer is to "
        "build "
        "kernels first.",
        "What `--attention` names cannot be had.",
        _attention,
        limit_s=60.0,
    ),
)
