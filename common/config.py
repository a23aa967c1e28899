"""Every setting, once: a frozen dataclass a component, one field = one option = one help text.

`cli.py` turns the fields into options (`prefill_budget` -> `--prefill-budget`, `BATON_PREFILL_BUDGET`); the
supervisor turns a config back into its children's command lines with `to_argv`. "auto" stays here only as
a word: each is turned into a value once, by the process that knows what it depends on.
"""

from __future__ import annotations

import dataclasses
import types
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

DEFAULT_MODEL = "smollm2-135m"
MIN_GPU_MEMORY_FRACTION, MAX_GPU_MEMORY_FRACTION = 0.05, 0.98


def option(
    default: Any,
    text: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    hidden: bool = False,
) -> Any:
    """Declare a setting: its default, its help text and, where there are any, its choices or bounds."""
    return field(
        default=default,
        metadata={"help": text, "choices": choices, "minimum": minimum, "maximum": maximum, "hidden": hidden},
    )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and in which precision."""

    model: str = DEFAULT_MODEL
    dtype: str = option(
        "auto",
        "Precision of weights and KV; auto takes the model's own where this machine computes it natively, "
        "else float32.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    load_format: str = option(
        "auto",
        "Where weights come from: the model's files, or (dummy) random numbers, with a config.json alone.",
        choices=("auto", "dummy"),
    )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What both nodes need to run the model."""

    device: str = option(
        "auto", "Where the model runs; auto takes a GPU where there is one.", choices=("auto", "cpu", "cuda")
    )
    gpu: int | None = option(
        None,
        "Number of the GPU that a node runs on, as CUDA counts; not together with --prefill-gpus or "
        "--decode-gpus [default: 0; nodes of `baton serve` take all in turn].",
        minimum=0,
    )
    gpu_memory_fraction: float = option(
        0.9,
        "Part of a GPU's memory for weights, KV pool and what a step needs: of all nodes together that "
        "`baton serve` puts there, or of one that is started by hand.",
        minimum=MIN_GPU_MEMORY_FRACTION,
        maximum=MAX_GPU_MEMORY_FRACTION,
    )
    attention: str = option(
        "auto",
        "Which code computes attention. On a GPU, in bfloat16 or float16, auto takes flashinfer for long "
        "prompts, where it is installed and heads have 64, 128 or 256, and otherwise kernels of our own "
        "(triton); in float32 and on a CPU sdpa, the reference.",
        choices=("auto", "flashinfer", "triton", "sdpa"),
    )
    cuda_graphs: str = option(
        "auto",
        "Replay decode steps, and steps of short prompts, as CUDA graphs; auto is on where attention is not "
        "sdpa.",
        choices=("auto", "on", "off"),
    )
    page_size: int = option(16, "Tokens in a KV page.", minimum=1)
    kv_pages: int | None = option(
        None,
        "KV pages of a node's pool [default: on a CPU a tenth of the memory, at most 4 GiB; on a GPU what "
        "--gpu-memory-fraction leaves].",
        minimum=1,
    )
    local_nodes: int | None = option(
        None,
        "Nodes on this machine's cores, this one included: all their default pools together take two tenths "
        "of the memory at most [default: those of `baton serve`; otherwise a pair].",
        minimum=1,
    )
    max_running: int | None = option(
        None,
        "Requests that decode together at the most [default: 64 on a CPU, 256 on a GPU].",
        minimum=1,
        maximum=4096,
    )
    prefill_budget: int | None = option(
        None, "Prompt tokens computed in one batch [default: 128 on a CPU, 16384 on a GPU].", minimum=1
    )
    overlap: str = option(
        "auto",
        "Launch a step before the last one's tokens are read; auto is off on a CPU, where it delays them.",
        choices=("auto", "on", "off"),
    )
    debug_checks: bool = option(
        False, "Check pools and relay at every step, and stop at the first contradiction (for tests)."
    )


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """How KV pages travel."""

    transfer: str = option(
        "auto",
        "Data plane for KV pages; auto takes cuda-ipc between GPUs of one host, shared memory between CPU "
        "nodes of one host, else frames.",
        choices=("auto", "cuda-ipc", "shm", "frames"),
    )
    verify_pages: bool = option(False, "Checksum every page on both ends of a hand-over.")
    transfer_window: int = option(
        64, "MiB of KV that may be under way from one prefill node to one decode node.", minimum=1
    )


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """What only a decode node needs."""

    max_queued: int = option(
        1024,
        "Requests that may wait on a decode node; more are answered with 429.",
        minimum=1,
        maximum=32768,  # a Status names them all, within the protocol's limits
    )
    colocated: bool = option(False, "Prefill on the decode node itself: one node does both.")


def keys_option() -> Any:
    """Declare where the key of the cluster is: for each process that opens sockets."""
    return option(
        None,
        "Folder with the key of the cluster, made by `baton keys`: the same for all processes. Needed where "
        "an address can be reached from other hosts.",
    )


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """The HTTP side."""

    host: str = option("127.0.0.1", "Address that the HTTP server binds.")
    port: int = option(8000, "Port of the HTTP server; 0 lets the system pick one.", minimum=0, maximum=65535)
    served_model_name: str | None = option(None, "Name that clients use for the model [default: MODEL].")
    shares_port: bool = option(False, "Other gateways have the same port.", hidden=True)
    api_key: str | None = option(
        None,
        "Key that HTTP clients must send, as `Authorization: Bearer KEY`; @FILE reads it from a file. Prefer "
        "that or the environment variable: other users see command lines.",
    )
    max_body_mib: int = option(16, "Largest HTTP request body, in MiB; more is answered with 413.", minimum=1)
    max_connections: int = option(
        4096, "HTTP connections at any time; requests on more are answered with 503.", minimum=1
    )
    client_timeout: int = option(
        60,
        "Seconds in which the header of an HTTP request must come, and then its body; slower ones are "
        "answered with 408.",
        minimum=1,
    )
    request_timeout: int = option(
        3600,
        "Seconds after which a request that has not ended is answered with 504; a request can ask for less "
        "(its field `timeout`).",
        minimum=1,
        maximum=10**9,  # a Submit says it in milliseconds, within the protocol's limits
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "URL that takes OpenTelemetry traces of requests (OTLP over HTTP), like "
        "http://localhost:4318/v1/traces; the packages for it are the extra `otel` [default: what "
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT says, else none].",
    )


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """How a node finds its gateway, and others find it."""

    join: str = option("", "Address of the gateway that this node joins; of several, with commas between.")
    listen: str | None = option(
        None,
        "Address that a prefill node binds for decode nodes [default: private; with a gateway on another "
        "host, on the interface that leads to it].",
    )
    node_id: str | None = option(None, "Name of this node in logs and metrics [default: role and pid].")
    keys: str | None = keys_option()


@dataclass(frozen=True, slots=True)
class ListenConfig:
    """Where the gateway waits for its nodes."""

    nodes: str | None = option(
        None, "Address that the gateway binds for its nodes [default: a private ipc socket, printed]."
    )
    keys: str | None = keys_option()


@dataclass(frozen=True, slots=True)
class DrainConfig:
    """How long a process takes to leave."""

    drain_grace: int = option(
        30,
        "Seconds that requests may go on after SIGTERM; new ones are refused, or go to another node. 0, "
        "SIGINT and a second signal end at once.",
        minimum=0,
    )


@dataclass(frozen=True, slots=True)
class ChildConfig:
    """Set by `baton serve` for its children; nobody types it."""

    parent_fd: int | None = option(None, "Socket to the supervisor.", hidden=True)


@dataclass(frozen=True, slots=True)
class SupervisorConfig:
    """What `baton serve` itself needs."""

    prefill: int | None = option(
        None, "Prefill nodes to start [default: 1, or none with --colocated].", minimum=1
    )
    decode: int = option(1, "Decode nodes to start.", minimum=1)
    gateway_workers: int = option(
        1, "Gateway processes to start, behind one port: for more clients than one can serve.", minimum=1
    )
    prefill_gpus: str | None = option(
        None,
        "GPUs that the prefill nodes take in turn, like 0,1 [default: all, in order, each node one with the "
        "fewest nodes].",
    )
    decode_gpus: str | None = option(
        None, "GPUs that the decode nodes take in turn [default: as for the prefill nodes, after them]."
    )
    stall_timeout: int = option(
        30, "Seconds without a sign of life after which a process is killed and started again.", minimum=1
    )
    keys: str | None = keys_option()


@dataclass(frozen=True, slots=True)
class LogConfig:
    """How much a process logs."""

    log_level: str = option(
        "info", "Least severity that is logged.", choices=("debug", "info", "warning", "error")
    )


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Which server is asked, and how it is to draw its answers."""

    url: str = option("http://127.0.0.1:8000", "Where the server is.")
    api_key: str | None = option(None, "Key that the server asks for; @FILE reads it from a file.")
    max_tokens: int | None = option(
        None, "Tokens of an answer at the most [default: the server's].", minimum=1
    )
    temperature: float | None = option(None, "0 takes the likeliest token each time [default: the server's].")
    seed: int | None = option(None, "The same seed gives the same answer.")


@dataclass(frozen=True, slots=True)
class AskConfig:
    """What only `baton generate` can be told."""

    raw: bool = option(False, "Continue the prompt as it stands, without the chat template.")
    timings: bool = option(False, "Say afterwards where the time went.")


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """What only `baton chat` can be told."""

    system: str | None = option(None, "System prompt [default: the chat template's own].")


C = TypeVar("C")


def is_flag(config: type[Any], name: str) -> bool:
    """Say whether the field is an on/off option."""
    return get_type_hints(config)[name] is bool


def value_type(config: type[Any], name: str) -> type:
    """Return the plain type of a field: `int | None` is int."""
    hint = get_type_hints(config)[name]
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(arg for arg in get_args(hint) if arg is not type(None))
    assert isinstance(hint, type)
    return hint


def pick(config: type[C], values: dict[str, Any]) -> C:
    """Build a config from the options of a command, taking the fields that are its own."""
    names = {f.name for f in fields(config)}  # type: ignore[arg-type]
    return config(**{name: value for name, value in values.items() if name in names})


def to_argv(*configs: Any) -> list[str]:
    """Write configs as options, leaving out what stands at its default."""
    argv: list[str] = []
    for config in configs:
        for f in fields(config):
            value = getattr(config, f.name)
            if not f.metadata or value is None or value == f.default:
                continue
            name = "--" + f.name.replace("_", "-")
            argv += [name] if value is True else [name, str(value)]
    return argv


def replace(config: C, **changes: Any) -> C:
    """Return the config with some fields changed."""
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]
