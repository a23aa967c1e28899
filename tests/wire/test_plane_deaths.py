"""Ends of hand-overs in processes of their own, stopped and killed, on each plane.

The promises of one-sided planes are about two processes: what a stopped one writes when it wakes, and that a
dead one writes no more. So here they are two.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.messages import Choice, PeerInfo, Role, int32s
from common.request import PrefillStamps
from tests.wire.endpoint_world import (
    CPU,
    P_EPOCH,
    P_NAME,
    SAMPLING,
    VERIFY,
    Context,
    decode_endpoint,
    filled_pool,
    finish_copies,
    greeting_of,
    prefill_endpoint,
)
from tests.wire.hellos import LAYOUT, here
from tests.wire.loop import until
from tests.wire.plane_child import plane_child
from transfer.planes.frames import FRAMES
from transfer.planes.shm import SHM
from transfer.receiver_endpoint import ReceiverOutput, TransferDone, TransferGaveOut, TransferReleased
from transfer.sender import FirstToken
from transfer.sender_endpoint import (
    SenderOutput,
    TransferArrived,
    TransferEnded,
    TransferKey,
    TransferStopped,
)
from transfer.transfer_stream import TransferStream

OTHERS = 7.0
P_POOL = filled_pool(LAYOUT, 32, seed=1)  # what P computes, wherever it is


class LoneDecode:
    """D in this process. The clock stands still: what happens is known, not guessed."""

    def __init__(self, context: Context, address: str, plane: str, device: torch.device = CPU) -> None:
        self.pool = filled_pool(LAYOUT, 32, seed=2, shared=plane == SHM, device=device)
        config = replace(VERIFY, transfer=plane)
        local = here(greeting_of(Role.DECODE, self.pool, config))
        self.d = decode_endpoint(context, address, self.pool, config, local)
        self.address = address
        self.now = 0.0
        self.seen: list[ReceiverOutput] = []

    def close(self) -> None:
        """Close D."""
        self.d.close()
        if self.pool.fd is not None:
            os.close(self.pool.fd)

    def relist(self) -> None:
        """The gateway drops P, and lists it again: D connects anew."""
        self.d.set_prefill_nodes([], self.now)
        self.d.set_prefill_nodes([PeerInfo(P_NAME, self.address, P_EPOCH)], self.now)

    def poll(self) -> list[ReceiverOutput]:
        """D works; returns all that it ever reported."""
        self.seen += self.d.poll(self.now)
        return self.seen

    def until_seen(self, output: ReceiverOutput) -> None:
        """D works until it has reported this."""
        until(lambda: output in self.poll(), self.d.pollables)

    def grant_half(self, pages: list[int]) -> int:
        """P is to send one page, and to hold the others; returns once that one is there."""
        until(lambda: self.poll() is not None and bool(self.d.ready_nodes()), self.d.pollables)
        received = self.d.counters()["pages_received"]
        prompt = int32s([1, *range(LAYOUT.page_size * len(pages) - 1)])
        transfer_id = self.d.grant(P_NAME, prompt, SAMPLING, pages)
        until(
            lambda: self.poll() is not None and self.d.counters()["pages_received"] == received + 1,
            self.d.pollables,
        )
        assert self.holds(pages[:1], [1])
        return transfer_id

    def holds(self, pages: list[int], p_pages: list[int]) -> bool:
        """D's pages are what P computed in those."""
        finish_copies(self.pool.device)
        return torch.equal(self.pool.gather(pages).cpu(), P_POOL.gather(p_pages))


def stop(child: subprocess.Popen[bytes]) -> None:
    """Stop a process."""
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)


def go_on(child: subprocess.Popen[bytes]) -> None:
    """P is to send what it holds; it does so before it reads any message."""
    assert child.stdin is not None
    child.stdin.write(b"\n")
    child.stdin.flush()
    child.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("plane", [FRAMES, SHM])
def test_a_stopped_p_spoils_nothing_when_it_wakes_and_a_dead_one_holds_nothing(
    context: Context, address: str, plane: str
) -> None:
    with (
        plane_child("prefill", address, plane) as child,
        closing(LoneDecode(context, address, plane)) as lone,
    ):
        stop_and_kill(lone, child, one_sided=plane == SHM)


def stop_and_kill(lone: LoneDecode, child: subprocess.Popen[bytes], *, one_sided: bool) -> None:
    # Stopped with pages to write; D gives up, and hears nothing for however long.
    stopped = lone.grant_half([1, 2, 3])
    stop(child)
    lone.d.abort(stopped, lone.now)
    for _ in range(100):
        lone.poll()
    assert (TransferReleased(stopped) in lone.seen) is not one_sided
    go_on(child)
    lone.until_seen(TransferReleased(stopped))
    assert lone.holds([2, 3], [2, 3]) is one_sided  # it wrote into D's pages after D's abort
    lone.pool.data[:, [1, 2, 3]] = OTHERS

    # Killed with pages to write: known at once, not by a clock.
    killed = lone.grant_half([4, 5])
    assert bool((lone.pool.data[:, [1, 2, 3]] == OTHERS).all())
    child.kill()
    lone.until_seen(TransferReleased(killed))
    gave_out, released = lone.seen[-2:]
    assert isinstance(gave_out, TransferGaveOut)
    assert (gave_out.transfer_id, gave_out.retryable) == (killed, True)
    assert released == TransferReleased(killed)
    assert lone.d.ready_nodes() == []
    assert bool((lone.pool.data[:, [1, 2, 3]] == OTHERS).all())
    assert not any(isinstance(output, TransferDone) for output in lone.seen)


def mapped_pools() -> int:
    """Mappings of KV pools in this process, of its own and of others."""
    gc.collect()  # those that other tests have left
    return Path("/proc/self/maps").read_text().count("/memfd:baton-kv")


class LonePrefill:
    """P in this process, D's in children. The clock stands still here, too."""

    def __init__(
        self,
        context: Context,
        address: str,
        plane: str,
        stream: TransferStream | None = None,
        device: torch.device = CPU,
    ) -> None:
        config = replace(VERIFY, transfer=plane)
        pool = filled_pool(LAYOUT, 32, seed=1, device=device)
        local = here(greeting_of(Role.PREFILL, pool, config))
        self.p = prefill_endpoint(context, address, pool, config, local, stream)
        self.seen: list[SenderOutput] = []

    def close(self) -> None:
        """Close P."""
        self.p.close()

    def until_seen(
        self, kind: type[SenderOutput], count: int, *, beside: Callable[[], object] = list
    ) -> TransferKey:
        """P works, and `beside`, until so many of a kind were reported; returns the key of the last."""

        def happened() -> bool:
            beside()
            self.seen += self.p.poll(0.0)  # at 0: known from the pidfd, not from a Status that failed
            return sum(isinstance(output, kind) for output in self.seen) == count

        until(happened, self.p.pollables)
        return self.seen[-1].key


@pytest.mark.parametrize("plane", [FRAMES, SHM])
def test_when_d_dies_p_lets_go_of_its_memory_and_serves_others(
    context: Context, address: str, plane: str
) -> None:
    before = mapped_pools()
    with closing(LonePrefill(context, address, plane)) as lone:
        p = lone.p
        with plane_child("decode", p.address, plane) as dead:
            key = lone.until_seen(TransferArrived, 1)
            p.start(key)
            p.chunk(key, 0, [3], is_last=False)
            assert mapped_pools() - before == (plane == SHM)
            dead.kill()
            assert lone.until_seen(TransferEnded, 1) == key
        assert lone.seen[1:] == [TransferStopped(key), TransferEnded(key)]
        until(lambda: mapped_pools() == before, p.pollables)  # a thread does it
        p.chunk(key, 1, [4], is_last=True)  # its forward was in flight
        with closing(LoneDecode(context, p.address, plane)) as other:
            until(lambda: p.poll(0.0) + other.poll() == [] != other.d.ready_nodes(), p.pollables)
            other.d.grant(P_NAME, int32s(range(8)), SAMPLING, [8, 9])
            key = lone.until_seen(TransferArrived, 2, beside=other.poll)
            p.start(key)
            p.chunk(key, 0, [5, 6], is_last=True)
            p.first_token(key, FirstToken((Choice(42, None),), PrefillStamps()))
            until(lambda: [type(o) for o in other.poll()] == [TransferDone], other.d.pollables)
            assert other.holds([8, 9], [5, 6])
