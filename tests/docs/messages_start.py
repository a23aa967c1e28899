"""What can go wrong before a process runs: options, ports, addresses, keys."""

# ruff: noqa: E501  # texts of tables

from __future__ import annotations

from pathlib import Path

from tests.docs.messages import BY_THE_MACHINE, NotTried, Row
from tests.docs.provoke import Edit, baton, node, on_taken_port, write


def _key(text: str, mode: int) -> Edit:
    def edit(folder: Path) -> None:
        (folder / "keys").mkdir()
        file = folder / "keys" / "cluster.key"
        file.write_text(text)
        file.chmod(mode)

    return edit


def _open_folder(folder: Path) -> None:
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)


GRPC_TRACES = baton(
    "gateway", "{tiny}", "--port", "0",
    OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9", OTEL_EXPORTER_OTLP_PROTOCOL="grpc",
)  # fmt: skip

STARTING = [
    Row(
        {
            "port <port> is taken: choose another with --port (0 lets the system pick one)": on_taken_port(
                "serve", "--port", "{port}"
            )
        },
        "Another process listens on this port: often a server of Baton that still runs.",
        "End it (`ss -ltnp` names it), or give `--port 8001`. With `--port 0` the log says which port it became.",
    ),
    Row(
        {
            "--host <host> is no address": baton("serve", "--host", "no.such.host.invalid"),
            "cannot listen on <host> port <port>: <reason>": baton("serve", "--host", "192.0.2.1", "--port", "0"),
        },
        "The name is not known, or the address is not one of this machine's. `ip address` lists those.",
        "`--host 127.0.0.1` (the default) is for this machine alone, `--host 0.0.0.0` for all its addresses; then "
        "set an API key too ([security.md](security.md)).",
    ),
    Row(
        {"--port <port> is no port: the largest is <largest>": NotTried("the command line refuses it before")},
        "The number is too large.",
        "Give one from 0 to 65535.",
    ),
    Row(
        {"cannot start: <reason>": BY_THE_MACHINE},
        "The system refused something that every server needs, such as a folder for its sockets.",
        "The reason is the system's own. `TMPDIR` names a folder that can be written, and has some MB free.",
    ),
    Row(
        {
            "<option> does not go with --colocated: there the decode nodes compute the prompts": baton(
                "serve", "--colocated", "--prefill", "1"
            )
        },
        "A colocated server has no prefill nodes.",
        "Leave the option out, or `--colocated`.",
    ),
    Row(
        {
            "--prefill-budget <tokens> is below --page-size <tokens>: a chunk must hold a page": baton(
                "serve", "{tiny}", "--port", "0", "--prefill-budget", "8"
            )
        },
        "Prompts are computed in chunks that end where a KV page does.",
        "Raise `--prefill-budget` to `--page-size` at least, better to 8 times as much.",
    ),
    Row(
        {
            "a KV pool of <pages> pages needs <size> MiB, which is not there<more>; lower --kv-pages": node(
                "--kv-pages", "100000000000"
            )
        },
        "The memory for KV pages could not be had.",
        "Lower `--kv-pages`; without it, a node takes what fits.",
    ),
    Row(
        {
            "--api-key: cannot read <file>: <reason>": baton("serve", "--port", "0", "--api-key", "@/no/such/file"),
            "--api-key: a key has at least one character, and only visible ones of ASCII": baton(
                "serve", "--port", "0", "--api-key", ""
            ),
        },
        "`--api-key @FILE` reads the key from a file; other text is the key itself.",
        "Name a file that can be read, with the key in it and nothing else.",
    ),
    Row(
        {
            "--max-connections <number> needs <number> file descriptors, and the limit is <number>: raise it "
            "(ulimit -n), or allow fewer connections": baton(
                "gateway", "{tiny}", "--port", "0", "--max-connections", "1000000000"
            )
        },
        "Each connection of a client needs a file descriptor. The server goes on, and beyond the limit new clients "
        "are not let in.",
        "`ulimit -n 65536` before the start (systemd: `LimitNOFILE=`), or a lower `--max-connections`.",
    ),
    Row(
        {
            "--otlp-traces-endpoint <url>: it begins with neither http:// nor https://": baton(
                "gateway", "{tiny}", "--port", "0", "--otlp-traces-endpoint", "collector:4318"
            ),
            "traces go out as <protocol>, and the environment asks for <protocol>": GRPC_TRACES,
            "no traces: <reason>": GRPC_TRACES,
            "OpenTelemetry refuses its settings: <reason>": baton(
                "gateway", "{tiny}", "--port", "0", "--otlp-traces-endpoint", "http://127.0.0.1:9/v1/traces",
                OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT="many",
            ),
        },
        "Traces are sent to a collector of OpenTelemetry over HTTP. With the variables `OTEL_EXPORTER_OTLP_*`, which may be "
        "there for other programs, the server goes on without.",
        "Give the whole address, `http://HOST:4318/v1/traces`; the collector's port for gRPC (4317) does not do. Where "
        'packages are missing: `pip install "baton-serve[otel]"`. A setting that is refused is one of the other `OTEL_*` '
        "variables: mend or unset it.",
    ),
    Row(
        {
            "<variable>: <rule> is no [NODE/]ACTION:POINT[@N][*TIMES][:ARGUMENT]": node(BATON_FAULTS="drop"),
            "<variable>: no action <action>: use <actions>": node(BATON_FAULTS="eat:Commit"),
            "<variable>: nothing to <action> at <point>: use <points>": node(BATON_FAULTS="drop:Lunch"),
            "<variable>: <rule>: <action> <needs> time, as 2s, 500ms or until=/FILE": node(
                BATON_FAULTS="delay:Commit"
            ),
            "<variable>: <time> is no time: use 2s, 500ms or until=/FILE": node(BATON_FAULTS="delay:Commit:soon"),
        },
        "`BATON_FAULTS` is set, and is not what [fault_points.md](fault_points.md) describes.",
        "It is for tests: unset it.",
    ),
    Row(
        {"--parent-fd <number> is no socket: <reason>": node("--parent-fd", "77")},
        "`--parent-fd` is between `baton serve` and its own processes.",
        "Do not give it.",
    ),
]  # fmt: skip

BY_HAND = [
    Row(
        {
            "--join ADDRESS is missing: the address that `baton gateway` printed": baton("decode"),
            "baton <role> needs --join ADDRESS, the address that `baton gateway` prints": NotTried(
                "the command line says it before, in other words"
            ),
        },
        "A node that is started by itself has to know its gateway.",
        "The gateway's log has the address: `nodes join ipc:///tmp/...`. Give it as `--join ipc:///tmp/...`.",
    ),
    Row(
        {
            "<address> is no address: use ipc:///path or tcp://host:port": baton("prefill", "--join", "http://x"),
            "<address> is open to all users of this host: use ipc:///path": baton("prefill", "--join", "ipc://@x"),
            "socket path <path> is longer than <number> bytes: choose a shorter one": baton(
                "prefill", "--join", "ipc:///" + "x" * 200
            ),
        },
        "Nodes of one host meet at a socket file, `ipc:///PATH`; nodes of several hosts at `tcp://HOST:PORT`.",
        "Write the address so. A socket's path has 107 bytes at most: choose a folder near the root.",
    ),
    Row(
        {
            "<address>: others may enter <folder>: use a directory of your own (mkdir -m 700)": baton(
                "prefill", "--join", "ipc://{folder}/open/x.sock", prepare=_open_folder
            )
        },
        "Whoever can enter the folder of a socket can talk to the nodes behind it.",
        "`mkdir -m 700 FOLDER`, and put the socket there.",
    ),
    Row(
        {
            "cannot use address <address>: <reason>": baton(
                "gateway", "{tiny}", "--port", "0", "--nodes", "ipc:///no/such/folder/gateway.sock"
            )
        },
        "The address could not be bound: its folder is not there, its port is taken, or it is not this host's.",
        "Make the folder, choose another port (`tcp://HOST:*` lets the system), or take an address of this host.",
    ),
    Row(
        {
            "<address> can be reached from other hosts, and needs keys: make them with `baton keys FOLDER`, copy "
            "the folder to every host, and start all processes with --keys FOLDER": baton(
                "prefill", "--join", "tcp://192.0.2.1:7000"
            )
        },
        "Between hosts everything is encrypted, and only who has the cluster's key belongs to it.",
        "As it says; [two_hosts.md](two_hosts.md) goes through it.",
    ),
    Row(
        {
            "no way to <address> (<reason>): say the own address with --listen": NotTried(
                "it needs a host without a route to another"
            ),
            "--listen <address>: decode nodes connect to it: name this host's own address instead": baton(
                "prefill", "--join", "tcp://127.0.0.1:7000", "--listen", "tcp://0.0.0.0:7001",
                "--keys", "{folder}/keys", prepare=lambda folder: _make_keys(folder),
            ),
        },
        "A prefill node tells others where it can be reached, and that has to be one address of its host.",
        "`--listen tcp://OWN_ADDRESS:7001`, with the address on the network that the decode nodes are in.",
    ),
    Row(
        {
            "--keys: cannot read <file>: <reason>; `baton keys` makes it": baton(
                "serve", "--port", "0", "--keys", "/no/such/folder"
            ),
            "--keys: others may read or change <file>: chmod 600, and own it": baton(
                "serve", "--port", "0", "--keys", "{folder}/keys", prepare=_key("x", 0o644)
            ),
            "--keys: <file> is no key; `baton keys` makes one": baton(
                "serve", "--port", "0", "--keys", "{folder}/keys", prepare=_key("x", 0o600)
            ),
        },
        "`--keys FOLDER` is the folder that `baton keys FOLDER` made, with the file `cluster.key` in it.",
        "Copy that folder, as the user who runs the nodes (`scp -p`, `rsync -p` keep its mode).",
    ),
    Row(
        {
            "<file> exists: remove it first, or choose another folder": baton(
                "keys", "{folder}/keys", prepare=_key("x", 0o600)
            ),
            "cannot write <file>: <reason>": baton("keys", "{folder}/file/keys", prepare=write("file", "")),
        },
        "`baton keys` never writes over a key: nodes that run with the old one could meet no new ones.",
        "Choose a folder that is not there yet.",
    ),
]  # fmt: skip


def _make_keys(folder: Path) -> None:
    from common.keys import make_keys

    make_keys(folder / "keys")
