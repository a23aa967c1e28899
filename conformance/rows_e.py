"""E: nodes die, are replaced, or are not who they should be; the others go on."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

from conformance.client import greedy
from conformance.fake_prefill import fake_prefill
from conformance.process import START_S
from conformance.recipes import (
    BUSY,
    PROMPTS,
    assert_unavailable,
    begin_all,
    check_all,
    epoch,
    gateway_address,
    is_ready,
    node_ids,
    refused,
    socket_path,
    stopped,
    wait_back,
    wait_linked,
    without,
)
from conformance.rows import Needs, Proof, row
from conformance.setup import Setup, prompt

TWO = ("--prefill", "2", "--decode", "2")
PAUSE_S = 3.0
POLL_S = 0.1
BUSY_TOKENS = 300
GROWING_TOKENS = 320  # more than is kept free for each at admission
SMALL = ("--kv-pages", "60")  # of 16 tokens: three of the answers that grow begin, two end
RETRACTED = "baton_node_requests_retracted_total"
DEAD_ENDS = Proof(
    "D keeps its connection to a name, whoever has it",
    patch="import common.connector as c, transfer.receiver_endpoint as r\n"
    "real = r.ReceiverEndpoint.set_prefill_nodes\n"
    "def keep(self, prefills, now):\n"
    "    known = {name: node.info for name, node in self._nodes.items()}\n"
    "    real(self, [known.get(info.node_id, info) for info in prefills] or list(known.values()), now)\n"
    "r.ReceiverEndpoint.set_prefill_nodes = keep\n"
    "c.Connector._lost = lambda *_: None\n",
)


def has_new_epoch(s: Setup, old: int | None) -> bool:
    """Say whether another process of the prefill node's name is there."""
    return epoch(s, "prefill-0") not in (None, old)


@row("E1", "D survives a prefill node that is killed and comes back", needs=Needs.FRESH, proof=DEAD_ENDS)
def e1(s: Setup) -> None:
    check_all(s)
    before, old = s.server.nodes(), epoch(s, "prefill-0")
    os.kill(before["prefill-0"], signal.SIGKILL)
    s.client.until(partial(has_new_epoch, s, old), "a new epoch", START_S)
    wait_back(s, "prefill-0", before["prefill-0"])
    assert {**s.server.nodes(), "prefill-0": 0} == {**before, "prefill-0": 0}
    check_all(s)
    s.client.assert_ledger_clean()
    assert s.server.log.count("decode-0: linked to prefill-0, plane ") == 2


@row(
    "E2",
    "a prefill node replaced at its address costs one failure at the most",
    needs=Needs.FRESH,
    proof=DEAD_ENDS,
)
def e2(s: Setup) -> None:
    for _ in range(2):
        old, pid = epoch(s, "prefill-0"), s.server.nodes()["prefill-0"]
        os.kill(pid, signal.SIGKILL)
        s.client.until(partial(has_new_epoch, s, old), "a new epoch", START_S)
        s.client.until(lambda: is_ready(s), "ready")
        outcomes = [s.client.ask(greedy(ids, 2)) for ids in PROMPTS]
        failed = [i for i, outcome in enumerate(outcomes) if not outcome.succeeded]
        assert failed in ([], [0]), f"requests {failed} failed"
        for ids, outcome in list(zip(PROMPTS, outcomes, strict=True))[len(failed) :]:
            s.check(ids, outcome, 2)
    s.client.assert_ledger_clean()


@row(
    "E3",
    "a prefill node dies under load: nobody waits, and D goes on",
    needs=Needs.FRESH,
    proof=Proof(
        "D dies with it",
        patch="import os, transfer.receiver_endpoint as r\n"
        "r.ReceiverEndpoint._down = lambda self, node, peer, reason, now: os._exit(3)\n",
    ),
)
def e3(s: Setup) -> None:
    before = s.server.nodes()
    pending = [s.client.begin(greedy(ids, 64, stream=i % 2 == 0)) for i, ids in enumerate(PROMPTS * 2)]
    s.client.until(lambda: any(each.outcome.token_ids for each in pending), "somebody has tokens")
    os.kill(before["prefill-0"], signal.SIGKILL)
    assert s.client.get("/health").status_code == 200
    for ids, each in zip(PROMPTS * 2, pending, strict=True):
        outcome = each.wait()
        if outcome.succeeded:
            s.check(ids, outcome, 64)
        else:
            assert outcome.error is not None, outcome
            assert outcome.status in (200, 503), outcome
    wait_back(s, "prefill-0", before["prefill-0"])
    check_all(s)
    s.client.assert_ledger_clean()
    assert {**s.server.nodes(), "prefill-0": 0} == {**before, "prefill-0": 0}


@row(
    "E4",
    "a prefill node's death is no illness of D or of the server",
    needs=Needs.FRESH,
    proof=Proof(
        "/health asks whether requests can be served",
        patch="import gateway.router as r\n"
        "r.Router.stalled = lambda self, now: () if self.prefill_infos() else ('decode-0',)\n",
    ),
)
def e4(s: Setup) -> None:
    check_all(s, PROMPTS[:4])
    with without(s, "prefill"):
        end = time.monotonic() + PAUSE_S
        while time.monotonic() < end:
            assert_unavailable(s)
            time.sleep(POLL_S)  # each writes a line, and nobody reads the log: the supervisor is stopped
        assert node_ids(s) == ["decode-0"]
    check_all(s)


@row(
    "E6",
    "an address where another node answers is refused, and both are named",
    proof=Proof(
        "D does not ask who answers",
        patch="import common.connector as c\n"
        "real = c.Connector.__init__\n"
        "def init(self, *args, check=c.mismatch, **how):\n"
        "    real(self, *args, check=c.mismatch, **how)\n"
        "c.Connector.__init__ = init\n",
    ),
)
def e6(s: Setup) -> None:
    at = f"ipc://{socket_path(s, 'prefill-0')}"
    name = f"other-{time.monotonic_ns()}"  # a reason is logged once
    since = len(s.server.log)
    with fake_prefill(s.models.tiny, gateway_address(s), name, at):
        s.server.wait_for(rf"link refused: (\S+ should be {name}, it is prefill-0)", s.client.wait_s)
        # P takes the asking for D's new link, and lets go of the old one: a second at the most.
        s.server.wait_for("decode-0: linked to prefill-0, plane (shm)", s.client.wait_s, since)
        s.client.until(lambda: is_ready(s), "ready")
        check_all(s)
    s.client.until(lambda: name not in node_ids(s), "it is gone")


@row(
    "E7",
    "while the gateway stands still, nodes go on",
    proof=Proof(
        "D gives up who has not been heard of for a second",
        patch="import decode_node.node as n\n"
        "real, heard = n.DecodeNode.turn, {}\n"
        "def turn(self, now):\n"
        "    for gateway in self._gateways:\n"
        "        seen = gateway.link.connector._session.link._last_seq_seen\n"
        "        if heard.get(gateway, (None,))[0] != seen:\n"
        "            heard[gateway] = (seen, now)\n"
        "        elif now - heard[gateway][1] > 1.5 and gateway.peer is not None:\n"
        "            for key in self._scheduler.keys_of(gateway.peer.epoch):\n"
        "                self._abort(key, now)\n"
        "    return real(self, now)\n"
        "n.DecodeNode.turn = turn\n",
    ),
)
def e7(s: Setup) -> None:
    pending = begin_all(s, [greedy(BUSY, BUSY_TOKENS)] * 4)
    with s.faults("prefill/delay:Commit:2s"):
        late = s.client.begin(greedy(PROMPTS[5], 16))  # handed over while nobody answers for the gateway
        s.await_fired("Commit")
        with stopped(s, "gateway"):
            time.sleep(PAUSE_S)
    for each in pending:
        s.check(BUSY, each.wait(), BUSY_TOKENS)
    s.check(PROMPTS[5], late.wait(), 16)
    check_all(s)


@row(
    "E10",
    "a prefill node that is told to end hands over what it has",
    needs=Needs.FRESH,
    options=TWO,
    proof=Proof(
        "it just leaves, and nobody tries again",
        patch="import common.drain as c, decode_node.scheduler as d\n"
        "def told(self, signum, now):\n"
        "    self._at_once = True\n"
        "    return False\n"
        "c.Drain.told = told\n"
        "d.MAX_ATTEMPTS = 1\n",
    ),
)
def e10(s: Setup) -> None:
    wait_linked(s)
    before = s.server.nodes()
    many = PROMPTS * 3
    with s.faults("prefill/stall:plane@5:500ms"):  # so that it surely holds something
        pending = [s.client.begin(greedy(ids, 32)) for ids in many]
        s.await_fired("plane")
        os.kill(before["prefill-0"], signal.SIGTERM)
        for ids, each in zip(many, pending, strict=True):
            s.check(ids, each.wait(), 32)
    s.server.wait_for(r"prefill-0 ended with status 0; (starting it again)")
    wait_back(s, "prefill-0", before["prefill-0"])
    s.client.assert_ledger_clean()
    check_all(s)


@row(
    "E11",
    "who was retracted goes on by recomputation, with the prefill node stopped",
    options=SMALL,
    proof=Proof(
        "a prefill node is asked again",
        patch="import decode_node.entry as e\ne.Entry.was_retracted = property(lambda self: False)\n",
    ),
)
def e11(s: Setup) -> None:
    retracted = s.client.metric(RETRACTED, role="decode")
    few = [prompt(seed, 20) for seed in range(3)]  # as many as enter at once
    pending = begin_all(s, [greedy(ids, GROWING_TOKENS) for ids in few])
    with stopped(s, "prefill-0"):
        for ids, each in zip(few, pending, strict=True):
            s.check(ids, each.wait(), GROWING_TOKENS)
    assert s.client.metric(RETRACTED, role="decode") > retracted, "nobody was retracted"


@row(
    "E13",
    "ids that clients send are no keys",
    proof=Proof(
        "all calls have one id",
        patch="import gateway.generation as g\n"
        "real = g.GenerationCall.__init__\n"
        "def init(self, *args):\n"
        "    real(self, *args)\n"
        "    self._id = 'cmpl-1'\n"
        "g.GenerationCall.__init__ = init\n",
    ),
)
def e13(s: Setup) -> None:
    outcomes = s.client.ask_all([greedy(ids, 16, user="me") for ids in PROMPTS])
    for ids, outcome in zip(PROMPTS, outcomes, strict=True):
        s.check(ids, outcome, 16)
    assert len({outcome.headers["x-request-id"] for outcome in outcomes}) == len(PROMPTS)
    for field in ("request_id", "rid", "bootstrap_room", "kv_transfer_params"):
        refused(s, greedy(PROMPTS[0], 4, **{field: "1"}), field)
    with s.faults("prefill/drop:Commit"):  # the second try is another transfer
        s.ask_right(PROMPTS[5])
