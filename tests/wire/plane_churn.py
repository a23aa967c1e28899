"""Many transfers at once, some given up at any point, over one link: every page that arrives is right.

With checksums on, and each page compared with P's besides. Pages that were given up are written by somebody
else as soon as they are released; they are granted again after that.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from common.messages import Choice
from common.request import PrefillStamps
from tests.wire.endpoint_world import World
from tests.wire.plane_aborts import OTHERS
from transfer.receiver_endpoint import TransferDone, TransferReleased
from transfer.sender import FirstToken
from transfer.sender_endpoint import TransferArrived, TransferKey, TransferStopped

AT_ONCE = 6
MOST_PAGES = 4


@dataclass
class _Job:
    """A transfer at P: its pages there, and how many were given to the plane."""

    p_pages: list[int]
    sent: int = 0


@dataclass
class Churn:
    """Runs transfers through a world of 32 pages until so many have ended."""

    world: World
    draw: random.Random = field(default_factory=lambda: random.Random(3))
    granted: dict[int, list[int]] = field(default_factory=dict)  # D's pages
    given_up: set[int] = field(default_factory=set)
    done: int = 0
    released: int = 0

    def run(self, count: int) -> None:
        """Every transfer ends, right or given up, and all pages come back."""
        free = list(range(1, 33))
        jobs: dict[TransferKey, _Job] = {}
        p_pages: dict[int, list[int]] = {}
        seen_p = seen_d = 0
        started = 0

        def turn() -> bool:
            nonlocal seen_p, seen_d, started
            world, draw = self.world, self.draw
            while started < count and len(self.granted) < AT_ONCE:
                pages = [free.pop(draw.randrange(len(free))) for _ in range(draw.randint(1, MOST_PAGES))]
                self.granted[world.grant(pages)] = pages
                started += 1
            for at_p in world.at_p[seen_p:]:
                if isinstance(at_p, TransferArrived):
                    pages = draw.sample(range(1, 33), len(at_p.prefill.page_ids))
                    jobs[at_p.key], p_pages[at_p.key.transfer_id] = _Job(pages), pages
                    world.p.start(at_p.key)
                elif isinstance(at_p, TransferStopped):
                    jobs.pop(at_p.key, None)
            seen_p = len(world.at_p)
            for key in draw.sample(sorted(jobs, key=str), len(jobs)):
                self._compute(key, jobs)
            for transfer_id in draw.sample(sorted(self.granted), len(self.granted)):
                if draw.random() < 0.02 and transfer_id not in self.given_up:
                    self.given_up.add(transfer_id)
                    world.d.abort(transfer_id, world.now)
            for at_d in world.at_d[seen_d:]:
                free.extend(self._take(at_d, p_pages))
            seen_d = len(world.at_d)
            return self.done + self.released == count

        self.world.until(turn, step_s=0.001)
        assert sorted(free) == list(range(1, 33))

    def _compute(self, key: TransferKey, jobs: dict[TransferKey, _Job]) -> None:
        job = jobs[key]
        some = self.draw.randint(0, len(job.p_pages) - job.sent)
        is_last = job.sent + some == len(job.p_pages)
        self.world.p.chunk(key, job.sent, job.p_pages[job.sent : job.sent + some], is_last=is_last)
        job.sent += some
        if is_last:
            self.world.p.first_token(key, FirstToken((Choice(1, None),), PrefillStamps()))
            del jobs[key]

    def _take(self, at_d: object, p_pages: dict[int, list[int]]) -> list[int]:
        """Return the pages that are D's again."""
        if isinstance(at_d, TransferDone):
            pages = self.granted.pop(at_d.transfer_id)
            assert self.world.same_pages(p_pages[at_d.transfer_id], pages)
            self.done += 1
            return pages
        assert isinstance(at_d, TransferReleased)  # nothing gives out by itself
        assert at_d.transfer_id in self.given_up
        pages = self.granted.pop(at_d.transfer_id)
        with self.world.d_streams.forward():
            self.world.d_pool.data[:, pages] = OTHERS
        self.released += 1
        return pages
