"""cuda-ipc between processes: the same bytes as frames, stopped and killed ends, memory of the dead."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from common.device.memory import free_and_total_bytes
from common.device.streams import Event, Stream, Streams
from common.messages import Choice, Role
from common.request import PrefillStamps
from common.sockets import wait
from tests.gpu.ipc_child import LAYOUT, WANTED, ipc_child
from tests.wire.endpoint_world import VERIFY, Context, filled_pool, greeting_of
from tests.wire.endpoint_world import prefill_endpoint as make_p
from tests.wire.hellos import here
from tests.wire.loop import until
from tests.wire.plane_child import plane_child
from tests.wire.test_plane_deaths import LoneDecode, LonePrefill, go_on, stop_and_kill
from transfer.planes.cuda_ipc import CUDA_IPC
from transfer.planes.frames import FRAMES
from transfer.receiver_endpoint import TransferDone
from transfer.sender import FirstToken
from transfer.sender_endpoint import (
    SenderOutput,
    TransferArrived,
    TransferEnded,
    TransferKey,
    TransferStopped,
)
from transfer.transfer_stream import TransferStream

PATIENCE_S = 90.0  # of which a starting process takes most
SLEEP_CYCLES = 1 << 32  # of the GPU: about two seconds
SLACK_BYTES = 2 << 30
GPUS = [torch.device("cuda", index) for index in range(min(2, torch.cuda.device_count()))] or [
    torch.device("cuda", 0)
]

d_gpus = pytest.mark.parametrize("d_gpu", GPUS, ids=str)


@d_gpus
@pytest.mark.parametrize("plane", [FRAMES, CUDA_IPC])
def test_a_stopped_p_spoils_nothing_when_it_wakes_and_a_dead_one_holds_nothing(
    context: Context, address: str, gpu: torch.device, plane: str, d_gpu: torch.device
) -> None:
    """And what arrives is bit for bit what P computed, on either plane."""
    with (
        plane_child("prefill", address, plane, gpu) as child,
        closing(LoneDecode(context, address, plane, d_gpu)) as lone,
    ):
        stop_and_kill(lone, child, one_sided=plane == CUDA_IPC)


@d_gpus
def test_when_d_dies_p_serves_others(
    context: Context, address: str, gpu: torch.device, d_gpu: torch.device
) -> None:
    with closing(LonePrefill(context, address, CUDA_IPC, device=gpu)) as lone:
        p = lone.p
        for turn in (1, 2):  # a restarted one is used again
            with plane_child("decode", p.address, CUDA_IPC, d_gpu) as dead:
                key = lone.until_seen(TransferArrived, turn)
                p.start(key)
                p.chunk(key, 0, [3], is_last=False)
                dead.kill()
                assert lone.until_seen(TransferEnded, turn) == key
        assert [type(output) for output in lone.seen] == [TransferArrived, TransferStopped, TransferEnded] * 2


class BusyPrefill:
    """P in this process: sends the same pages for each transfer, behind work that may take long."""

    def __init__(self, context: Context, address: str, gpu: torch.device) -> None:
        config = replace(VERIFY, transfer=CUDA_IPC)
        pool = filled_pool(LAYOUT, WANTED, seed=1, device=gpu)
        self.streams = Streams(gpu)
        local = here(greeting_of(Role.PREFILL, pool, config))
        self.p = make_p(context, address, pool, config, local, TransferStream(self.streams))
        self.seen: list[SenderOutput] = []

    def close(self) -> None:
        """Close P."""
        self.p.close()

    def work(self, *, slowly: bool = False) -> list[SenderOutput]:
        """Read, and send what is wanted; returns the news."""
        news = self.p.poll(time.monotonic())
        self.seen += news
        for output in news:
            if isinstance(output, TransferArrived):
                self.send(output.key, self.long_work() if slowly else self.streams.record(Stream.FORWARD))
        return news

    def send(self, key: TransferKey, after: Event) -> None:
        """Send all of a transfer behind an event."""
        self.p.start(key)
        self.p.chunk(key, 0, range(1, WANTED + 1), is_last=True, after=after)
        self.p.first_token(key, FirstToken((Choice(42, None),), PrefillStamps()))

    def long_work(self) -> Event:
        """Keep the forward stream busy for a while; returns the event of its end."""
        with self.streams.forward():
            torch.cuda._sleep(SLEEP_CYCLES)
        return self.streams.record(Stream.FORWARD)

    def until(self, happened: Callable[[], bool]) -> None:
        """P works until it is so."""
        give_up_s = time.monotonic() + PATIENCE_S
        while not happened():
            assert time.monotonic() < give_up_s, "it did not happen"
            wait(self.p.pollables(), 0.02)
            self.work()

    def serves(self, child: subprocess.Popen[bytes], count: int) -> None:
        """The child gets so many transfers, and all are right."""
        lines: list[bytes] = []
        assert child.stdout is not None
        ended = len([o for o in self.seen if isinstance(o, TransferEnded)])
        self.until(lambda: sum(isinstance(o, TransferEnded) for o in self.seen) >= ended + count)
        while len(lines) < count:  # "ready", and all but the last
            lines.append(child.stdout.readline())
        assert lines == [b"ready\n", *[b"done\n"] * (count - 1)]


@d_gpus
def test_p_outlives_a_d_that_fills_the_card_and_the_next_one_gets_its_memory(
    context: Context, address: str, gpu: torch.device, d_gpu: torch.device
) -> None:
    with closing(BusyPrefill(context, address, gpu)) as busy:
        torch.ones(1, device=d_gpu)
        before, _ = free_and_total_bytes(d_gpu)
        num_pages = int(0.6 * before) // LAYOUT.page_bytes  # two do not fit
        with ipc_child(busy.p.address, d_gpu, num_pages) as first:
            busy.serves(first, 4)
            # Killed with a write that is launched, and does not begin before it is dead.
            until(
                lambda: any(isinstance(o, TransferArrived) for o in busy.work(slowly=True)),
                busy.p.pollables,
            )
            first.kill()
            first.wait()
            key = next(o.key for o in reversed(busy.seen) if isinstance(o, TransferArrived))
            busy.until(lambda: TransferEnded(key) in busy.seen)
        with ipc_child(busy.p.address, d_gpu, num_pages) as second:
            busy.serves(second, 4)  # it waited for the memory where it had to
        busy.until(lambda: free_and_total_bytes(d_gpu)[0] > before - SLACK_BYTES)
        assert torch.ones(3, device=gpu).sum().item() == 3


@d_gpus
def test_a_p_that_closes_lets_go_of_a_living_d(
    context: Context, address: str, gpu: torch.device, d_gpu: torch.device
) -> None:
    torch.ones(1, device=d_gpu)
    before, _ = free_and_total_bytes(d_gpu)
    num_pages = int(0.3 * before) // LAYOUT.page_bytes
    with closing(BusyPrefill(context, address, gpu)) as busy, ipc_child(address, d_gpu, num_pages) as child:
        busy.serves(child, 2)
        busy.p.close()
        child.kill()
        child.wait()
        give_up_s = time.monotonic() + PATIENCE_S
        while free_and_total_bytes(d_gpu)[0] < before - SLACK_BYTES:
            assert time.monotonic() < give_up_s, "its memory is still taken"
            wait([], 0.1)


@d_gpus
def test_the_same_process_links_again(
    context: Context, address: str, gpu: torch.device, d_gpu: torch.device
) -> None:
    """D in this process, P in a child, which maps D's pool a second time over the new link."""
    with (
        plane_child("prefill", address, CUDA_IPC, gpu) as child,
        closing(LoneDecode(context, address, CUDA_IPC, d_gpu)) as lone,
    ):
        for pages in ([1, 2], [3, 4]):
            lone.seen.clear()
            lone.grant_half(pages)
            go_on(child)
            until(lambda: [type(o) for o in lone.poll()] == [TransferDone], lone.d.pollables)
            assert lone.holds(pages, [1, 2])
            lone.relist()
