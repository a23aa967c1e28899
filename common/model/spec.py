"""What a model is, read from its folder: sizes, constants, end-of-sequence ids, fingerprint.

Knows no tensor and imports neither torch nor transformers. Only what Baton computes exactly is accepted:
another architecture or variant is a ConfigError that names it, never an approximation.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.kv.layout import DTYPE_BYTES, KVLayout
from common.model.checkpoint import fingerprint, read_entries

ARCHITECTURE = "LlamaForCausalLM"
# Flags of /proc/cpuinfo (x86, arm) that mean matrix products in this precision without emulation.
_NATIVE_FLAGS = {
    "float32": None,
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    "float16": frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A Llama-architecture model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    rms_eps: float
    rope_theta: float
    context_length: int  # tokens, prompt and answer together
    tie_word_embeddings: bool
    dtype: str  # what the model was made for, a key of DTYPE_BYTES
    eos_token_ids: tuple[int, ...]
    fingerprint: str  # of settings and weights

    def kv_layout(self, page_size: int, dtype: str) -> KVLayout:
        """Return the shape of this model's KV pages."""
        return KVLayout(self.layers, page_size, self.kv_heads, self.head_dim, dtype)


def load_spec(folder: Path) -> ModelSpec:
    """Read a model folder (config.json, generation_config.json, headers and samples of *.safetensors).

    Raises:
        ConfigError: something is missing, broken, or of a kind that Baton does not compute.
    """
    config = _read_json(folder / "config.json")
    _refuse_unsupported(config)
    generation = folder / "generation_config.json"
    eos = _read_json(generation).get("eos_token_id") if generation.exists() else None
    facts = _sizes(config) | {
        "dtype": _dtype(config),
        "eos_token_ids": _token_ids(config.get("eos_token_id") if eos is None else eos),
    }
    # An id past the vocabulary is never drawn, and must not be looked up either.
    facts["eos_token_ids"] = tuple(token for token in facts["eos_token_ids"] if token < facts["vocab_size"])
    return ModelSpec(**facts, fingerprint=fingerprint(facts, read_entries(folder)))


def resolve_dtype(requested: str, spec: ModelSpec) -> str:
    """Turn --dtype into a precision: auto is the model's own where this CPU computes it natively.

    A precision asked for by name is taken as asked.
    """
    if requested != "auto":
        return requested
    wanted = _NATIVE_FLAGS[spec.dtype]
    return spec.dtype if wanted is None or wanted & _cpu_flags() else "float32"


def _cpu_flags() -> frozenset[str]:
    """Return the CPU's feature flags as Linux names them: `flags` on x86, `Features` on arm."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    named = (line.partition(":") for line in lines)
    return next(
        (frozenset(v.split()) for name, _, v in named if name.strip() in ("flags", "Features")), frozenset()
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} is no model folder: it has no {path.name}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return content


def _refuse_unsupported(config: dict[str, Any]) -> None:
    architectures = config.get("architectures")
    if architectures != [ARCHITECTURE]:
        name = ", ".join(map(str, architectures)) if isinstance(architectures, list) else architectures
        raise ConfigError(f"architecture {name} is not supported, only {ARCHITECTURE}")
    rope = _rope(config)
    expected = {
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (config.get("attention_bias") or False, False),
        "mlp_bias": (config.get("mlp_bias") or False, False),
        "quantization_config": (config.get("quantization_config"), None),
        "rope scaling": (rope.get("rope_type", rope.get("type", "default")), "default"),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", 1), 1),
    }
    for name, (value, supported) in expected.items():
        if value != supported:
            raise ConfigError(f"a model with {name} {value!r} is not supported, only {supported!r}")


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary settings: in `rope_parameters`, or in `rope_scaling` and `rope_theta` before 2026."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ConfigError("config.json: rope_parameters is not an object")
    return {"rope_theta": config.get("rope_theta", 10000.0)} | rope


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    heads, hidden = _positive(config, "num_attention_heads"), _positive(config, "hidden_size")
    sizes = {
        "hidden": hidden,
        "layers": _positive(config, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": _positive(config, "num_key_value_heads", heads),
        "head_dim": _positive(config, "head_dim", hidden // heads),
        "intermediate": _positive(config, "intermediate_size"),
        "vocab_size": _positive(config, "vocab_size"),
        "context_length": _positive(config, "max_position_embeddings", 2048),
        "rms_eps": _number(config, "rms_norm_eps", 1e-6),
        "rope_theta": _number(_rope(config), "rope_theta", 10000.0),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
    }
    if heads % sizes["kv_heads"] or sizes["head_dim"] % 2:
        raise ConfigError(
            f"config.json: {heads} heads of size {sizes['head_dim']} do not fit {sizes['kv_heads']} KV heads"
        )
    return sizes


def _positive(config: dict[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json: {name} is {value!r}, not a positive whole number")
    return value


def _number(config: dict[str, Any], name: str, default: float) -> float:
    value = config.get(name, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise ConfigError(f"config.json: {name} is {value!r}, not a positive number")
    return float(value)


def _dtype(config: dict[str, Any]) -> str:
    value = config.get("dtype") or config.get("torch_dtype") or "float32"
    if value not in DTYPE_BYTES:
        raise ConfigError(f"config.json: dtype {value!r} is not supported, only {', '.join(DTYPE_BYTES)}")
    return str(value)


def _token_ids(value: object) -> tuple[int, ...]:
    """Return end-of-sequence ids, which may be written as one, a list, or null."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and i >= 0 for i in ids):
        raise ConfigError(f"eos_token_id is {value!r}, not a token id or a list of them")
    return tuple(ids)
