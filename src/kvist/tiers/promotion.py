"""The way up: which lower tier has what, and loads of it into blocks of the device.

Owns loads under way. Knows block ids as places for bytes and nothing of tables. Threads: step
thread only.

A load is a run of consecutive keys. It is cut where the tier changes, and into jobs of `JOB_BYTES`,
so that the head of it is there early and an abandoned one ends soon::

    keys   k0 k1 k2 | k3 k4 k5 k6 | k7 …
    tier   host     | disk        | disk        three jobs, each told by itself
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from kvist.events import BlocksPromoted, EventLog, LoadFailed, TierLookedUp
from kvist.keys import BlockKey
from kvist.tiers.base import JobDone, LookupStatus, Outcome
from kvist.tiers.link import TierLink

JOB_BYTES = 16 << 20
"""Raw bytes of a job at most, and at least one block."""


class DeviceBytes(Protocol):
    """Bytes of the device's blocks, as transfers reach them."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""

    def read(self, block_id: int, out: memoryview) -> None:
        """Copy a block into host memory."""

    def landing(self, block_id: int) -> memoryview:
        """Where a load may write the bytes of a block: the block itself, or memory before it."""

    def land(self, block_id: int, landing: memoryview) -> None:
        """What was written to `landing` is whole: bring it into the block if it is not there."""


@dataclass(frozen=True, slots=True)
class Found:
    """What lower tiers have of a run of keys, from its beginning.

    Attributes
    ----------
    links : tuple of int
        Index of the tier, a key.
    stored_bytes : tuple of int
        What a load would read, a key.
    is_waiting : bool
        A tier has yet to answer, and it may be more.
    exact : tuple of bool
        Whether it is bit for bit what was stored, a key.
    """

    links: tuple[int, ...] = ()
    stored_bytes: tuple[int, ...] = ()
    is_waiting: bool = False
    exact: tuple[bool, ...] = ()

    def __len__(self) -> int:
        return len(self.links)

    def since(self, start: int) -> Found:
        """Leave the first `start` keys out."""
        return Found(
            self.links[start:], self.stored_bytes[start:], self.is_waiting, self.exact[start:]
        )


NOTHING = Found()


class Load:
    """Blocks under way into the device.

    Attributes
    ----------
    media : tuple of str
        Where each block comes from.
    exact : tuple of bool
        Whether it comes as it was.
    deadline_s : float
    """

    __slots__ = ("begun_s", "deadline_s", "exact", "jobs", "measured", "media")

    def __init__(
        self,
        media: tuple[str, ...],
        exact: tuple[bool, ...],
        begun_s: float,
        deadline_s: float,
    ) -> None:
        self.media = media
        self.exact = exact
        self.begun_s = begun_s
        self.deadline_s = deadline_s
        self.jobs: dict[tuple[int, int], range] = {}
        # Tier -> bytes, sum and maximum of the seconds of its jobs so far.
        self.measured: dict[int, tuple[int, float, float]] = {}


Arrived = tuple[Load, int, list[bool]]
"""A load, the first block of a part of it that is over, and whether each is good."""


class Promotions:
    """Lookups and loads over several tiers, the fastest first.

    Parameters
    ----------
    links : sequence of TierLink
    device : DeviceBytes
    segments : range
        Of a whole block.
    events : EventLog
    clock : callable
        Seconds, monotonic.
    """

    def __init__(
        self,
        links: Sequence[TierLink],
        device: DeviceBytes,
        segments: range,
        events: EventLog,
        clock: Callable[[], float],
    ) -> None:
        self._links = links
        self._device = device
        self._segments = segments
        self._events = events
        self._clock = clock
        self._arrived: list[Arrived] = []
        self._job_blocks = max(1, JOB_BYTES // device.block_bytes)

    def find(
        self,
        namespace: bytes,
        keys: Sequence[BlockKey],
        *,
        allow_lossy: bool = False,
        tell: bool = True,
    ) -> Found:
        """Return the longest run of keys, from the first, of which each is in some tier.

        O(keys · tiers).

        Parameters
        ----------
        allow_lossy : bool
            Whether a lossy copy will do; else it counts as absent.
        tell : bool
            Whether this is news: who asks again for the same is not counted twice.
        """
        where: dict[int, tuple[int, int, bool]] = {}
        waiting: set[int] = set()
        missing = list(range(len(keys)))
        for number, link in enumerate(self._links):
            if not missing:
                break
            answers = link.lookup(namespace, [keys[i] for i in missing])
            misses: Counter[str] = Counter()
            still: list[int] = []
            for index, answer in zip(missing, answers, strict=True):
                if answer.status is LookupStatus.HIT and (answer.exact or allow_lossy):
                    where[index] = (number, answer.stored_bytes, answer.exact)
                    continue
                still.append(index)
                if answer.status is LookupStatus.RETRY:
                    waiting.add(index)
                lossy = answer.status is LookupStatus.HIT
                misses["lossy" if lossy else answer.reason or answer.status.value] += 1
            hits = len(missing) - len(still)
            if tell:
                self._events.emit(TierLookedUp(link.name, hits, tuple(misses.items())))
            missing = still
        end = missing[0] if missing else len(keys)
        run = [where[i] for i in range(end)]
        return Found(
            tuple(number for number, _, _ in run),
            tuple(size for _, size, _ in run),
            end in waiting,
            tuple(exact for _, _, exact in run),
        )

    def seconds(self, found: Found) -> list[float]:
        """Say how long a load would take, from each block to the end of what was found."""
        nbytes = [0] * len(self._links)
        lasting = [0.0] * len(self._links)
        result = [0.0] * len(found)
        for index in range(len(found) - 1, -1, -1):
            number = found.links[index]
            link = self._links[number]
            nbytes[number] += found.stored_bytes[index]
            lasting[number] = link.speed.seconds(nbytes[number] + link.load_bytes)
            result[index] = max(lasting)
        return result

    def begin(
        self,
        namespace: bytes,
        keys: Sequence[BlockKey],
        block_ids: Sequence[int],
        found: Found,
        deadline_s: float,
    ) -> Load:
        """Load blocks into the places of `block_ids`. Those are lent until `poll` tells of them."""
        media = tuple(self._links[number].medium for number in found.links)
        load = Load(media, found.exact, self._clock(), deadline_s)
        start = 0
        for number, same in groupby(found.links):
            end = start + len(list(same))
            for first in range(start, end, self._job_blocks):
                part = range(first, min(end, first + self._job_blocks))
                self._submit(load, number, part, namespace, keys, block_ids, found)
            start = end
        return load

    def _submit(
        self,
        load: Load,
        number: int,
        part: range,
        namespace: bytes,
        keys: Sequence[BlockKey],
        block_ids: Sequence[int],
        found: Found,
    ) -> None:
        ids = tuple(block_ids[part.start : part.stop])
        landings = tuple(map(self._device.landing, ids))
        job_id = 0

        def on_done(done: JobDone) -> None:
            self._take(load, number, done, ids, landings)

        job_id = self._links[number].load(
            namespace,
            tuple(keys[part.start : part.stop]),
            self._segments,
            landings,
            load.deadline_s,
            sum(found.stored_bytes[part.start : part.stop]),
            on_done,
            allow_lossy=not all(found.exact),
        )
        load.jobs[number, job_id] = part

    def cancel(self, load: Load) -> None:
        """Nobody waits for a load any more."""
        for number, job_id in list(load.jobs):
            self._links[number].cancel(job_id)

    def expire(self, load: Load) -> None:
        """The deadline of a load has passed, and something of it is not there."""
        for number, job_id in list(load.jobs):
            self._links[number].expire(job_id)

    def arrived(self) -> list[Arrived]:
        """Return the parts of loads that are over since the last call. The links are polled."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def _take(
        self,
        load: Load,
        number: int,
        done: JobDone,
        ids: tuple[int, ...],
        landings: tuple[memoryview, ...],
    ) -> None:
        link = self._links[number]
        part = load.jobs.pop((number, done.job_id))
        good = [outcome is Outcome.DONE for outcome in done.outcomes]
        for block_id, landing, is_good in zip(ids, landings, good, strict=True):
            if is_good:
                self._device.land(block_id, landing)
        if sum(good):
            event = BlocksPromoted(link.name, sum(good), done.stored_bytes, done.seconds)
            self._events.emit(event)
        for outcome, times in Counter(done.outcomes).items():
            if outcome not in (Outcome.DONE, Outcome.CANCELLED):
                self._events.emit(LoadFailed(link.name, times, outcome.value, done.reason))
        self._measure(load, number, done)
        self._arrived.append((load, part.start, good))

    def _measure(self, load: Load, number: int, done: JobDone) -> None:
        """Learn from a load when the last job of a tier is in: jobs of one load run side by side.

        Their sum would make a tier with many threads look slow, and the time until somebody polled
        would make it look busy: what was seen from outside counts, between these bounds.
        """
        nbytes, total, most = load.measured.get(number, (0, 0.0, 0.0))
        nbytes, total = nbytes + done.stored_bytes, total + done.seconds
        most = max(most, done.seconds)
        load.measured[number] = (nbytes, total, most)
        if any(other == number for other, _ in load.jobs):
            return
        link = self._links[number]
        outside = max(0.0, link.woken_s - load.begun_s)
        link.speed.observe(nbytes, min(total, max(most, outside)))
