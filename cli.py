"""The command `baton`: options become configs, a command calls the one function that does the work.

It must not do any of that work. What a command needs is imported inside it: `baton --help` and the processes
without a model load neither torch nor the HTTP stack, and a prefill node sets its environment before torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import click

from benchmarks.cli import bench
from common import faults
from common.config import (
    DEFAULT_MODEL,
    AskConfig,
    ChatConfig,
    ChildConfig,
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
    is_flag,
    pick,
    replace,
    value_type,
)
from common.errors import ConfigError
from common.gpus import check_device, count_gpus, wants_gpu
from common.log import set_up_logging
from common.messages import Role
from common.supervision.lifeline import Lifeline
from common.supervision.small_machine import share_cores
from doctor.config import DoctorConfig

F = TypeVar("F", bound=Callable[..., Any])


def options(*configs: type[Any]) -> Callable[[F], F]:
    """Give a command one option for each field of the configs, in their order."""

    def decorate(command: F) -> F:
        for config in reversed(configs):
            for f in reversed(fields(config)):
                if f.metadata:
                    command = _option(config, f.name, f.default, f.metadata)(command)
        return command

    return decorate


def _option(config: type[Any], name: str, default: Any, metadata: Any) -> Callable[[F], F]:
    flag = is_flag(config, name)
    kind: Any = value_type(config, name)
    if metadata["choices"]:
        kind = click.Choice(metadata["choices"])
    elif metadata["minimum"] is not None:
        in_range = click.IntRange if kind is int else click.FloatRange
        kind = in_range(metadata["minimum"], metadata["maximum"])
    return click.option(
        "--" + name.replace("_", "-"),
        name,
        type=None if flag else kind,
        is_flag=flag,
        default=default,
        show_default=not flag and default not in (None, ""),
        envvar="BATON_" + name.upper(),
        help=metadata["help"],
        hidden=metadata["hidden"],
    )


takes_cache = click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="BATON_CACHE",
    help="Folder of downloaded models  [default: ~/.cache/baton]",
)


def takes_model(command: F) -> F:
    """Give a command the argument MODEL and the folder where models are kept."""
    return click.argument("model", default=DEFAULT_MODEL, envvar="BATON_MODEL")(takes_cache(command))


@contextmanager
def _process(values: dict[str, Any], name: str) -> Iterator[Lifeline]:
    """Set up what every long-running process needs; enter it before anything slow is imported."""
    set_up_logging(pick(LogConfig, values))
    faults.begin(name)
    parent_fd = pick(ChildConfig, values).parent_fd
    if parent_fd is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets Ctrl-C, and ends us
    with closing(Lifeline(parent_fd)) as lifeline:
        yield lifeline


@contextmanager
def _asking() -> Iterator[None]:
    """Make the failure of a server that we ask one line."""
    from gateway.api_client import AskFailed

    try:
        yield
    except AskFailed as error:
        raise click.ClickException(str(error)) from None


def _resolve(values: dict[str, Any]) -> Path:
    """Return the folder of MODEL, downloaded and converted if need be."""
    from model_store.store import resolve_model

    say = partial(click.echo, err=True)
    return resolve_model(values["model"], say, values["cache"], values.get("load_format", "auto")).absolute()


def _local_model(values: dict[str, Any]) -> ModelConfig:
    """Return the model's settings with its folder as the model."""
    return replace(pick(ModelConfig, values), model=str(_resolve(values)))


def _command() -> tuple[str, ...]:
    """Return what starts this very program: the script beside the interpreter, or the module."""
    script = Path(sys.executable).parent / "baton"
    return (str(script),) if os.access(script, os.X_OK) else (sys.executable, "-m", "cli")


class _InOrder(click.Group):
    """Lists the commands as they stand in this file, the everyday ones first."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_InOrder, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="baton-serve", prog_name="baton", message="%(prog)s %(version)s")
def baton() -> None:
    """Serve a language model, with prefill and decode in separate processes.

    MODEL is a folder with safetensors, a GGUF file, a hub id (org/name), or smollm2-135m, the default. Every
    option but those of bench can also be set by an environment variable: --page-size is BATON_PAGE_SIZE.
    """


@baton.command()
@takes_model
@options(
    SupervisorConfig,
    GatewayConfig,
    ModelConfig,
    EngineConfig,
    TransferConfig,
    DecodeConfig,
    DrainConfig,
    LogConfig,
)
@click.option(
    "--ask",
    envvar="BATON_ASK",
    help="Ask one question when ready, print the answer and where its time went, and end.",
)
def serve(ask: str | None, **values: Any) -> int:
    """Run a whole server on this machine, until Ctrl-C."""
    from common.supervision.serve import Launch, ServeConfig, serve
    from common.supervision.supervisor import ChildFailed

    set_up_logging(pick(LogConfig, values))
    kept = {faults.VARIABLE}
    env = {name: value for name, value in os.environ.items() if name in kept or not name.startswith("BATON_")}
    try:
        return serve(ServeConfig.of(values), Launch(_command(), env, values["cache"]), click.echo, ask)
    except ChildFailed as error:
        # Its own complaint about the set-up (status 2) is ours; anything else is a crash.
        _fail(str(error), 2 if error.status == 2 else 1)


@baton.command()
@click.argument("prompt")
@options(ClientConfig, AskConfig, ChildConfig)
def generate(prompt: str, **values: Any) -> None:
    """Ask a running server, and print its answer as it comes."""
    with closing(Lifeline(pick(ChildConfig, values).parent_fd)), _asking():
        from gateway.ask import ask

        write = partial(click.echo, nl=False)
        ask(pick(ClientConfig, values), pick(AskConfig, values), prompt, write)


@baton.command()
@options(ClientConfig, ChatConfig)
def chat(**values: Any) -> None:
    """Chat with a running server, one line a question.

    Ctrl-C stops an answer; /clear starts anew; /exit or Ctrl-D ends.
    """
    with _asking():
        from gateway.chat import chat

        chat(pick(ClientConfig, values), pick(ChatConfig, values))


@baton.group(cls=_InOrder)
def models() -> None:
    """See which models are here, and fetch others."""


@models.command("list")
@takes_cache
def list_(cache: Path | None) -> None:
    """List the models that are here, and those that can be pulled."""
    from model_store.listing import list_models

    click.echo(list_models(cache))


@models.command()
@click.argument("model", metavar="NAME")
@takes_cache
def pull(**values: Any) -> None:
    """Download and convert a model, and print its folder; one that is here is left as it is."""
    signal.signal(signal.SIGTERM, _exit_on_signal)
    click.echo(_resolve(values))


@baton.command()
@takes_model
@options(GatewayConfig, ListenConfig, ModelConfig, DrainConfig, LogConfig, ChildConfig)
def gateway(**values: Any) -> None:
    """Run the HTTP side alone; nodes join it."""
    with _process(values, "gateway") as lifeline:
        share_cores(Role.GATEWAY)
        model, config = _local_model(values), pick(GatewayConfig, values)
        config = replace(config, served_model_name=config.served_model_name or values["model"])
        from gateway.node import run_gateway

        run_gateway(model, config, pick(ListenConfig, values), pick(DrainConfig, values), lifeline)


@baton.command()
@takes_model
@options(NodeConfig, ModelConfig, EngineConfig, TransferConfig, DrainConfig, LogConfig, ChildConfig)
def prefill(**values: Any) -> None:
    """Run a node that computes prompts."""
    with _process(values, values["node_id"] or "prefill") as lifeline:
        engine, transfer = pick(EngineConfig, values), pick(TransferConfig, values)
        share_cores(Role.PREFILL, engine.local_nodes, on_gpu=wants_gpu(engine))
        node, engine = _joined(values), _on_device(engine, transfer)
        model = _local_model(values)
        from prefill_node.node import run_prefill

        run_prefill(model, engine, transfer, node, pick(DrainConfig, values), lifeline)


@baton.command()
@takes_model
@options(
    NodeConfig, ModelConfig, EngineConfig, TransferConfig, DecodeConfig, DrainConfig, LogConfig, ChildConfig
)
def decode(**values: Any) -> None:
    """Run a node that produces the tokens after the first."""
    with _process(values, values["node_id"] or "decode") as lifeline:
        engine, transfer = pick(EngineConfig, values), pick(TransferConfig, values)
        decode = pick(DecodeConfig, values)
        colocated, on_gpu = decode.colocated, wants_gpu(engine)
        share_cores(Role.DECODE, engine.local_nodes, colocated=colocated, on_gpu=on_gpu)
        node, engine = _joined(values), _on_device(engine, transfer)
        model = _local_model(values)
        from decode_node.node import run_decode

        run_decode(model, engine, transfer, decode, node, pick(DrainConfig, values), lifeline)


@baton.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
def keys(folder: Path) -> None:
    """Make the key of a cluster in FOLDER: for nodes on several hosts.

    Copy it to every host by a way that nobody else reads, and start all processes with --keys FOLDER.
    """
    from common.keys import make_keys

    click.echo(make_keys(folder))


@baton.command()
@takes_model
@options(
    DoctorConfig, SupervisorConfig, GatewayConfig, ModelConfig, EngineConfig, TransferConfig, DecodeConfig
)
def doctor(**values: Any) -> int:
    """Say whether `baton serve` with these options works on this machine, how well, and what to do if not.

    Changes nothing, and fetches nothing. Exit status: 0 without a problem, 1 with one.
    """
    from doctor.command import doctor

    return doctor(values)


baton.add_command(bench)


@baton.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def conformance(arguments: tuple[str, ...]) -> int:
    """Try the faults of others on this server."""
    from conformance.cli import main as command

    status: int = command.main(list(arguments), prog_name="baton conformance", standalone_mode=False)
    return status


def _joined(values: dict[str, Any]) -> NodeConfig:
    node = pick(NodeConfig, values)
    if not node.join:
        raise ConfigError("--join ADDRESS is missing: the address that `baton gateway` printed")
    from common.addresses import check_listen, check_reach
    from common.keys import load_keys
    from common.node import gateways_of

    keys = load_keys(node.keys)
    for address in gateways_of(node.join):
        check_reach(address, keys)
    if node.listen is not None:
        check_reach(node.listen, keys)
        check_listen(node.listen)
    return node


def _on_device(engine: EngineConfig, transfer: TransferConfig) -> EngineConfig:
    """Decide once where a node runs, and refuse what does not work there before the model is loaded."""
    num_gpus = count_gpus(engine)
    check_device(engine, transfer, num_gpus)
    return replace(engine, device="cuda" if num_gpus else "cpu")


@baton.command(hidden=True)
@takes_model
@options(SupervisorConfig, ModelConfig, EngineConfig, TransferConfig, DecodeConfig, LogConfig, ChildConfig)
def prepare(**values: Any) -> None:
    """Count the GPUs, check what can be checked now, make a model ready, and tell `baton serve` of it."""
    signal.signal(signal.SIGTERM, _exit_on_signal)
    with _process(values, "prepare") as lifeline:
        from common.engine.chunking import resolve_prefill_budget
        from common.model.spec import load_spec
        from common.supervision.serve import ServeConfig, place_nodes

        engine = pick(EngineConfig, values)
        num_gpus = count_gpus(engine)
        place_nodes(ServeConfig.of(values), num_gpus)
        resolve_prefill_budget(engine, "cuda" if num_gpus else "cpu")
        folder = _resolve(values)
        load_spec(folder, values["load_format"])
        lifeline.ready(folder=str(folder), gpus=num_gpus)


def _exit_on_signal(signum: int, frame: FrameType | None) -> NoReturn:
    """End by an exception, so that a download or conversion removes its temporary files."""
    sys.exit(128 + signum)


def _fail(text: str, status: int) -> NoReturn:
    click.echo(f"baton: {text}", err=True)
    sys.exit(status)


def main() -> NoReturn:
    """Run `baton`: what the user can mend is one line, without a traceback. Everything else is our bug."""
    try:
        status = baton.main(prog_name="baton", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(error.exit_code)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except ConfigError as error:
        _fail(str(error), 2)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    _end(status)


def _end(status: Any) -> NoReturn:
    """End without tearing the interpreter down: with torch and transformers loaded that takes seconds."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
