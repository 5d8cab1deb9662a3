"""What becomes of a job: keys in batches to `RedisBlocks`, and absences to outcomes.

Owns the pause after a full server. Knows no caller and no memory of answers; runs on the tier's
threads.

Threads: any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvist.tiers.base import LoadJob, Namespace, Outcome, StoreJob
from kvist.tiers.jobs import Report, Ticket
from kvist.tiers.redis.blocks import DAMAGED, THERE_ALREADY, Encoded, RedisBlocks
from kvist.tiers.redis.layout import Header
from kvist.tiers.redis.servers import SERVER_FULL, Absence

BATCH_BYTES = 4 << 20
"""Of one exchange: what is on its way when a server dies, and what a slow one must manage in the
time that an exchange may take."""

_FULL_S = 5.0


class RedisWork:
    """Does the jobs of a tier.

    Parameters
    ----------
    blocks : RedisBlocks
    clock : callable
        Seconds, monotonic.
    """

    def __init__(self, blocks: RedisBlocks, clock: Callable[[], float]) -> None:
        self._blocks = blocks
        self._clock = clock
        self._full_until_s = float("-inf")

    def load(self, ticket: Ticket, job: LoadJob, space: Namespace) -> Report:
        """Load the blocks of a job, head first."""
        headers = [
            found
            if isinstance(found, Absence) or found.exact or job.allow_lossy
            else Absence("lossy")
            for found in self._blocks.headers(job.namespace, job.keys)
        ]
        results: list[Outcome | Absence] = [
            header if isinstance(header, Absence) else Outcome.DONE for header in headers
        ]
        sizes = [
            0 if isinstance(header, Absence) else sum(header.lengths[_slice(job.segments)])
            for header in headers
        ]
        for batch in _batches(sizes):
            if (verdict := ticket.verdict()) is not None:
                for index in batch:
                    results[index] = verdict
                continue
            known = [(index, h) for index in batch if isinstance(h := headers[index], Header)]
            came = self._blocks.load(
                space,
                [job.keys[index] for index, _ in known],
                [header for _, header in known],
                job.segments,
                [job.buffers[index] for index, _ in known],
            )
            for (index, _), absence in zip(known, came, strict=True):
                if absence is not None:
                    results[index] = absence
        report = Report()
        for result, size in zip(results, sizes, strict=True):
            if isinstance(result, Absence):
                report.add(_load_outcome(result), reason=result.reason)
            else:
                report.add(result, size if result is Outcome.DONE else 0)
        return report

    def store(self, ticket: Ticket, job: StoreJob, space: Namespace) -> tuple[Report, list[int]]:
        """Store the blocks of a job; return also the stored bytes of each, 0 of those that are not.

        Bytes that are there already are not sent.
        """
        results: list[Outcome | Absence] = [Absence(THERE_ALREADY)] * len(job.keys)
        sizes = [0] * len(job.keys)
        names = [self._blocks.name(job.namespace, key) for key in job.keys]
        batch: list[tuple[int, Encoded]] = []
        missing = [
            index for index, there in enumerate(self._blocks.which_are_there(names)) if not there
        ]
        for index in missing:
            if (verdict := ticket.verdict()) is not None:
                results[index] = verdict
            elif self._clock() < self._full_until_s:
                results[index] = Absence(SERVER_FULL)
            else:
                block = self._blocks.encode(
                    space, job.keys[index], job.buffers[index], job.meta[index]
                )
                batch.append((index, block))
                if sum(len(block.data) for _, block in batch) >= BATCH_BYTES:
                    self._store_batch(batch, results, sizes)
                    batch = []
        self._store_batch(batch, results, sizes)
        report = Report()
        for result, size in zip(results, sizes, strict=True):
            if isinstance(result, Absence):
                report.add(_store_outcome(result), reason=result.reason)
            else:
                report.add(result, size)
        return report, sizes

    def _store_batch(
        self,
        batch: Sequence[tuple[int, Encoded]],
        results: list[Outcome | Absence],
        sizes: list[int],
    ) -> None:
        absences = self._blocks.store([block for _, block in batch])
        for (index, block), absence in zip(batch, absences, strict=True):
            if absence is None:
                results[index] = Outcome.DONE
                sizes[index] = block.header.stored_bytes
                continue
            results[index] = absence
            if absence.reason == SERVER_FULL:
                self._full_until_s = self._clock() + _FULL_S


def _slice(segments: range) -> slice:
    return slice(segments.start, segments.stop)


def _batches(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield indexes in order, in groups of about `BATCH_BYTES`."""
    batch: list[int] = []
    total = 0
    for index, size in enumerate(sizes):
        if batch and total + size > BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(index)
        total += size
    if batch:
        yield batch


def _load_outcome(absence: Absence) -> Outcome:
    if absence.down:
        return Outcome.FAILED
    return Outcome.DAMAGED if absence.reason == DAMAGED else Outcome.MISS


def _store_outcome(absence: Absence) -> Outcome:
    return Outcome.FAILED if absence.down else Outcome.REFUSED
