"""P's ends of planes: which one a decode node gets, decided at its Hello, and made when its link is up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from common.config import TransferConfig
from common.kv.pages import Pages
from common.kv.pool import KVPool
from common.link import first_common_plane
from common.messages import Hello, HostIdentity
from common.peer import Peer
from transfer.planes.base import PlaneSender, PlaneUnavailable
from transfer.planes.cuda_ipc import CUDA_IPC, CudaPools
from transfer.planes.frames import FRAMES, FramesSender
from transfer.planes.one_sided import OneSidedSender
from transfer.planes.shm import SHM, open_pool
from transfer.transfer_stream import TransferStream

log = logging.getLogger("baton.transfer")

OpenPages = Callable[[Hello, Hello], Pages]  # of us and of the decode node; raises PlaneUnavailable


def pool_openers(device: torch.device) -> dict[str, OpenPages]:
    """How D's pool is mapped, on each plane that needs it."""
    return {SHM: lambda ours, theirs: open_pool(ours, theirs).pages, CUDA_IPC: CudaPools(device).open}


class SenderPlanes:
    """Chooses and makes planes; what falls back says so.

    Args:
        openers: how D's pool is mapped, by plane.
    """

    def __init__(
        self,
        pool: KVPool,
        config: TransferConfig,
        stream: TransferStream,
        openers: Mapping[str, OpenPages],
    ) -> None:
        self._pool = pool
        self._verify = config.verify_pages
        self._stream = stream
        self._openers = openers
        self._mapped: dict[HostIdentity, Pages] = {}  # of decode nodes that greeted in this turn
        self.num_fallen_back = 0

    def choose(self, ours: Hello, theirs: Hello) -> str:
        """Take the first plane of both; where it needs D's pool and that cannot be mapped, frames."""
        plane = first_common_plane(ours, theirs)
        if plane not in self._openers:
            return plane
        try:
            self._mapped[theirs.host] = self._openers[plane](ours, theirs)
        except PlaneUnavailable as error:
            log.warning("%s: no plane %s with %s: %s", ours.node_id, plane, theirs.node_id, error)
            if FRAMES not in ours.planes or FRAMES not in theirs.planes:
                return ""
            self.num_fallen_back += ours.host.boot_id == theirs.host.boot_id  # else there is nothing faster
            return FRAMES
        return plane

    def make(self, peer: Peer) -> PlaneSender:
        """Make the plane that was chosen for a decode node that is up now."""
        if peer.plane in self._openers:
            target = self._mapped[peer.hello.host]
            return OneSidedSender(self._pool, target, peer.send, self._stream, verify_pages=self._verify)
        return FramesSender(self._pool, peer.send, self._stream, verify_pages=self._verify)

    def forget(self) -> None:
        """The turn is over: let go of pools that were mapped for nobody."""
        self._mapped.clear()
