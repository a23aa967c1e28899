"""The engine that `baton bench step` measures, loaded as a node loads it. Knows no figure."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from benchmarks.engine_runs import PROFILED_STEPS, check_context, tokens_needed
from benchmarks.local_node import PAGE_SIZE
from common.config import EngineConfig, ModelConfig
from common.engine.loader import Duties, Engine, load_engine
from common.engine.sizing import GIB, weight_bytes
from common.gpus import count_gpus
from common.model.spec import load_spec, resolve_dtype
from model_store.store import resolve_model
from terminal.progress import progress


def load_for_steps(options: dict[str, Any]) -> Engine:
    """Load the model with the pages that the largest part needs.

    Args:
        options: of the command.

    Raises:
        ConfigError: the model or an option does not work here.
    """
    say = partial(click.echo, err=True)
    num_gpus = count_gpus(EngineConfig(device=options["device"]))
    model = ModelConfig(dtype=options["dtype"], load_format=options["load_format"])
    folder = resolve_model(options["model"], say, load_format=model.load_format)
    spec = load_spec(folder, model.load_format)
    steps = max(options["steps"], PROFILED_STEPS)
    if options["batch"]:
        check_context(options["context"], steps, spec.context_length)
    most = max([*options["batch"], 1])
    lengths = [1, *options["prefill"], *options["prebuilt"]]
    pages = most * _pages(tokens_needed(options["context"], steps))
    config = EngineConfig(
        device="cuda" if num_gpus else "cpu",
        attention=options["attention"],
        cuda_graphs=options["cuda_graphs"],
        page_size=PAGE_SIZE,
        kv_pages=max(pages, 2 * _pages(max(lengths) + 2)),
        max_running=most,
        prefill_budget=options["prefill_budget"],
    )
    if model.load_format == "dummy":  # on a CPU that takes minutes for a large model
        num_bytes = weight_bytes(spec, resolve_dtype(model.dtype, spec, on_gpu=num_gpus > 0))
        say(f"making random weights: {num_bytes / GIB:.1f} GiB")
    with progress("loading the model"):
        engine = load_engine(folder, model, config, Duties(prefills=True, decodes=True))
    if num_gpus:  # zeros in the pool take less power than numbers, and so less time
        for layer in engine.pool.data:
            layer[1:].normal_()
    return engine


def _pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE)
