"""The host tier: copies of blocks in memory of the host, raw or compressed.

Owns its threads and what they do with bytes: encode, copy, verify. Where a record lies and who has
to leave for it is in `HostBooks`; the memory is a `HostRoom`.

A record is the encoded segments of one block end to end, in extents that need not be adjacent::

    segment 0 │ segment 1 │ … │ segment n-1 │ (rest of the last extent)
    └ each with its length as stored, and a checksum, in the index

A block is findable when it is whole: `PENDING` from `submit_store`, `HIT` once its bytes and
checksums lie there. Checksums are verified on every load: a stray write anywhere in the process
costs a miss and not a wrong answer.

Budget: `capacity_bytes` is all of it, the index included; the memory map is 3 % smaller. On top
comes one encoded block a thread while it is being stored.

Threads: the caller's, for every call; its own for bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from kvist.codecs.base import Codec
from kvist.codecs.raw import RawCodec
from kvist.errors import ConfigError, DamageError, IntegrityError
from kvist.keys import BlockKey
from kvist.policies.keeper import Keeper
from kvist.sizes import format_size
from kvist.tiers.base import (
    LOST,
    BlockMeta,
    Entry,
    JobDone,
    LoadJob,
    Lookup,
    LookupStatus,
    Namespace,
    Outcome,
    StoreJob,
    Tier,
    Usage,
)
from kvist.tiers.checksum import SegmentChecksum
from kvist.tiers.host_books import EXTENT_CHARGE, HostBooks, Record
from kvist.tiers.host_room import HostRoom, Pin
from kvist.tiers.jobs import JobThreads, Report, Ticket

THERE_ALREADY = "there_already"


class HostTier(Tier):
    """Blocks in host memory.

    Parameters
    ----------
    capacity_bytes : int
        Hard.
    make_keeper : callable
        From a capacity in bytes to an empty `Keeper`: eviction policy, quotas, admission.
    codec : Codec, optional
        Raw by default.
    num_threads : int
    pin : Pin, optional
        Where a GPU reads and writes the memory directly: pins the mapping.
    name : str
    clock : callable
        Seconds, monotonic.

    Raises
    ------
    ConfigError
        If there is no room for a single extent.
    CapacityError
        If the machine does not give so much memory.
    """

    def __init__(
        self,
        capacity_bytes: int,
        make_keeper: Callable[[int], Keeper],
        *,
        codec: Codec | None = None,
        num_threads: int = 1,
        pin: Pin | None = None,
        name: str = "host",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        num_extents = capacity_bytes // EXTENT_CHARGE
        if num_extents < 1:
            raise ConfigError(
                f"a host tier of {format_size(capacity_bytes)} holds nothing; the least is"
                f" {format_size(EXTENT_CHARGE)}, and a block takes more"
            )
        self.name = name
        self.medium = "host"
        self._capacity_bytes = capacity_bytes
        self._codec = codec if codec is not None else RawCodec()
        self.lossless = self._codec.lossless
        # Others may read a block twice over, and must not see it change.
        self.reads_in_place = self._codec.wire_id == RawCodec.wire_id
        self._clock = clock
        self._checksum = SegmentChecksum()
        self._spaces: dict[bytes, Namespace] = {}
        # The caller's thread's: blocks on their way in, by the job that brings them.
        self._pending: dict[bytes, int] = {}
        self._stores: dict[int, list[bytes]] = {}
        self._books = HostBooks(num_extents, make_keeper)
        self._room = HostRoom(num_extents, pin)
        self._threads = JobThreads(name, num_threads, clock)
        self._closed = False

    def open_namespace(self, namespace: Namespace) -> None:
        """See `Tier.open_namespace`."""
        known = self._spaces.setdefault(namespace.digest, namespace)
        if known.segment_bytes != namespace.segment_bytes:
            raise ConfigError(
                f"namespace {namespace.digest.hex()[:12]} is open with segments of"
                f" {known.segment_bytes} bytes, not {namespace.segment_bytes}"
            )

    def lookup(self, namespace: bytes, keys: Sequence[BlockKey]) -> list[Lookup]:
        """See `Tier.lookup`. About 1 µs a key; never RETRY."""
        exact = self._codec.lossless
        answers = []
        for key in keys:
            name = namespace + key
            record = self._books.find(name)
            if record is not None:
                answers.append(Lookup(LookupStatus.HIT, record.stored_bytes, exact))
            elif name in self._pending:
                answers.append(Lookup(LookupStatus.PENDING, reason="being_written"))
            else:
                answers.append(Lookup(LookupStatus.MISS, reason="absent"))
        return answers

    def submit_load(self, job: LoadJob) -> None:
        """See `Tier.submit_load`."""
        space = self._space(job)
        space.check_load(job)
        self._threads.submit(job, lambda ticket: self._load(ticket, job, space))

    def submit_store(self, job: StoreJob) -> None:
        """See `Tier.submit_store`."""
        space = self._space(job)
        space.check_store(job)
        names = [job.namespace + key for key in job.keys]
        admitted = self._books.admit(names)
        self._stores[job.job_id] = [
            name
            for name in names[:admitted]
            if self._pending.setdefault(name, job.job_id) == job.job_id
        ]
        self._threads.submit(job, lambda ticket: self._store(ticket, job, space, admitted))

    def cancel(self, job_id: int) -> None:
        """See `Tier.cancel`."""
        self._threads.cancel(job_id)

    def poll(self) -> list[JobDone]:
        """See `Tier.poll`."""
        ended = self._threads.poll()
        for done in ended:
            for name in self._stores.pop(done.job_id, ()):
                self._pending.pop(name, None)
        return ended

    def set_waker(self, waker: Callable[[], None]) -> None:
        """See `Tier.set_waker`."""
        self._threads.set_waker(waker)

    def lock(self, namespace: bytes, keys: Sequence[BlockKey], ttl_s: float) -> list[bool]:
        """See `Tier.lock`."""
        return self._books.lock([namespace + key for key in keys], ttl_s)

    def unlock(self, namespace: bytes, keys: Sequence[BlockKey]) -> None:
        """See `Tier.unlock`."""
        self._books.unlock(namespace + key for key in keys)

    def touch(self, namespace: bytes, keys: Sequence[BlockKey]) -> None:
        """See `Tier.touch`."""
        self._books.touch(namespace + key for key in keys)

    def delete(self, namespace: bytes, keys: Sequence[BlockKey]) -> int:
        """See `Tier.delete`."""
        return self._books.drop(namespace + key for key in keys)

    def entries(self, namespace: bytes) -> Iterator[Entry]:
        """See `Tier.entries`."""
        now = self._clock()
        for record in self._books.records(namespace):
            key = BlockKey(record.name[len(namespace) :])
            yield Entry(key, record.stored_bytes, now - record.stored_s, record.hits)

    def usage(self) -> Usage:
        """See `Tier.usage`. Whole extents, with their share for the index."""
        return Usage(self._capacity_bytes, *self._books.usage())

    def drain(self, timeout_s: float) -> bool:
        """See `Tier.drain`."""
        return self._threads.drain(timeout_s)

    def close(self) -> None:
        """See `Tier.close`."""
        if self._closed:
            return
        self._closed = True
        self._threads.close()
        self._room.close()

    def check(self) -> None:
        """See `Tier.check`."""
        self._books.check()

    # ------------------------------------------------------------------ on the tier's threads

    def _load(self, ticket: Ticket, job: LoadJob, space: Namespace) -> Report:
        report = Report()
        for key, buffer in zip(job.keys, job.buffers, strict=True):
            if (verdict := ticket.verdict()) is not None:
                report.add(verdict)
                continue
            if not self.lossless and not job.allow_lossy:
                report.add(Outcome.MISS, reason="lossy")
                continue
            record = self._books.retain(job.namespace + key)
            if record is None:
                report.add(Outcome.MISS, reason="absent")
                continue
            try:
                nbytes = self._read(record, key, job, space, buffer)
            except DamageError as error:
                self._books.release(record, damaged=True)
                report.add(Outcome.DAMAGED, reason=str(error))
            except BaseException:
                self._books.release(record)
                raise
            else:
                self._books.release(record)
                report.add(Outcome.DONE, nbytes)
        return report

    def _read(
        self, record: Record, key: BlockKey, job: LoadJob, space: Namespace, buffer: memoryview
    ) -> int:
        position = nbytes = 0
        for index in job.segments:
            start, end = record.ends[index - 1] if index else 0, record.ends[index]
            data = self._room.read(record.runs, start, end)
            if self._checksum.digest(job.namespace, key, index, data) != record.checksums[index]:
                raise DamageError(f"segment {index} of block {key.hex()[:8]} was overwritten")
            out = buffer[position : position + space.segment_bytes[index]]
            self._codec.decode(data, out, space.itemsize)
            position += len(out)
            nbytes += len(data)
        return nbytes

    def _store(self, ticket: Ticket, job: StoreJob, space: Namespace, admitted: int) -> Report:
        report = Report()
        stored: list[Record] = []
        turned_away: set[bytes] = set()
        try:
            for index, (key, meta) in enumerate(zip(job.keys, job.meta, strict=True)):
                name = job.namespace + key
                if (verdict := ticket.verdict()) is not None:
                    report.add(verdict)
                    continue
                if index >= admitted:
                    report.add(Outcome.REFUSED, reason="not_admitted")
                    continue
                if self._books.holds(name):
                    report.add(Outcome.REFUSED, reason=THERE_ALREADY)
                    continue
                # What continues a block that found no room would never be found.
                if meta.parent not in turned_away:
                    record = self._keep(space, key, job.buffers[index], meta)
                    if record is not None and key in job.lost:
                        self._books.release(record, damaged=True)
                        report.add(Outcome.CANCELLED, reason=LOST)
                        continue
                    if record is not None:
                        self._books.publish(record)
                        stored.append(record)
                        report.add(Outcome.DONE, record.stored_bytes)
                        continue
                    if self._books.holds(name):  # another thread was faster
                        report.add(Outcome.REFUSED, reason=THERE_ALREADY)
                        continue
                turned_away.add(key)
                report.add(Outcome.REFUSED, reason="no_room")
        finally:
            # Until now none of them could be evicted to make room for another.
            for record in stored:
                self._books.release(record)
        return report

    def _keep(
        self, space: Namespace, key: BlockKey, block: memoryview, meta: BlockMeta
    ) -> Record | None:
        """Encode one block and lay it down, not to be found yet; None if there is no room.

        The caller is its user.
        """
        parts = self._codec.encode_block(block, space.segment_bytes, space.itemsize)
        ends = list(accumulate(map(len, parts)))
        checksums = [
            self._checksum.digest(space.digest, key, index, part)
            for index, part in enumerate(parts)
        ]
        record = self._books.place(
            space.digest + key,
            space.digest + meta.parent,
            meta,
            ends,
            checksums,
            space.tenant,
            self._clock(),
        )
        if record is None:
            return None
        try:
            self._room.write(record.runs, parts)
        except BaseException:
            self._books.release(record, damaged=True)
            raise
        return record

    def _space(self, job: LoadJob | StoreJob) -> Namespace:
        space = self._spaces.get(job.namespace)
        if space is None:
            raise IntegrityError(f"job {job.job_id} names a namespace that is not open")
        return space
