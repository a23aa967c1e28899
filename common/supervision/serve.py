"""`baton serve`: one server on this machine, as a supervised gateway, prefill nodes and decode nodes.

1. Check options and port, before anything that takes time.
2. Make a private folder for the sockets.
3. Count the GPUs, check what is asked of them and make the model ready, in a process of its own: a signal can
   end it, and its memory is given back.
4. Give each node a GPU, where there are any.
5. Start gateway and nodes, wait until a pair of nodes is usable, say how to talk to the server.
6. Watch them (or ask one question) until a signal; end everything, on SIGTERM when the requests that run are
   over (drain.py).

It must not know how a child does its work: the children are the commands `baton gateway / prefill / decode`.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import shlex
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from common.api_key import read_api_key
from common.config import (
    ClientConfig,
    DecodeConfig,
    DrainConfig,
    EngineConfig,
    GatewayConfig,
    ListenConfig,
    LogConfig,
    ModelConfig,
    NodeConfig,
    SupervisorConfig,
    TransferConfig,
    pick,
    replace,
    to_argv,
)
from common.errors import ConfigError
from common.gpus import check_device, count_gpus
from common.http_port import bind_http, check_port
from common.keys import load_keys
from common.supervision.child import ChildSpec
from common.supervision.children import Stopped
from common.supervision.gpu_plan import GpuShare, parse_gpus, plan_gpus
from common.supervision.supervisor import GATEWAY, Job, Supervisor
from terminal.progress import progress

log = logging.getLogger("baton.serve")

# ipc:// addresses over 107 characters fail; a folder of ours and a socket in it take about 35.
MAX_TEMP_DIR_CHARS = 60
COUNTS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # of prometheus_client


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """All settings of one server."""

    model: ModelConfig
    engine: EngineConfig
    transfer: TransferConfig
    decode: DecodeConfig
    gateway: GatewayConfig
    supervisor: SupervisorConfig
    log: LogConfig
    drain: DrainConfig = DrainConfig()

    @classmethod
    def of(cls, values: dict[str, Any]) -> ServeConfig:
        """Build all settings from the options of the command."""
        return cls(**{name: pick(kind, values) for name, kind in get_type_hints(cls).items()})

    @property
    def num_prefill(self) -> int:
        """Prefill nodes to start; a colocated decode node needs none."""
        return 0 if self.decode.colocated else self.supervisor.prefill or 1

    @property
    def num_decode(self) -> int:
        """Decode nodes to start."""
        return self.supervisor.decode

    @property
    def gateway_names(self) -> tuple[str, ...]:
        """Names of all gateways."""
        workers = self.supervisor.gateway_workers
        return (GATEWAY,) if workers == 1 else tuple(f"{GATEWAY}-{i}" for i in range(workers))

    @property
    def node_names(self) -> tuple[str, ...]:
        """Names of all nodes, prefill nodes first."""
        return (
            *(f"prefill-{i}" for i in range(self.num_prefill)),
            *(f"decode-{i}" for i in range(self.num_decode)),
        )


@dataclass(frozen=True, slots=True)
class Prepared:
    """What `baton prepare` found out: where the model lies, and how many GPUs there are (0: use the CPU)."""

    folder: str
    num_gpus: int


@dataclass(frozen=True, slots=True)
class Launch:
    """How processes are started here.

    `command` is what `baton` is called as, `env` the environment of the children, without any `BATON_*`: an
    option that stands at its default is not on a child's command line, and must not come back from there.
    """

    command: tuple[str, ...]
    env: Mapping[str, str]
    cache: Path | None = None


def short_temp_dir() -> str:
    """Return a folder for temporary folders whose path is short enough for sockets in them."""
    folder = tempfile.gettempdir()
    return folder if len(folder) <= MAX_TEMP_DIR_CHARS else "/tmp"


def place_nodes(config: ServeConfig, num_gpus: int) -> dict[str, GpuShare]:
    """Return each node's GPU by the node's name; nothing on a machine without GPUs.

    Raises:
        ConfigError: what was asked for does not go with the GPUs that there are.
    """
    supervisor, engine = config.supervisor, config.engine
    check_device(engine, config.transfer, num_gpus)
    prefill_gpus = parse_gpus("--prefill-gpus", supervisor.prefill_gpus)
    decode_gpus = parse_gpus("--decode-gpus", supervisor.decode_gpus)
    if num_gpus == 0:
        why = "--device cpu was given" if engine.device == "cpu" else "there is no GPU that torch can use"
        for option, value in (("--prefill-gpus", prefill_gpus), ("--decode-gpus", decode_gpus)):
            if value is not None:
                raise ConfigError(f"{option} is set, but the nodes run on the CPU: {why}")
        return {}
    one = None if engine.gpu is None else (engine.gpu,)
    phases = ((config.num_prefill, prefill_gpus or one), (config.num_decode, decode_gpus or one))
    shares = plan_gpus(num_gpus, phases, engine.gpu_memory_fraction)
    return dict(zip(config.node_names, shares, strict=True))


def plan_services(
    config: ServeConfig, launch: Launch, folder: str, run_dir: Path, shares: Mapping[str, GpuShare]
) -> tuple[ChildSpec, ...]:
    """Return the processes of a server whose model lies in `folder`; `shares` as from `place_nodes`."""
    addresses = {name: f"ipc://{run_dir}/{name}.sock" for name in config.gateway_names}
    join = ",".join(addresses.values())
    model = replace(config.model, model=folder)
    served_name = config.gateway.served_model_name or config.model.model
    gateway = replace(config.gateway, served_model_name=served_name)
    # Decided once: a child that could decide again might do so differently.
    device = "cuda" if shares else "cpu"
    keys = config.supervisor.keys
    # Who starts more nodes by hand beside these says how many there are in all.
    local_nodes = config.engine.local_nodes or len(config.node_names)
    engine = replace(config.engine, device=device, local_nodes=local_nodes)

    def child(name: str, role: str, *configs: object) -> ChildSpec:
        argv = (*launch.command, role, folder, *to_argv(model, *configs, config.drain, config.log))
        return ChildSpec(name, role, argv, ends_first=role == GATEWAY)

    specs = [
        child(name, GATEWAY, gateway, ListenConfig(nodes=address, keys=keys))
        for name, address in addresses.items()
    ]
    for name in config.node_names:
        role = name.partition("-")[0]
        share = shares.get(name)
        own = (
            engine
            if share is None
            else replace(engine, gpu=share.gpu, gpu_memory_fraction=share.memory_fraction)
        )
        if role == "prefill":
            node = NodeConfig(join=join, listen=f"ipc://{run_dir}/{name}.sock", node_id=name, keys=keys)
            specs.append(child(name, role, own, config.transfer, node))
        else:
            node = NodeConfig(join=join, node_id=name, keys=keys)
            specs.append(child(name, role, own, config.transfer, config.decode, node))
    return tuple(specs)


def base_url(host: str, port: int) -> str:
    """Return the URL under which this machine reaches a server that listens on `host`."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"http://{host or '127.0.0.1'}:{port}"
    if address.is_unspecified:
        return f"http://127.0.0.1:{port}" if address.version == 4 else f"http://[::1]:{port}"
    return f"http://{address}:{port}" if address.version == 4 else f"http://[{address}]:{port}"


def _share_port(config: ServeConfig, held: ExitStack) -> ServeConfig:
    """Hold the port that several gateways are to share, so that they all have it, and nobody else."""
    if config.supervisor.gateway_workers == 1:
        return config
    http = held.enter_context(bind_http(config.gateway.host, config.gateway.port, is_shared=True))
    gateway = replace(config.gateway, port=http.getsockname()[1], shares_port=True)
    return replace(config, gateway=gateway)


def _environment(config: ServeConfig, launch: Launch, run_dir: Path) -> Mapping[str, str]:
    """Return the children's; several gateways find there where all of them count."""
    if config.supervisor.gateway_workers == 1:
        return {name: value for name, value in launch.env.items() if name != COUNTS_VARIABLE}
    folder = run_dir / "metrics"
    folder.mkdir()
    return {**launch.env, COUNTS_VARIABLE: str(folder)}


def _with_key_in_file(config: ServeConfig, run_dir: Path) -> ServeConfig:
    """Put the API key where children find it and other users do not: command lines are for all to see."""
    key = read_api_key(config.gateway.api_key)
    if key is None:
        return config
    path = run_dir / "api-key"
    path.touch(0o600)
    path.write_text(key)
    return replace(config, gateway=replace(config.gateway, api_key=f"@{path}"))


def banner(model_name: str, url: str, *, needs_key: bool = False) -> str:
    """Return what a person needs to use the server, with a command that works as pasted."""
    key = '    -H "Authorization: Bearer $BATON_API_KEY" \\\n' if needs_key else ""
    messages = [{"role": "user", "content": "What is a relay race?"}]
    body = {"model": model_name, "messages": messages, "max_tokens": 64, "temperature": 0}
    return (
        f"\nBaton serves {model_name} at {url}\n\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"{key}    -d {shlex.quote(json.dumps(body))}\n\n"
        f"{url}/ in a browser shows it at work. Ctrl-C stops it.\n"
    )


def _exit_status(job: Job) -> int:
    return 1 if job.status is None or job.status < 0 else job.status


def _prepare(supervisor: Supervisor, config: ServeConfig, launch: Launch) -> Prepared | int:
    """Count the GPUs and make the model ready; the exit status of the process that could not do so."""
    cache = () if launch.cache is None else ("--cache", str(launch.cache))
    # All that a node's place depends on: what does not fit the GPUs is found before a model is fetched.
    placed = (config.supervisor, config.model, config.engine, config.transfer, config.decode)
    argv = (*launch.command, "prepare", *cache, *to_argv(*placed, config.log))
    end = supervisor.run_job(ChildSpec("prepare", "prepare", argv, ("--", config.model.model), is_job=True))
    if end.status != 0:
        return _exit_status(end)
    return Prepared(str(end.info["folder"]), int(end.info["gpus"]))


def _ask(supervisor: Supervisor, config: ServeConfig, launch: Launch, url: str, question: str) -> int:
    # Greedy: at temperature 1 a model of this size tells fairy tales.
    argv = (
        *launch.command,
        "generate",
        "--url",
        url,
        "--timings",
        "--temperature",
        "0",
        "--max-tokens",
        "128",
        *to_argv(ClientConfig(api_key=config.gateway.api_key)),
    )
    spec = ChildSpec("generate", "generate", argv, ("--", question), is_job=True)
    return _exit_status(supervisor.run_job(spec))


def refuse_contradictions(config: ServeConfig) -> None:
    """Raise ConfigError for what is wrong whatever this machine has, before anything takes time."""
    supervisor = config.supervisor
    for option, value in (("--prefill", supervisor.prefill), ("--prefill-gpus", supervisor.prefill_gpus)):
        if config.decode.colocated and value is not None:
            raise ConfigError(
                f"{option} does not go with --colocated: there the decode nodes compute the prompts"
            )
    for option, text in (
        ("--prefill-gpus", supervisor.prefill_gpus),
        ("--decode-gpus", supervisor.decode_gpus),
    ):
        if parse_gpus(option, text) is not None and config.engine.gpu is not None:
            raise ConfigError(f"--gpu {config.engine.gpu} does not go with {option}: one of them says where")
    if config.engine.device == "cpu":
        place_nodes(config, count_gpus(config.engine))


def serve(
    config: ServeConfig, launch: Launch, say: Callable[[str], None], question: str | None = None
) -> int:
    """Run a server until a signal, or until one question is answered; return the exit status.

    Raises:
        ConfigError: it cannot start, for a reason that the user can mend.
        ChildFailed: a process of it ended before it was ever ready.
    """
    refuse_contradictions(config)
    check_port(config.gateway.host, config.gateway.port)
    read_api_key(config.gateway.api_key)
    load_keys(config.supervisor.keys)
    name = config.gateway.served_model_name or config.model.model
    limits_s = config.supervisor.stall_timeout, config.drain.drain_grace
    try:
        with (
            tempfile.TemporaryDirectory(
                prefix="baton-", dir=short_temp_dir(), ignore_cleanup_errors=True
            ) as run_dir,
            ExitStack() as held,
            Supervisor(Path(run_dir), _environment(config, launch, Path(run_dir)), *limits_s) as supervisor,
        ):
            config = _share_port(config, held)
            config = _with_key_in_file(config, Path(run_dir))
            with progress("making the model ready"):
                prepared = _prepare(supervisor, config, launch)
            if isinstance(prepared, int):
                return prepared
            shares = place_nodes(config, prepared.num_gpus)
            for node, share in shares.items():
                log.info("%s runs on GPU %d, with %g of its memory", node, share.gpu, share.memory_fraction)
            supervisor.start(plan_services(config, launch, prepared.folder, Path(run_dir), shares))
            with progress("starting") as shown:
                url = base_url(config.gateway.host, supervisor.wait_usable(shown.say))
            if question is not None:
                return _ask(supervisor, config, launch, url, question)
            say(banner(name, url, needs_key=config.gateway.api_key is not None))
            supervisor.watch()
    except Stopped as stopped:
        return 0 if question is None else 128 + stopped.signum
    except OSError as error:
        raise ConfigError(f"cannot start: {error}") from None
