"""What the log of a running server says, and what its clients are told, when something of it fails."""

# ruff: noqa: E501  # texts of tables

from __future__ import annotations

import os
import re
import signal

import psutil
import zmq

from conformance.client import Body
from conformance.waiting import poll_until
from tests.docs.messages import BY_A_BUG, BY_A_FOREIGN_NODE, BY_THE_MACHINE, NotTried, Row
from tests.docs.provoke import WAIT_S, Kit, Recipe, baton, config
from tests.docs.provoke_served import address_of, http, joining, message_of, wait_ready, whole

TRACING = "tests/gateway/test_tracing.py tries it"
ELSEWHERE = "what comes when is for the clock of a test's own: "


def _ill_of(rule: str, **body: object) -> Recipe:
    """Ask a server in which something goes wrong; return what it answers and logs."""

    def recipe(kit: Kit, says: re.Pattern[str]) -> str:
        command, url = kit.servers.get("broken")
        (kit.servers.folder / "broken" / "faults").write_text(rule)
        with http(url) as client:
            told = message_of(client.post("/v1/completions", json=whole(dict(body))))
        (kit.servers.folder / "broken" / "faults").write_text("")
        return told + command.said()

    return recipe


def _signal_to(node: str, signum: signal.Signals, body: Body | None = None) -> Recipe:
    """Do something to a node, in the middle of an answer where there is a body; return what is answered and logged."""

    def recipe(kit: Kit, says: re.Pattern[str]) -> str:
        command, url = kit.servers.get("broken")
        told: list[str] = []
        pid = _pid_of(node, command.said())
        before = command.said().count(f"{node} is ready")
        with http(url) as client:
            if body is None:
                os.kill(pid, signum)
            else:
                with client.stream("POST", "/v1/completions", json=whole({**body, "stream": True})) as answer:
                    for line in answer.iter_lines():
                        if not told:
                            os.kill(pid, signum)
                        told.append(line)
        poll_until(
            lambda: command.said().count(f"{node} is ready") > before, WAIT_S, "a new node", command.said
        )
        wait_ready(url, command)
        return "\n".join(told) + command.said()

    return recipe


def _pid_of(node: str, said: str) -> int:
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if node in words and "--node-id" in words and _run_folder(said) in " ".join(words):
            return int(process.pid)
    raise AssertionError(f"no process {node}")


def _run_folder(said: str) -> str:
    found = re.search(r"nodes join ipc://(\S+)/", said)
    assert found is not None
    return found[1]


def _nonsense(kit: Kit, says: re.Pattern[str]) -> str:
    """Send a gateway what is no message."""
    command, _ = kit.servers.get("main")
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(address_of(command))
        socket.send(b"nonsense")
        poll_until(lambda: says.search(command.said()), WAIT_S, repr(says), command.said)
    return command.said()


LONG: Body = {"max_tokens": 400, "ignore_eos": True}

RUNNING = [
    Row(
        {
            "<what happened>; starting it again <when>": _signal_to("prefill-0", signal.SIGKILL),
            "<node> is gone: <reason>": _signal_to("decode-0", signal.SIGKILL, LONG),
        },
        "A process of the server died. Requests that it had end with 503, or with an error event in a stream, if no "
        "other node can take them; the rest goes on. `killed by SIGKILL` that nobody sent is nearly always the kernel "
        "short of memory.",
        "`dmesg | grep -i kill` tells. Lower `--kv-pages` or `--gpu-memory-fraction`, or give the container more memory. "
        "If there is a traceback before it, please report that.",
    ),
    Row(
        {
            "<node> gave no sign of life for <time> s: killing it": _signal_to("decode-0", signal.SIGSTOP),
            "<node> took too long to get ready: killing it": NotTried("tests/ops/test_restart.py tries when"),
        },
        "A process did not get on for `--stall-timeout` seconds: it hangs, or the machine is overloaded or swaps.",
        "Look at load and swap (`top`, `vmstat 1`). Where a single step may take so long, raise `--stall-timeout`.",
    ),
    Row(
        {
            "<what happened> before it was ready": baton("serve", "{tiny}", "--port", "0", "--kv-pages", "99999999999"),
            "<node> cannot be started: <reason>; trying again in <time> s": BY_THE_MACHINE,
            "<node> (process <pid>) does not end": BY_THE_MACHINE,
        },
        "A process ended while it started, so the server ends too; what it said last stands above or below. A process "
        "that does not end hangs in the kernel (a driver, a network file system).",
        "Do what its last lines say; this page has those too. `baton doctor MODEL` looks for the usual causes.",
    ),
    Row(
        {
            "the decode node lost the request: ask again": _ill_of("gateway/drop:Submit"),
            "tokens were lost on the way: ask again": _ill_of("decode/drop:Tokens@2", **LONG),
            "<node>: transfer <number>: <reason>": _ill_of("prefill/fail:plane"),
            "transfer <number>: <reason>": BY_A_BUG,
        },
        "A message between two processes did not arrive: a connection between hosts broke, or one side was too slow to "
        "read. What can be tried again is; else the request ends with 500.",
        "Between hosts look at the network (`ss -ti`, dropped packets). On one host please report it, with the log.",
    ),
    Row(
        {
            "traces cannot be exported, and are dropped: <reason>": NotTried(TRACING),
            "a call could not be traced; others are not logged": NotTried(TRACING),
            "more calls end than can be traced: stages of some are left out": NotTried(TRACING),
            "metrics are not complete; this is said once": BY_A_BUG,
        },
        "What watches the server failed; requests go on as ever. The collector of traces does not answer, or there is a "
        "fault in counting, with a traceback behind it.",
        "Look whether the collector runs and takes OTLP over HTTP at this address. Please report the others.",
    ),
    Row(
        {
            "no prefill node is ready": NotTried(ELSEWHERE + "tests/nodes"),
            "no prefill node for it is ready": NotTried(ELSEWHERE + "tests/nodes"),
        },
        "The prefill nodes are gone, or those left are too small for this prompt. Status 503.",
        "Come again: a node that died is back within seconds. If not, see why it does not start.",
    ),
    Row(
        {
            "the server is about to stop": NotTried(ELSEWHERE + "tests/system/test_drain.py"),
            "the decode node is about to leave": NotTried(ELSEWHERE + "tests/system/test_drain.py"),
            "the prefill node is about to leave": NotTried(ELSEWHERE + "tests/nodes/test_drain.py"),
        },
        "SIGTERM was sent to the server or a node, and no other node can take the request. Status 503.",
        "Come again. To replace nodes without this, have two of a kind; see `--drain-grace`.",
    ),
    Row(
        {
            "<process>: FAULTS ARE ON, this is no server to rely on: <rules>": _ill_of("decode/delay:Status:1ms"),
            "<process>: FAULT POINTS ARE ON, this is no server to rely on": _ill_of(""),
            "fault <rule> fired, no. <number>": _ill_of("decode/delay:Status:1ms"),
        },
        "The variable `BATON_FAULTS` is set: the server breaks things on purpose, for tests.",
        "Unset it, and start again.",
    ),
]  # fmt: skip

MISMATCHES = [
    Row(
        {
            "<process>: link refused: <reason>": joining("--page-size", "32"),
            "model <fingerprint> at <process>, <fingerprint> at <process>: start both with the same MODEL": joining(
                edit=config(rms_norm_eps=1e-3)
            ),
            "<setting> <value> at <process>, <value> at <process>: give both the same options": joining(
                "--page-size", "32"
            ),
            "--verify-pages at <process>, not at <process>: give it to both": joining("--verify-pages"),
            "planes <names> at <process>, <names> at <process>": joining(
                "--transfer", "shm", server="broken"
            ),
            "a <role> node at <process>, a <role> node at <process>": joining(at="prefill-0"),
        },
        "Two processes met that cannot work together: another model (or another version of its files), another page "
        "size or precision, or the address of the wrong process. Both go on, and try again; they do no work together.",
        "Start both with the same MODEL, `--dtype`, `--page-size`, `--transfer` and `--verify-pages`. `--join` takes the "
        "gateway's address, not that of a prefill node.",
    ),
    Row(
        {
            "node id <name> is taken by pid <pid>, not pid <pid>": joining("--node-id", "prefill-0"),
        },
        "Two nodes have the same name, and the first one is alive.",
        "Give each its own `--node-id`, or leave the option out.",
    ),
    Row(
        {
            "<address> has <keys>: start both with the same --keys": joining(server="keyed gateway"),
        },
        "One of the two has the cluster's key, and the other one none, or that of another cluster.",
        "Copy the folder of keys from the same place to both hosts, and give `--keys` to each process: "
        "[two_hosts.md](two_hosts.md).",
    ),
    Row(
        {
            "<process>: rejected message no. <number>: <reason>": _nonsense,
            "<process>: prefill node <node>: <reason>": BY_A_FOREIGN_NODE,
            "the shared pool has <size> bytes, not <size>": BY_A_FOREIGN_NODE,
            "the shared pool cannot be mapped: <reason>": BY_THE_MACHINE,
        },
        "Something arrived that is no message of this version of Baton: a node of another version, another program or a "
        "port scan. It is counted and dropped; the 1st, 2nd, 4th, 8th, ... are logged.",
        "Use one version on all hosts (`baton --version`), and let a firewall keep others from the ports of nodes.",
    ),
    Row(
        {
            "<process>: no plane <plane> with <node>: <reason>": NotTried(
                "it needs processes of two users; tests/wire/test_shm.py tries it without"
            ),
        },
        "A prefill node cannot open the decode node's memory, so pages take the slow way, `frames`. They run on different "
        "hosts, where this is as it should be, as different users, in different containers, or the kernel forbids it "
        "(yama, seccomp).",
        "Run both as one user in one PID namespace (containers: `--pid=container:...`, `--cap-add SYS_PTRACE`). It works "
        "without, at a third of the speed.",
    ),
]  # fmt: skip
