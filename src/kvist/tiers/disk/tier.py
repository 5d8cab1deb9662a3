"""The disk tier: threads between the queues and a `DiskStore`.

Owns who does what when. Readers take one block at a time, the head of a prefix first, and let the
device begin with those that follow. One thread writes: `kvist.tiers.disk.writer`. The caller's
thread looks into memory only, whatever the device does.

Threads: as `kvist.tiers.base` says.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread

from kvist.codecs.base import Codec
from kvist.errors import ConfigError, DamageError, IntegrityError
from kvist.keys import BlockKey
from kvist.policies.keeper import Keeper
from kvist.tiers.base import (
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
from kvist.tiers.disk.coding import RAW
from kvist.tiers.disk.files import Files
from kvist.tiers.disk.index import index_file_bytes
from kvist.tiers.disk.layout import MAX_RECORD_BYTES, MAX_SEGMENTS, slab_bytes
from kvist.tiers.disk.opening import open_store, plain_keeper, read_label
from kvist.tiers.disk.queues import LoadItem, Queues
from kvist.tiers.disk.writer import Writer
from kvist.tiers.extents import EXTENT_BYTES

_AHEAD = 8


class DiskTier(Tier):
    """Blocks in one file of fixed size, found again after a restart.

    Parameters
    ----------
    directory : Path
        Made if need be, 0700; several processes may name the same one.
    budget_bytes : int
        What everything in it takes on the device at most: slab, index, log. The slab is reserved at
        once. Another budget than last time changes the size of the slab.
    name : str
    codec : Codec, optional
        Raw if not given. What was stored with another codec is read all the same.
    keeper : callable, optional
        From a capacity in bytes to an empty keeper: who is admitted, who leaves, who may not.
    tier_key : str
        Makes checksums keyed: for a device that others can write to.
    threads : int
        One that writes, the others read; 2 to 16.
    files, wall, clock : optional
        The operating system, the clock of people, and the clock of deadlines and locks.

    Attributes
    ----------
    notes : tuple of str
        What people should know of how it was opened.

    Raises
    ------
    ConfigError
        If the directory or the budget cannot be used, and why.

    Notes
    -----
    A lookup takes about 1 µs a key and touches memory only. What other processes stored in the
    same directory is seen after about 0.1 s.
    """

    medium = "disk"

    def __init__(
        self,
        directory: Path,
        budget_bytes: int,
        *,
        name: str = "disk",
        codec: Codec | None = None,
        keeper: Callable[[int], Keeper] = plain_keeper,
        tier_key: str = "",
        threads: int = 3,
        files: Files | None = None,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 2 <= threads <= 16:
            raise ConfigError(f"disk tier at {directory}: {threads} threads; from 2 to 16")
        self.name = name
        self._directory = directory
        self._budget_bytes = budget_bytes
        self._files = files or Files()
        self._clock = clock
        self._wall = wall
        opened = open_store(
            directory,
            budget_bytes,
            codec=codec,
            keeper=keeper,
            checksum=SegmentChecksum(tier_key),
            files=self._files,
            wall=wall,
        )
        self.notes = tuple(opened.notes)
        self.lossless = codec is None or codec.lossless
        # Others may read a block twice over, and must not see it change.
        self.reads_in_place = codec is None or codec.wire_id == RAW
        self._store = opened.store
        self._labels: dict[bytes, Namespace] = {}
        self._queues = Queues()
        self._writer = Writer(self._store, self._queues, self._labels, clock)
        self._threads = [Thread(target=self._writer.run, name=f"kvist-{name}-write", daemon=True)]
        self._threads += [
            Thread(target=self._read_all, name=f"kvist-{name}-read-{index}", daemon=True)
            for index in range(threads - 1)
        ]
        self._is_closed = False
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------------------------ the contract

    def open_namespace(self, namespace: Namespace) -> None:
        """See `Tier.open_namespace`. Reads a descriptor that is there already."""
        if not 1 <= len(namespace.segment_bytes) <= MAX_SEGMENTS:
            raise ConfigError(
                f"a block of {len(namespace.segment_bytes)} segments on disk: from 1 to"
                f" {MAX_SEGMENTS}; cut it into larger ranges of layers"
            )
        if namespace.block_bytes > MAX_RECORD_BYTES:
            raise ConfigError(
                f"a block of {namespace.block_bytes} bytes on disk: at most {MAX_RECORD_BYTES};"
                " lower --block-size"
            )
        known = self._labels.get(namespace.digest) or self._label_on_disk(namespace.digest)
        if known is not None and known.segment_bytes != namespace.segment_bytes:
            raise ConfigError(
                f"namespace {namespace.digest.hex()[:12]} is on disk with segments of"
                f" {known.segment_bytes} bytes, not {namespace.segment_bytes}: two things have one"
                " identity"
            )
        self._labels[namespace.digest] = namespace
        with self._store.lock:
            self._store.books.shelf(namespace.digest).label = namespace

    def lookup(self, namespace: bytes, keys: Sequence[BlockKey]) -> list[Lookup]:
        """See `Tier.lookup`. Never RETRY."""
        answers: list[Lookup] = []
        books, queues = self._store.books, self._queues
        with self._store.lock:
            for key in keys:
                record = books.find(namespace, key)
                if record is not None:
                    answers.append(Lookup(LookupStatus.HIT, record.stored_bytes, record.exact))
                elif queues.is_storing(namespace + key) or books.is_writing(namespace, key):
                    answers.append(Lookup(LookupStatus.PENDING, reason="being_written"))
                else:
                    answers.append(Lookup(LookupStatus.MISS, reason="absent"))
        return answers

    def submit_load(self, job: LoadJob) -> None:
        """See `Tier.submit_load`."""
        label = self._label(job)
        label.check_load(job)
        self._queues.add_load(job, label)

    def submit_store(self, job: StoreJob) -> None:
        """See `Tier.submit_store`.

        REFUSED for a while after the device did not do one, and while the directory is not there.
        """
        label = self._label(job)
        label.check_store(job)
        refused = self._writer.trouble()
        admitted = len(job.keys)
        if not refused:
            with self._store.lock:
                keeper = self._store.books.keeper
                admitted = keeper.admit([job.namespace + key for key in job.keys])
        self._queues.add_store(job, label, refused, admitted)

    def cancel(self, job_id: int) -> None:
        """See `Tier.cancel`."""
        self._queues.cancel(job_id)

    def poll(self) -> list[JobDone]:
        """See `Tier.poll`."""
        return self._queues.poll()

    def set_waker(self, waker: Callable[[], None]) -> None:
        """See `Tier.set_waker`."""
        self._queues.set_waker(waker)

    def lock(self, namespace: bytes, keys: Sequence[BlockKey], ttl_s: float) -> list[bool]:
        """See `Tier.lock`. Other processes may evict nevertheless: their loads come first."""
        with self._store.lock:
            keeper = self._store.books.keeper
            return [keeper.lock(namespace + key, ttl_s) for key in keys]

    def unlock(self, namespace: bytes, keys: Sequence[BlockKey]) -> None:
        """See `Tier.unlock`."""
        with self._store.lock:
            for key in keys:
                self._store.books.keeper.unlock(namespace + key)

    def touch(self, namespace: bytes, keys: Sequence[BlockKey]) -> None:
        """See `Tier.touch`. Reaches the disk within some seconds, or with `drain`."""
        with self._store.lock:
            books = self._store.books
            found = [books.find(namespace, key) for key in keys]
            books.touch([record for record in found if record is not None])

    def delete(self, namespace: bytes, keys: Sequence[BlockKey]) -> int:
        """See `Tier.delete`. Other processes see it after about 0.1 s."""
        with self._store.lock:
            books = self._store.books
            found = [books.find(namespace, key) for key in dict.fromkeys(keys)]
            return sum(books.doom(record) for record in found if record is not None)

    def entries(self, namespace: bytes) -> Iterator[Entry]:
        """See `Tier.entries`."""
        with self._store.lock:
            shelf = self._store.books.shelves.get(namespace)
            records = list(shelf.blocks.values()) if shelf else []
        now = self._wall()
        for record in records:
            age_s = max(0.0, now - record.created_s)
            yield Entry(record.key, record.stored_bytes, age_s, record.hits)

    def usage(self) -> Usage:
        """See `Tier.usage`. Counts extents in use, headers, and the index as it is now."""
        overhead = index_file_bytes(self._files, self._directory)
        tenants: Counter[str] = Counter()
        with self._store.lock:
            books = self._store.books
            num_zones = self._store.slab.superblock.num_zones
            overhead += slab_bytes(num_zones) - books.arena.num_extents * EXTENT_BYTES
            used = overhead + books.arena.num_used * EXTENT_BYTES
            for digest, shelf in books.shelves.items():
                label = self._labels.get(digest) or shelf.label
                if shelf.room_bytes:
                    tenants[label.tenant if label else ""] += shelf.room_bytes
            return Usage(self._budget_bytes, used, books.num_blocks, dict(tenants))

    def drain(self, timeout_s: float) -> bool:
        """See `Tier.drain`."""
        give_up = time.monotonic() + timeout_s
        if not self._queues.wait_for_all(timeout_s):
            return False
        return self._writer.settle(max(0.0, give_up - time.monotonic()))

    def close(self) -> None:
        """See `Tier.close`. Twice is once."""
        if self._is_closed:
            return
        self._is_closed = True
        self._queues.close()
        for thread in self._threads:
            thread.join()
        self._store.close()

    def check(self) -> None:
        """See `Tier.check`."""
        self._store.check()

    # ------------------------------------------------------------------ readers

    def _read_all(self) -> None:
        while (item := self._queues.next_load()) is not None:
            try:
                self._expect(self._queues.ahead(_AHEAD))
                self._read_one(item)
            except Exception as error:  # noqa: BLE001 - whatever it is: a miss, not the end
                self._queues.end_load(item, Outcome.FAILED, 0, f"{type(error).__name__}: {error}")

    def _expect(self, item: LoadItem | None) -> None:
        """Let the device begin with a key whose turn comes soon: it is fast with many at once."""
        if item is None or item.task.cancelled:
            return
        record = self._store.hold(item.job.namespace, item.key)
        if record is not None:
            # Only a hint: whatever is wrong shows when it is read.
            with suppress(OSError, DamageError):
                self._store.expect(record, item.task.label, item.job.segments)
            self._store.let_go(record)

    def _read_one(self, item: LoadItem) -> None:
        job, end = item.job, self._queues.end_load
        if item.task.cancelled:
            end(item, Outcome.CANCELLED)
            return
        if self._is_late(job):
            end(item, Outcome.LATE)
            return
        record = self._store.hold(job.namespace, item.key)
        if record is None:
            end(item, Outcome.MISS, 0, "absent")
            return
        if not record.exact and not job.allow_lossy:
            self._store.let_go(record)
            end(item, Outcome.MISS, 0, "lossy")
            return
        try:
            stored = self._store.read(record, item.task.label, job.segments, job.buffers[item.at])
        except DamageError as error:
            # Evicted by another process while it was read, or damaged: both are found no more.
            current = self._store.is_current(record)
            self._store.discard(record)
            if current:
                end(item, Outcome.DAMAGED, 0, str(error))
            else:
                end(item, Outcome.MISS, 0, "evicted")
        except OSError as error:
            end(item, Outcome.FAILED, 0, error.strerror or str(error))
        else:
            if self._is_late(job):
                end(item, Outcome.LATE, stored)
            else:
                end(item, Outcome.DONE, stored)
        finally:
            self._store.let_go(record)

    def _is_late(self, job: LoadJob) -> bool:
        return job.deadline_s is not None and self._clock() >= job.deadline_s

    # ------------------------------------------------------------------ inside

    def _label(self, job: LoadJob | StoreJob) -> Namespace:
        label = self._labels.get(job.namespace)
        if label is None:
            raise IntegrityError(f"job {job.job_id} names a namespace that is not open")
        return label

    def _label_on_disk(self, digest: bytes) -> Namespace | None:
        with self._store.lock:
            shelf = self._store.books.shelves.get(digest)
            descriptor = shelf.descriptor if shelf else None
        return None if descriptor is None else read_label(self._store, descriptor)
