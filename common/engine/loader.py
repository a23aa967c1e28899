"""Bring a model up on this node: turn every "auto" into a value, load, size the pool, make the runner."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from common.config import EngineConfig, ModelConfig
from common.engine.chunking import resolve_prefill_budget
from common.engine.model_runner import ModelRunner
from common.kv.layout import KVLayout
from common.kv.pool import KVPool, available_memory_bytes, default_num_pages
from common.model.decoder import load_decoder
from common.model.spec import ModelSpec, load_spec, resolve_dtype

log = logging.getLogger("baton.engine")


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model and the values that "auto" became."""

    spec: ModelSpec
    layout: KVLayout
    pool: KVPool
    runner: ModelRunner
    num_rows: int
    prefill_budget: int  # tokens a batch
    overlap: bool


def resolve_num_pages(config: EngineConfig, layout: KVLayout, memory_bytes: int) -> int:
    """Pages of the pool: a tenth of the memory, and a node's part of the two tenths for all at most."""
    return config.kv_pages or default_num_pages(layout, memory_bytes * 2 // max(2, config.local_nodes or 2))


def load_engine(
    folder: Path, model: ModelConfig, config: EngineConfig, *, share_pool: bool = False
) -> Engine:
    """Load the model of a folder onto this node's device; `share_pool` for a process on this host to map.

    Raises:
        ConfigError: the model or a setting does not work here.
    """
    started_s = time.monotonic()
    budget = resolve_prefill_budget(config)
    spec = load_spec(folder, model.load_format)
    dtype = resolve_dtype(model.dtype, spec)
    device = torch.device("cpu" if config.device == "auto" else config.device)
    layout = spec.kv_layout(config.page_size, dtype)
    num_pages = resolve_num_pages(config, layout, available_memory_bytes())
    pool = KVPool(layout, num_pages, device, shared=share_pool)
    # Requests that run, and as many whose pages are on their way.
    num_rows = 2 * config.max_running
    runner = ModelRunner(
        load_decoder(folder, spec, dtype, pool, model.load_format),
        spec.eos_token_ids,
        num_rows=num_rows,
        max_pages=min(num_pages, layout.pages_for(spec.context_length)),
        device=device,
        debug=config.debug_checks,
    )
    log.info(
        "loaded %s as %s in %.1f s: %d pages of %d tokens (%d MiB), %d tokens a prefill batch",
        folder.name,
        dtype,
        time.monotonic() - started_s,
        num_pages,
        layout.page_size,
        num_pages * layout.page_bytes >> 20,
        budget,
    )
    return Engine(
        spec=spec,
        layout=layout,
        pool=pool,
        runner=runner,
        num_rows=num_rows,
        prefill_budget=budget,
        overlap=config.overlap == "on",
    )
