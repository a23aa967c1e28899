"""What a model is, read from its folder: sizes, constants, end-of-sequence ids, fingerprint.

Knows no tensor and imports neither torch nor transformers. Only what Baton computes exactly is accepted:
another architecture or variant is a ConfigError that names it, never an approximation. What a setting means,
and what its absence means, is as in `transformers` (models/*/configuration_*.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.kv.layout import DTYPE_BYTES, KVLayout
from common.model.checkpoint import fingerprint, read_entries


@dataclass(frozen=True, slots=True)
class _Family:
    """How an architecture differs from Llama."""

    qkv_bias: bool = False  # whatever the config says
    may_have_bias: bool = False  # `attention_bias` gives one to all four projections
    qk_norm: bool = False
    window_is_optional: bool = False  # the sliding window needs `use_sliding_window`
    defaults: Mapping[str, int] = field(default_factory=dict)  # of settings that a config leaves out


_FAMILIES = {
    "LlamaForCausalLM": _Family(may_have_bias=True, defaults={"max_position_embeddings": 2048}),
    "MistralForCausalLM": _Family(
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
    ),
    "Qwen2ForCausalLM": _Family(
        qkv_bias=True,
        window_is_optional=True,
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
    ),
    "Qwen3ForCausalLM": _Family(
        may_have_bias=True,
        qk_norm=True,
        window_is_optional=True,
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
        },
    ),
}
ARCHITECTURES = tuple(_FAMILIES)
# Flags of /proc/cpuinfo (x86, arm) that mean matrix products in this precision without emulation.
_NATIVE_FLAGS = {
    "float32": None,
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    "float16": frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How Llama 3.1 stretches slow rotations, `factor` times; fast ones stay, those between are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_length: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model of the Llama family."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool  # queries and keys are normalized, each head by itself
    initializer_range: float  # spread of the weights before training
    context_length: int  # tokens, prompt and answer together
    tie_word_embeddings: bool
    dtype: str  # what the model was made for, a key of DTYPE_BYTES
    eos_token_ids: tuple[int, ...]
    fingerprint: str  # of settings and weights

    def kv_layout(self, page_size: int, dtype: str) -> KVLayout:
        """Return the shape of this model's KV pages."""
        return KVLayout(self.layers, page_size, self.kv_heads, self.head_dim, dtype)


def load_spec(folder: Path, load_format: str = "auto") -> ModelSpec:
    """Read a model folder (config.json, generation_config.json, headers and samples of *.safetensors).

    Args:
        load_format: "dummy" for random weights; then no weights need to be there.

    Raises:
        ConfigError: something is missing, broken, or of a kind that Baton does not compute.
    """
    config = read_json(folder / "config.json")
    _refuse_own_code(folder, config)
    family = _family(config)
    _refuse_unsupported(config)
    generation = folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    facts = _sizes(config, family) | {
        "dtype": _dtype(config),
        "rope_scaling": _rope_scaling(config),
        "eos_token_ids": _token_ids(config.get("eos_token_id") if eos is None else eos),
    }
    _refuse_window(config, family, facts)
    # An id past the vocabulary is never drawn, and must not be looked up either.
    facts["eos_token_ids"] = tuple(token for token in facts["eos_token_ids"] if token < facts["vocab_size"])
    spec = ModelSpec(**facts, fingerprint="")
    entries = {} if load_format == "dummy" else read_entries(folder)
    name = fingerprint(asdict(spec) | {"load_format": load_format}, entries)
    return replace(spec, fingerprint=name)


def resolve_dtype(requested: str, spec: ModelSpec, *, on_gpu: bool = False) -> str:
    """Turn --dtype into a precision: auto is the model's own, on a CPU where that computes it natively.

    A precision asked for by name is taken as asked.
    """
    if requested != "auto":
        return requested
    if on_gpu:
        return spec.dtype
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


def read_json(path: Path) -> dict[str, Any]:
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


def _refuse_own_code(folder: Path, config: Mapping[str, Any]) -> None:
    """A model that brings code is another model than its architecture says; that code is never run."""
    tokenizer = folder / "tokenizer_config.json"
    files = {"config.json": config, tokenizer.name: read_json(tokenizer) if tokenizer.exists() else {}}
    for name, settings in files.items():
        if settings.get("auto_map"):
            raise ConfigError(f"{folder / name} asks for code of the model's own (auto_map): Baton runs none")


def _family(config: dict[str, Any]) -> _Family:
    names = config.get("architectures")
    if isinstance(names, list) and len(names) == 1 and names[0] in _FAMILIES:
        return _FAMILIES[names[0]]
    name = ", ".join(map(str, names)) if isinstance(names, list) else names
    raise ConfigError(f"architecture {name} is not supported, only {', '.join(_FAMILIES)}")


def _refuse_unsupported(config: dict[str, Any]) -> None:
    rope = _rope(config)
    expected = {
        "hidden_act": (config.get("hidden_act", "silu"), ("silu",)),
        "mlp_bias": (config.get("mlp_bias") or False, (False,)),
        "quantization_config": (config.get("quantization_config"), (None,)),
        "rope scaling": (_rope_type(rope), ("default", "llama3")),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", 1), (1,)),
    }
    for name, (value, supported) in expected.items():
        if value not in supported:
            only = " or ".join(repr(one) for one in supported)
            raise ConfigError(f"a model with {name} {value!r} is not supported, only {only}")


def _refuse_window(config: dict[str, Any], family: _Family, facts: Mapping[str, Any]) -> None:
    """Refuse a model whose layers look back less far than its context is long."""
    window = config.get("sliding_window", family.defaults.get("sliding_window"))
    if "sliding_window" not in family.defaults or window is None:
        return
    if family.window_is_optional:
        kinds = config.get("layer_types")
        slides = (
            "sliding_attention" in kinds
            if isinstance(kinds, list)
            else config.get("max_window_layers", 28) < facts["layers"]
        )
        if not (config.get("use_sliding_window") and slides):
            return
    if facts["context_length"] > _positive({"sliding_window": window}, "sliding_window"):
        raise ConfigError(
            f"a sliding_window of {window} tokens below the context of {facts['context_length']} is not "
            f"supported; with max_position_embeddings {window} in config.json the model serves so many"
        )


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary settings: in `rope_parameters`, or in `rope_scaling` and `rope_theta` before 2026."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ConfigError("config.json: rope_parameters is not an object")
    return {"rope_theta": config.get("rope_theta", 10000.0)} | rope


def _rope_type(rope: dict[str, Any]) -> object:
    return rope.get("rope_type", rope.get("type", "default"))


def _rope_scaling(config: dict[str, Any]) -> RopeScaling | None:
    rope = _rope(config)
    if _rope_type(rope) != "llama3":
        return None
    return RopeScaling(
        factor=_number(rope, "factor"),
        low_freq_factor=_number(rope, "low_freq_factor"),
        high_freq_factor=_number(rope, "high_freq_factor"),
        original_context_length=_positive(rope, "original_max_position_embeddings"),
    )


def _sizes(config: dict[str, Any], family: _Family) -> dict[str, Any]:
    config = {**family.defaults, **config}
    heads, hidden = _positive(config, "num_attention_heads"), _positive(config, "hidden_size")
    bias = family.may_have_bias and bool(config.get("attention_bias"))
    sizes = {
        "hidden": hidden,
        "layers": _positive(config, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": _positive(config, "num_key_value_heads", heads),
        "head_dim": _positive(config, "head_dim", hidden // heads),
        "intermediate": _positive(config, "intermediate_size"),
        "vocab_size": _positive(config, "vocab_size"),
        "context_length": _positive(config, "max_position_embeddings"),
        "rms_eps": _number(config, "rms_norm_eps", 1e-6),
        "rope_theta": _number(_rope(config), "rope_theta", 10000.0),
        "qkv_bias": bias or family.qkv_bias,
        "o_bias": bias,
        "qk_norm": family.qk_norm,
        "initializer_range": _number(config, "initializer_range", 0.02),
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


def _number(config: dict[str, Any], name: str, default: float | None = None) -> float:
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
