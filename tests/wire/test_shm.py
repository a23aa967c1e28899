"""The plane shm: whose memory is mapped, what is refused, and what happens where it cannot be mapped."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.codec import Envelope
from common.host import this_process
from common.kv.pool import KVPool
from common.messages import CODEC, Hello, HostIdentity, Prefill, Rejected, Role, SharedPool, int32s
from common.sockets import FrameSocket
from tests.wire.endpoint_world import (
    D_EPOCH,
    P_NAME,
    SAMPLING,
    VERIFY,
    Context,
    RawDecode,
    World,
    decode_endpoint,
    filled_pool,
    greeting_of,
    prefill_endpoint,
)
from tests.wire.hellos import LAYOUT, PREFILL, here
from tests.wire.loop import until
from transfer.planes.shm import SHM, PlaneUnavailable, open_pool
from transfer.receiver_endpoint import ReceiverEndpoint
from transfer.sender_endpoint import SenderEndpoint

ON_SHM = replace(VERIFY, transfer=SHM)
NUM_PAGES = 8
US = here(PREFILL)


@pytest.fixture
def pool() -> Iterator[KVPool]:
    """What a decode node offers."""
    pool = filled_pool(LAYOUT, NUM_PAGES, seed=2, shared=True)
    assert pool.fd is not None
    yield pool
    os.close(pool.fd)


@pytest.fixture
def other_process() -> Iterator[HostIdentity]:
    """A process of this host that offers nothing."""
    with subprocess.Popen(["/bin/sleep", "1000"], stdin=subprocess.DEVNULL) as child:
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        yield replace(this_process(), pid=child.pid, start_time=int(fields[19]))
        child.kill()


# What is mapped --------------------------------------------------------------------------------------------


def test_the_pool_of_the_other_is_the_same_memory(pool: KVPool) -> None:
    mapped = open_pool(US, greeting_of(Role.DECODE, pool, ON_SHM))
    assert mapped.num_pages == NUM_PAGES
    assert torch.equal(mapped.data, pool.data)
    mapped.data[:, 3] = 5.0
    assert bool((pool.data[:, 3] == 5.0).all())


def test_a_descriptor_of_another_process_is_not_taken(pool: KVPool, other_process: HostIdentity) -> None:
    offer = greeting_of(Role.DECODE, pool, ON_SHM)
    with pytest.raises(PlaneUnavailable, match="cannot be opened"):
        open_pool(US, replace(offer, host=other_process))
    reused = replace(offer.host, start_time=offer.host.start_time - 1)  # the pid was passed on
    with pytest.raises(PlaneUnavailable, match="its process is gone"):
        open_pool(US, replace(offer, host=reused))


@pytest.mark.parametrize("part", ["boot_id", "pid_namespace"])
def test_a_pid_of_another_host_means_nothing_here(pool: KVPool, part: str) -> None:
    offer = greeting_of(Role.DECODE, pool, ON_SHM)
    host = replace(offer.host, boot_id="b") if part == "boot_id" else replace(offer.host, pid_namespace=1)
    with pytest.raises(PlaneUnavailable, match="another host"):
        open_pool(US, replace(offer, host=host))


@pytest.mark.parametrize("num_pages", [0, NUM_PAGES - 1, NUM_PAGES + 1, 2**63 - 1])
def test_a_pool_of_another_size_is_refused(pool: KVPool, num_pages: int) -> None:
    assert pool.fd is not None
    offer = replace(greeting_of(Role.DECODE, pool, ON_SHM), shm=SharedPool(pool.fd, num_pages))
    with pytest.raises(PlaneUnavailable, match="bytes, not"):
        open_pool(US, offer)


def test_what_is_no_sealed_memory_is_refused(tmp_path: Path) -> None:
    size = (NUM_PAGES + 1) * LAYOUT.page_bytes
    unsealed = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, size)
    file = tmp_path / "file"
    file.write_bytes(bytes(size))
    on_disk = os.open(file, os.O_RDWR)
    offer = replace(here(replace(PREFILL, role=Role.DECODE)), shm=SharedPool(unsealed, NUM_PAGES))
    try:
        with pytest.raises(PlaneUnavailable, match="not sealed"):
            open_pool(US, offer)
        with pytest.raises(PlaneUnavailable):
            open_pool(US, replace(offer, shm=SharedPool(on_disk, NUM_PAGES)))
    finally:
        os.close(unsealed)
        os.close(on_disk)
    with pytest.raises(PlaneUnavailable, match="offers no shared pool"):
        open_pool(US, replace(offer, shm=None))


def test_looking_at_a_pool_leaves_no_descriptor_behind(pool: KVPool, other_process: HostIdentity) -> None:
    offer = greeting_of(Role.DECODE, pool, ON_SHM)
    before = len(os.listdir("/proc/self/fd"))
    for host in (offer.host, other_process, replace(offer.host, start_time=1)):
        for num_pages in (NUM_PAGES, NUM_PAGES + 1):
            assert offer.shm is not None
            with suppress(PlaneUnavailable):
                open_pool(US, replace(offer, host=host, shm=SharedPool(offer.shm.fd, num_pages)))
    assert len(os.listdir("/proc/self/fd")) == before


# Where it cannot be mapped ---------------------------------------------------------------------------------


def offers_both(greeting: Hello) -> Hello:
    """Greet as with `--transfer auto`, as a D whose memory nobody can open."""
    shm = SharedPool(2**31 - 1, 32) if greeting.role is Role.DECODE else None
    return replace(greeting, planes=("shm", "frames"), shm=shm)


def test_frames_are_taken_where_it_cannot_be_mapped_and_it_is_said(
    context: Context, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(World(context, address, plane=SHM, greet=offers_both)) as world:
        assert world.p.counters()["planes_fallen_back"] == 1
        assert "prefill-0: no plane shm with decode-0: its memory cannot be opened" in caplog.text
        world.hand_over([7], [3])
        assert world.same_pages([7], [3])


def test_between_hosts_frames_are_no_fallback(
    context: Context, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    def from_elsewhere(greeting: Hello) -> Hello:
        greeting = offers_both(greeting)
        host = replace(greeting.host, boot_id="another")
        return replace(greeting, host=host) if greeting.role is Role.DECODE else greeting

    with closing(World(context, address, plane=SHM, greet=from_elsewhere)) as world:
        assert world.p.counters()["planes_fallen_back"] == 0
        assert "prefill-0: no plane shm with decode-0: it is on another host" in caplog.text
        world.hand_over([7], [3])
        assert world.same_pages([7], [3])


def test_a_d_that_wants_nothing_else_is_refused_and_others_are_served(
    context: Context, address: str, pool: KVPool, caplog: pytest.LogCaptureFixture
) -> None:
    p = prefill_endpoint(context, address, filled_pool(LAYOUT, NUM_PAGES, seed=1), ON_SHM)
    offer = greeting_of(Role.DECODE, pool, ON_SHM)
    with closing(p):
        for local, is_ready in ((replace(offer, shm=None), False), (offer, True)):
            with closing(decode_endpoint(context, address, pool, ON_SHM, local)) as d:
                until(lambda: meet(p, d) is not None, lambda: [*p.pollables(), *d.pollables()])
                assert meet(p, d) is is_ready
        assert p.counters()["links_refused"] == 1
        assert p.counters()["planes_fallen_back"] == 0
    reason = "link refused: no data plane works between prefill-0 and decode-0"
    assert {record.name for record in caplog.records if reason in record.message} == {"baton.link"}
    assert "offers no shared pool" in caplog.text


def meet(p: SenderEndpoint, d: ReceiverEndpoint) -> bool | None:
    """Both work; returns whether D may use P, None while that is not settled."""
    p.poll(0.0)
    d.poll(0.0)
    return None if not d.ready_nodes() and d.counters()["links_refused"] == 0 else bool(d.ready_nodes())


# What D may do wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [-1, 0, NUM_PAGES + 1, 2**31 - 1])
def test_pages_that_d_does_not_have_are_not_written(
    context: Context, address: str, pool: KVPool, page: int
) -> None:
    before = pool.data.clone()
    p_pool = filled_pool(LAYOUT, NUM_PAGES, seed=1)
    p = prefill_endpoint(context, address, p_pool, ON_SHM)
    with closing(RawDecode(context, p, greeting_of(Role.DECODE, pool, ON_SHM))) as raw:
        raw.send(Prefill(7, SAMPLING, int32s(range(8)), int32s([3, page])))
        reason = "pages were granted that are not in the pool of decode-0"
        raw.until(lambda: Rejected(7, 500, reason) in raw.received)
        assert raw.at_p == []
        assert torch.equal(pool.data, before)
        raw.send(Prefill(8, SAMPLING, int32s(range(8)), int32s([1, NUM_PAGES])))
        raw.until(lambda: bool(raw.at_p))
        p.start(raw.at_p[0].key)
        p.chunk(raw.at_p[0].key, 0, [4, 5], is_last=True)
        assert torch.equal(pool.gather([1, NUM_PAGES]), p_pool.gather([4, 5]))


def test_greetings_over_many_connections_at_once(context: Context, address: str) -> None:
    """Of a D that was out of reach for long, say: P maps its pool for each, and uses it with the last."""
    with ExitStack() as stack:
        world = stack.enter_context(closing(World(context, address, plane=SHM)))
        greeting = greeting_of(Role.DECODE, world.d_pool, world.config)
        for _ in range(20):
            socket = stack.enter_context(closing(FrameSocket.dealer(context, address)))
            socket.send(CODEC.encode(Envelope(D_EPOCH, 1, greeting)))
        until_s = world.now + 5.0
        world.until(lambda: world.now > until_s, step_s=0.1)
        world.until(lambda: world.d.ready_nodes() == [P_NAME], step_s=0.1)
        world.hand_over([7], [3])
        assert world.same_pages([7], [3])
