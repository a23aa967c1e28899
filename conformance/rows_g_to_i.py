"""G, H, I: nodes that are not alike, prompts that come again, and the start."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tempfile
from pathlib import Path

from conformance.client import greedy
from conformance.recipes import (
    PROMPTS,
    assert_unavailable,
    check_all,
    command,
    joined,
    node_ids,
    socket_path,
    wait_linked,
    without,
)
from conformance.rows import Needs, Proof, not_applicable, row
from conformance.server import NotStarted
from conformance.setup import Setup, prompt

TWO = ("--prefill", "2", "--decode", "2")
REPEATS = 100
LONG = prompt(6, 300)
STEPS = "baton_node_steps_total"
TOO_MANY_PAGES = 1 << 40

not_applicable("packages of other projects; version skew of our own is F11", "I14")
not_applicable("no configuration of a removed connector: README's commands are tried in I7", "I8")


@row(
    "G4",
    "a model that cannot be computed exactly is refused at start, by its setting",
    proof=Proof(
        "the window is ignored",
        patch="import common.model.spec as m\nm._refuse_window = lambda *_: None\n",
    ),
)
def g4(s: Setup) -> None:
    with tempfile.TemporaryDirectory() as folder:
        windowed = Path(folder) / "windowed"
        shutil.copytree(s.models.tiny, windowed)
        config = json.loads((windowed / "config.json").read_text())
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}
        (windowed / "config.json").write_text(json.dumps(config))
        status, said = command(s, "serve", str(windowed), "--port", "0", "--device", "cpu")
    assert status == 2, said
    assert "sliding_window of 64" in said, said
    assert "Traceback" not in said, said


@row(
    "G8",
    "one setting chooses the plane; an unknown one is an error, not another plane",
    proof=Proof(
        "an unknown plane becomes the first known one",
        patch="import click\n"
        "click.Choice.convert = lambda self, value, param, ctx: value if value in self.choices "
        "else self.choices[0]\n",
    ),
)
def g8(s: Setup) -> None:
    model = str(s.models.tiny)
    for role in ("decode", "prefill", "serve"):
        ways: tuple[tuple[tuple[str, ...], dict[str, str]], ...] = (
            (("--transfer", "rdma"), {}),
            ((), {"BATON_TRANSFER": "rdma"}),
        )
        for words, variables in ways:
            status, said = command(s, role, model, *words, **variables)
            assert (status, "rdma" in said, "frames" in said) == (2, True, True), said


@row(
    "G9",
    "a prefill node of another precision is refused, and both are named",
    proof=Proof(
        "precision is not compared",
        patch="import dataclasses, common.link as n\n"
        "real = n.mismatch\n"
        "def mismatch(ours, theirs):\n"
        "    if ours.layout and theirs.layout:\n"
        "        theirs = dataclasses.replace(theirs, layout=ours.layout)\n"
        "    return real(ours, theirs)\n"
        "n.mismatch = mismatch\n",
    ),
)
def g9(s: Setup) -> None:
    with joined(s, "prefill", "other", "--dtype", "bfloat16") as other:
        for said in (other.wait_for, lambda words: s.server.wait_for(words, s.client.wait_s)):
            reason = said(r"link refused: (dtype .*)")
            assert "bfloat16 at other" in reason, reason
            assert "float32 at decode-0" in reason, reason
        check_all(s)
    s.client.until(lambda: "other" not in node_ids(s), "it has left")


@row(
    "H1",
    "one prompt a hundred times leaves nothing behind (there is no prefix cache)",
    needs=Needs.HTTP,
    proof=Proof(
        "P lets go of pages only now and then",
        patch="import itertools, prefill_node.scheduler as p\n"
        "real, count = p.PrefillScheduler.end, itertools.count(1)\n"
        "p.PrefillScheduler.end = lambda self, key: real(self, key) if next(count) % 9 else None\n",
    ),
)
def h1(s: Setup) -> None:
    check_all(s, [PROMPTS[4]] * REPEATS, 4)
    s.client.assert_ledger_clean()


@row(
    "H3",
    "each prompt token is computed once, on P; D computes what follows",
    proof=Proof(
        "D computes again what arrived",
        patch="import decode_node.scheduler as d\n"
        "real = d.DecodeScheduler._hand_over\n"
        "def hand_over(self, entry, first):\n"
        "    real(self, entry, first)\n"
        "    if entry.phase is d.Phase.ARRIVED:\n"
        "        self._retract(entry)\n"
        "d.DecodeScheduler._hand_over = hand_over\n",
    ),
)
def h3(s: Setup) -> None:
    names = (("baton_node_tokens_computed_total", "prefill"), ("baton_node_tokens_sampled_total", "decode"))
    before = [s.client.metric(name, role=role) for name, role in names]
    check_all(s, PROMPTS, 8)
    computed, sampled = (
        s.client.metric(name, role=role) - old for (name, role), old in zip(names, before, strict=True)
    )
    assert computed == sum(map(len, PROMPTS)), f"P computed {computed} tokens"
    assert sampled == 8 * len(PROMPTS), f"D said {sampled} tokens"
    steps = s.client.metric(STEPS, role="decode")
    s.ask_right(PROMPTS[-1], 8)
    steps = s.client.metric(STEPS, role="decode") - steps
    assert steps == 7, f"D made {steps} steps for the 7 tokens behind the first"


ONE_PORT = Proof(
    "prefill nodes wait at one fixed port",
    patch="import transfer.sender_endpoint as e\n"
    "real = e.SenderEndpoint.__init__\n"
    "def init(self, context, address, *args, **how):\n"
    "    real(self, context, 'tcp://127.0.0.1:48998', *args, **how)\n"
    "e.SenderEndpoint.__init__ = init\n",
)


@row("I1", "another server on this host starts and serves with the defaults", proof=ONE_PORT)
def i1(s: Setup) -> None:
    try:
        with s.serving() as other:
            check_all(other)
            check_all(s)
    except NotStarted as error:  # in a proof it means that there was nothing to try
        raise AssertionError(f"the second server did not start: {error}") from None


FIRST_ONE = Proof(
    "one prefill node a host is known",
    patch="import gateway.router as r\n"
    "real = r.Router.prefill_infos\n"
    "r.Router.prefill_infos = lambda self: real(self)[:1]\n",
)


@row("I2", "two and two on one host start with the defaults, all linked", options=TWO, proof=FIRST_ONE)
def i2(s: Setup) -> None:
    wait_linked(s)
    check_all(s)


@row("I3", "two prefill nodes of one host wait at addresses of their own", options=TWO, proof=FIRST_ONE)
def i3(s: Setup) -> None:
    names = ("prefill-0", "prefill-1")
    s.client.until(lambda: set(names) <= set(node_ids(s)), "both have joined")  # one is enough to be ready
    assert len({socket_path(s, name) for name in names}) == 2
    check_all(s)
    for name in names:
        used = s.client.metric("baton_node_transfers_started_total", role="prefill", node=name)
        assert used > 0, f"{name} was never asked"


HOPEFUL = Proof(
    "the gateway hands requests to whoever is there",
    patch="import gateway.router as r\n"
    "def choose(self, tried=()):\n"
    "    return next(iter(self.decode_nodes()), None)\n"
    "r.Router.choose = choose\n"
    "import decode_node.scheduler as d\n"
    "d.DecodeScheduler.prefill_lost = lambda *_: None\n"
    "d.check_prefill = lambda *_: None\n",
)


@row(
    "I5",
    "one half without the other is not ready, and says so at once",
    needs=Needs.FRESH,
    proof=HOPEFUL,
)
def i5(s: Setup) -> None:
    for role in ("prefill", "decode"):
        with without(s, role):
            assert_unavailable(s)
        check_all(s, PROMPTS[:6])


def readme_commands() -> list[list[str]]:
    """Return the words behind `baton` of each such line in the README's blocks."""
    text = (Path(__file__).parents[1] / "README.md").read_text()
    lines = re.findall(r"^\.venv/bin/baton (.+)$", text, re.MULTILINE)
    commands = [shlex.split(line, comments=True) for line in lines]
    assert len(commands) > 5, commands
    return commands


@row(
    "I7",
    "what the README shows works: `make demo`'s command, and every option named",
    proof=Proof(
        "the example crashes at start",
        patch="import sys\nif '--ask' in sys.orig_argv:\n    raise SystemExit('crashed')\n",
    ),
)
def i7(s: Setup) -> None:
    how = ("--port", "0", "--log-level", "warning", "--device", "cpu", "--ask", "What is a relay race?")
    status, said = command(s, "serve", str(s.models.tiny), *how)
    assert status == 0, said
    assert re.search(r"prefill +\d+\.\d ms", said), said
    for words in readme_commands():
        status, said = command(s, *words, "--help")
        assert status == 0, (words, said)


@row(
    "I9",
    "without CUDA the plane that is taken instead is named in the log",
    proof=Proof(
        "nothing is named",
        patch="import logging\n"
        "real = logging.Logger.info\n"
        "def info(self, message, *args, **how):\n"
        "    return None if 'plane' in message else real(self, message, *args, **how)\n"
        "logging.Logger.info = info\n",
    ),
)
def i9(s: Setup) -> None:
    found = re.findall(r"linked to prefill-0, plane (\S+)", s.server.log)
    assert set(found) == {"shm"}, found
    check_all(s, PROMPTS[:4])


@row(
    "I11",
    "a plane that cannot work here is refused at start",
    proof=Proof(
        "a child finds out",
        patch="import common.gpus as g\ng.check_device = lambda *_: None\n",
    ),
)
def i11(s: Setup) -> None:
    how = ("--port", "0", "--device", "cpu", "--transfer", "cuda-ipc")
    status, said = command(s, "serve", str(s.models.tiny), *how)
    assert status == 2, said
    assert "cuda-ipc is for nodes on GPUs" in said, said
    assert "frames" in said, said


@row(
    "I12",
    "a stalled plane ends with an error that says where and for how long",
    proof=Proof(
        "the error does not say where",
        patch="import decode_node.scheduler as d\n"
        "real = d.DecodeScheduler._fail\n"
        "d.DecodeScheduler._fail = lambda self, entry, status, _: real(self, entry, status, 'timeout')\n",
    ),
)
def i12(s: Setup) -> None:
    with s.faults(f"prefill/stall:plane:until={s.gate()}"):
        outcome = s.client.ask(greedy(LONG, 4, timeout=1))
        assert outcome.status == 504, outcome
        assert outcome.error is not None
        assert re.search(r"transferring after 1(\.\d+)? s", outcome.error["message"]), outcome.error
        (s.server.folder / "gate").touch()
        s.client.assert_ledger_clean()
    s.check_next()


@row(
    "I13",
    "the last words of a child that cannot start are the parent's",
    proof=Proof(
        "its words are lost",
        patch="import os, sys\n"
        "if 'prefill' in sys.orig_argv or 'decode' in sys.orig_argv:\n"
        "    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)\n",
    ),
)
def i13(s: Setup) -> None:
    how = ("--port", "0", "--device", "cpu", "--kv-pages", str(TOO_MANY_PAGES))
    status, said = command(s, "serve", str(s.models.tiny), *how)
    assert status != 0, said
    assert re.search(r"baton: (decode|prefill)-0 ended with status \d+ before it was ready", said), said
    assert re.search(r"\[(decode|prefill)-0\] baton: a KV pool of .* lower --kv-pages", said), said
