"""The command line: what a mistake looks like, and that a child gets exactly what the user asked for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cli
from common.config import (
    ChildConfig,
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
    to_argv,
    value_type,
)
from common.errors import ConfigError
from common.gpus import check_device
from common.http_port import check_port
from common.supervision.serve import (
    Launch,
    ServeConfig,
    banner,
    base_url,
    place_nodes,
    plan_services,
    short_temp_dir,
)

ROOT = Path(__file__).parents[2]
COMMANDS: dict[str, tuple[type[Any], ...]] = {
    "serve": (
        GatewayConfig,
        ModelConfig,
        EngineConfig,
        TransferConfig,
        DecodeConfig,
        SupervisorConfig,
        DrainConfig,
        LogConfig,
    ),
    "gateway": (GatewayConfig, ListenConfig, ModelConfig, DrainConfig, LogConfig, ChildConfig),
    "prefill": (NodeConfig, ModelConfig, EngineConfig, TransferConfig, DrainConfig, LogConfig, ChildConfig),
    "decode": (
        NodeConfig,
        ModelConfig,
        EngineConfig,
        TransferConfig,
        DecodeConfig,
        DrainConfig,
        LogConfig,
        ChildConfig,
    ),
}


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli", *args],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def one_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.stdout == ""
    assert result.stderr.startswith("baton: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.mark.parametrize(
    ("args", "env", "words"),
    [
        (["serve", "--no-such-option"], {}, "--no-such-option"),
        (["serve", "--port", "many"], {}, "'many'"),
        (["serve", "--port", "70000"], {}, "65535"),
        (["serve", "--page-size", "0"], {}, "--page-size"),
        (["serve", "--dtype", "int3"], {}, "float32"),
        (["serve"], {"BATON_PAGE_SIZE": "0"}, "--page-size"),
        (["serve", "one", "two"], {}, "two"),
        (["serve", "--port", "0", "/no/such/model"], {}, "/no/such/model"),
        (["serve", "--prefill", "0"], {}, "--prefill"),
        (["serve", "--decode", "0"], {}, "--decode"),
        (["serve", "--colocated", "--prefill", "1"], {}, "--colocated"),
        (["serve", "--colocated", "--prefill-gpus", "0"], {}, "--prefill-gpus"),
        (["serve", "--prefill-gpus", "one"], {}, "'one' is no list of GPU numbers"),
        (["serve"], {"BATON_DECODE_GPUS": "0,"}, "--decode-gpus '0,'"),
        (["serve", "--gpu-memory-fraction", "0.99"], {}, "0.98"),
        (["serve", "--gpu-memory-fraction", "half"], {}, "'half'"),
        (["serve", "--gpu", "-1"], {}, "--gpu"),
        (["serve", "--gpu", "1", "--prefill-gpus", "0"], {}, "--gpu 1 does not go with --prefill-gpus"),
        (["serve", "--gpu", "1", "--decode-gpus", "0"], {}, "--gpu 1 does not go with --decode-gpus"),
        (["serve", "--port", "0", "--device", "cuda"], {"CUDA_VISIBLE_DEVICES": ""}, "--device cuda: "),
        (["serve", "--port", "0", "--gpu", "1"], {"CUDA_VISIBLE_DEVICES": ""}, "--gpu 1: "),
        (["prefill", "--join", "ipc:///no/such/x", "--gpu", "0", "--device", "cpu"], {}, "--device cpu"),
        (["bench", "step", "/no/such/model"], {}, "/no/such/model"),
        (["bench", "transfer", "--device", "cpu", "--plane", "cuda-ipc"], {}, "--plane cuda-ipc"),
        (["models", "pull", "no-such-model"], {}, "no-such-model"),
        (["models", "pull"], {}, "NAME"),
        (["serve", "--host", "no.such.host.invalid"], {}, "no.such.host.invalid"),
        (["gateway", "/no/such/model"], {}, "/no/such/model"),
        (["decode"], {}, "--join"),
        (["decode", "--parent-fd", "77", "--join", "ipc:///no/such/x"], {}, "--parent-fd"),
        (["no-such-command"], {}, "no-such-command"),
    ],
)
def test_mistake_is_one_line_and_status_2(args: list[str], env: dict[str, str], words: str) -> None:
    result = run(*args, **env)
    assert words in one_line(result)
    assert result.returncode == 2


NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
ON_CPU = {
    ("--transfer", "cuda-ipc"): "--transfer cuda-ipc is for nodes on GPUs",
    ("--attention", "flashinfer"): "--attention flashinfer: it needs a GPU",
    ("--cuda-graphs", "on"): "--cuda-graphs on needs a GPU",
}
PLACED = {
    ("--prefill-gpus", "0"): "--prefill-gpus is set, but the nodes run on the CPU",
    ("--decode-gpus", "0"): "--decode-gpus is set, but the nodes run on the CPU",
}


@pytest.mark.parametrize(("args", "words"), [*ON_CPU.items(), *PLACED.items()])
def test_what_needs_a_gpu_is_refused_before_the_model_is_looked_for(
    args: tuple[str, ...], words: str
) -> None:
    result = run("serve", "/no/such/model", "--port", "0", *args, **NO_GPU)
    assert words in one_line(result)
    assert result.returncode == 2


@pytest.mark.parametrize(("args", "words"), [*ON_CPU.items(), *PLACED.items()])
def test_what_the_cpu_was_asked_for_is_refused_before_any_work(args: tuple[str, ...], words: str) -> None:
    # Not even the address was tried.
    result = run("serve", "--host", "no.such.host.invalid", "--device", "cpu", *args)
    assert words in one_line(result)
    assert result.returncode == 2


@pytest.mark.parametrize("command", ["prefill", "decode"])
@pytest.mark.parametrize(("args", "words"), ON_CPU.items())
def test_node_is_refused_what_needs_a_gpu_before_its_model_is_looked_for(
    command: str, args: tuple[str, ...], words: str
) -> None:
    line = one_line(run(command, "/no/such/model", "--join", "ipc:///no/such/x", *args, **NO_GPU))
    assert words in line
    assert "--device" not in line


@pytest.mark.parametrize(
    ("engine", "transfer", "num_gpus"),
    [
        (EngineConfig(), TransferConfig(transfer="shm"), 1),
        (EngineConfig(cuda_graphs="on", attention="sdpa"), TransferConfig(), 1),
    ],
)
def test_what_a_gpu_does_not_do_is_refused(
    engine: EngineConfig, transfer: TransferConfig, num_gpus: int
) -> None:
    with pytest.raises(ConfigError, match=r"^--(transfer shm|cuda-graphs on) "):
        check_device(engine, transfer, num_gpus)


def test_what_each_device_does_is_not_refused() -> None:
    for num_gpus, planes in ((0, ("auto", "shm", "frames")), (2, ("auto", "cuda-ipc", "frames"))):
        for plane in planes:
            check_device(EngineConfig(), TransferConfig(transfer=plane), num_gpus)
    check_device(EngineConfig(cuda_graphs="on", attention="flashinfer"), TransferConfig(), 1)
    check_device(EngineConfig(cuda_graphs="off", attention="sdpa"), TransferConfig(), 0)


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA here")
def test_torch_without_cuda_is_said_with_what_to_do() -> None:
    result = run("serve", "/no/such/model", "--port", "0", "--device", "cuda")
    assert "was built without CUDA: install torch's CUDA build, or use --device cpu" in one_line(result)


def test_taken_port_is_said_before_any_work() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", "/no/such/model", "--port", str(port))
    assert f"port {port} is taken" in one_line(result)
    assert result.returncode == 2


def test_free_port_is_not_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)


def test_help_names_every_command_but_the_internal_one() -> None:
    result = run("--help")
    assert result.returncode == 0
    for name in ("serve", "generate", "chat", "models", "gateway", "prefill", "decode"):
        assert f"\n  {name} " in result.stdout
    assert "prepare" not in result.stdout


def test_help_loads_neither_torch_nor_the_http_stack() -> None:
    code = "import sys, cli; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {"torch", "zmq", "httpx", "fastapi", "transformers"} & {*loaded.stdout.split()}


def parse(command: str, argv: list[str]) -> dict[str, Any]:
    with cli.baton.commands[command].make_context(command, argv) as context:
        return dict(context.params)


def values_of(config: type[Any]) -> st.SearchStrategy[Any]:
    """Draw any config that an option line can express."""
    drawn: dict[str, st.SearchStrategy[Any]] = {}
    for f in fields(config):
        if not f.metadata:
            continue
        if is_flag(config, f.name):
            drawn[f.name] = st.booleans()
        elif f.metadata["choices"]:
            drawn[f.name] = st.sampled_from(f.metadata["choices"])
        elif value_type(config, f.name) is int:
            low = f.metadata["minimum"] or 0
            high = f.metadata["maximum"] or 2**40
            drawn[f.name] = st.just(f.default) | st.integers(low, high)
        elif value_type(config, f.name) is float:
            drawn[f.name] = st.floats(f.metadata["minimum"], f.metadata["maximum"])
        else:
            drawn[f.name] = st.just(f.default) | st.text(
                st.characters(codec="ascii", exclude_categories=["C"])
            )
    return st.builds(config, **drawn)


@pytest.mark.parametrize("command", COMMANDS)
@given(data=st.data())
def test_options_written_by_to_argv_come_back_as_they_were(command: str, data: st.DataObject) -> None:
    configs = [data.draw(values_of(config)) for config in COMMANDS[command]]
    values = parse(command, to_argv(*configs))
    assert [pick(type(config), values) for config in configs] == configs


def test_every_option_has_an_environment_variable_and_a_help_text() -> None:
    for name, command in (*cli.baton.commands.items(), *cli.models.commands.items()):
        for param in command.params:
            if isinstance(param, click.Option):
                assert param.envvar == "BATON_" + str(param.name).upper(), (name, param.name)
                assert param.help, (name, param.name)


def plan(argv: list[str], num_gpus: int = 0) -> dict[str, list[str]]:
    launch = Launch(("baton",), {})
    config = ServeConfig.of(parse("serve", argv))
    shares = place_nodes(config, num_gpus)
    specs = plan_services(config, launch, "/models/m", Path("/tmp/baton-x"), shares)
    return {spec.name: list(spec.argv) for spec in specs}


def test_children_are_the_commands_with_what_concerns_them() -> None:
    services = plan(["tiny", "--page-size", "32", "--port", "9000", "--max-queued", "5", "--verify-pages"])
    assert services == {
        "gateway": [
            *("baton", "gateway", "/models/m", "--port", "9000", "--served-model-name", "tiny"),
            *("--nodes", "ipc:///tmp/baton-x/gateway.sock"),
        ],
        "prefill-0": [
            *("baton", "prefill", "/models/m", "--device", "cpu", "--page-size", "32", "--local-nodes", "2"),
            *("--verify-pages",),
            *("--join", "ipc:///tmp/baton-x/gateway.sock"),
            *("--listen", "ipc:///tmp/baton-x/prefill-0.sock", "--node-id", "prefill-0"),
        ],
        "decode-0": [
            *("baton", "decode", "/models/m", "--device", "cpu", "--page-size", "32", "--local-nodes", "2"),
            *("--verify-pages",),
            *("--max-queued", "5"),
            *("--join", "ipc:///tmp/baton-x/gateway.sock", "--node-id", "decode-0"),
        ],
    }


def value(argv: list[str], option: str) -> str:
    return argv[argv.index(option) + 1]


def test_several_nodes_have_names_and_sockets_of_their_own_and_share_the_machine() -> None:
    services = plan(["--prefill", "2", "--decode", "3"])
    names = ["gateway", "prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    assert list(services) == names
    assert [value(services[name], "--node-id") for name in names[1:]] == names[1:]
    assert {value(services[name], "--local-nodes") for name in names[1:]} == {"5"}
    assert len({value(services[name], "--listen") for name in names[1:3]}) == 2


def test_every_node_joins_all_gateways() -> None:
    services = plan(["--gateway-workers", "2", "--prefill", "1", "--port", "9000"])
    assert list(services) == ["gateway-0", "gateway-1", "prefill-0", "decode-0"]
    addresses = [value(services[name], "--nodes") for name in ("gateway-0", "gateway-1")]
    assert len(set(addresses)) == 2
    for name in ("prefill-0", "decode-0"):
        assert value(services[name], "--join") == ",".join(addresses)


def test_nodes_started_by_hand_can_be_counted_in() -> None:
    services = plan(["--local-nodes", "7"])
    assert (
        value(services["prefill-0"], "--local-nodes") == value(services["decode-0"], "--local-nodes") == "7"
    )


def test_colocated_server_has_no_prefill_node() -> None:
    services = plan(["--colocated", "--decode", "2"])
    assert services.keys() == {"gateway", "decode-0", "decode-1"}
    assert "--colocated" in services["decode-0"]
    assert value(services["decode-1"], "--local-nodes") == "2"


def gpus(argv: list[str], num_gpus: int) -> dict[str, tuple[int | None, float | None]]:
    """Return the GPU, and the part of its memory, that each child of a server reads from its options."""
    children = plan(argv, num_gpus)
    found = {}
    for name in children.keys() - {"gateway"}:
        _, command, *options = children[name]
        values = parse(command, options)
        found[name] = (values["gpu"], values["gpu_memory_fraction"])
    assert "--gpu" not in children["gateway"]
    return found


def test_nodes_are_told_which_gpu_is_theirs_and_how_much_of_it() -> None:
    assert gpus([], 2) == {"prefill-0": (0, 0.9), "decode-0": (1, 0.9)}
    assert gpus(["--gpu-memory-fraction", "0.8"], 1) == {"prefill-0": (0, 0.4), "decode-0": (0, 0.4)}
    assert gpus(["--colocated", "--decode", "2"], 2) == {"decode-0": (0, 0.9), "decode-1": (1, 0.9)}
    assert gpus(["--decode", "2", "--decode-gpus", "3,1"], 4) == {
        "prefill-0": (0, 0.9),
        "decode-0": (3, 0.9),
        "decode-1": (1, 0.9),
    }
    assert gpus(["--gpu", "1"], 2) == {"prefill-0": (1, 0.45), "decode-0": (1, 0.45)}


@pytest.mark.parametrize(
    ("argv", "num_gpus", "words"),
    [
        (["--prefill-gpus", "0"], 0, "--prefill-gpus"),
        (["--decode-gpus", "0"], 0, "--decode-gpus"),
        (["--transfer", "cuda-ipc"], 0, "cuda-ipc"),
        (["--transfer", "shm"], 1, "shm"),
        (["--decode-gpus", "0,4"], 4, "GPU 4 is not there: torch sees 4"),
        (["--decode", "40"], 2, "--gpu-memory-fraction"),
    ],
)
def test_server_that_does_not_fit_the_gpus_is_refused(argv: list[str], num_gpus: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(argv, num_gpus)


def test_clients_use_the_given_name_of_the_model() -> None:
    argv = plan(["tiny", "--served-model-name", "my model"])["gateway"]
    assert argv[argv.index("--served-model-name") + 1] == "my model"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("fe80::1", "http://[fe80::1]:80"),
        ("localhost", "http://localhost:80"),
    ],
)
def test_base_url_is_one_that_a_client_here_can_use(host: str, url: str) -> None:
    assert base_url(host, 80) == url


def test_banner_survives_the_shell() -> None:
    text = banner('it\'s "mine"', "http://127.0.0.1:1")
    command = text[text.index("curl") : text.index("\n\nhttp")].replace("curl", "printf '%s\\n'", 1)
    printed = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout
    assert '"model": "it\'s \\"mine\\""' in printed


def test_long_temporary_folder_is_not_used_for_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/" + "x" * 100)
    assert short_temp_dir() == "/tmp"
