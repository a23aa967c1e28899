"""The models of a world's nodes, loaded once for all worlds of a size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from common.config import EngineConfig, ModelConfig
from common.engine.loader import Duties, Engine, load_engine
from common.messages import Role


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the nodes are."""

    d_pages: int = 64
    p_pages: int = 64
    budget: int = 32
    max_running: int = 8
    max_queued: int = 64
    page_size: int = 16


SIZES = Sizes()


@cache
def engine_of(folder: Path, role: Role, sizes: Sizes) -> Engine:
    """One for all worlds that need it: a closed world leaves nothing in it."""
    decodes = role is Role.DECODE
    config = EngineConfig(
        device="cpu",
        page_size=sizes.page_size,
        kv_pages=sizes.d_pages if decodes else sizes.p_pages,
        max_running=sizes.max_running,
        prefill_budget=sizes.budget,
        debug_checks=True,
    )
    duties = Duties(shares_pool=True) if decodes else Duties(decodes=False)
    return load_engine(folder, ModelConfig(str(folder), "float32"), config, duties)
