"""The thread that changes a store: batches of blocks, and house-keeping between them.

Owns the rhythm: a batch as soon as there is one, and when there is none, what other processes did,
what is to be freed, what was used, and at last what makes all of it survive a loss of power.

Threads: `run` is one; `settle` and `trouble` may be called from another.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from threading import Condition

from kvist.tiers.base import Namespace, Outcome
from kvist.tiers.disk.coding import Put
from kvist.tiers.disk.index import StaleIndexError, is_damage
from kvist.tiers.disk.queues import Queues, StoreEnd, StoreItem
from kvist.tiers.disk.store import DiskStore

BATCH_KEYS = 48
BATCH_BYTES = 16 << 20
TICK_S = 0.1
_RECLAIM_S = 1.0
_NOTE_USES_S = 5.0
_DURABLE_S = 5.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class Writer:
    """See the module's description.

    Parameters
    ----------
    store : DiskStore
    queues : Queues
    labels : mapping of bytes to Namespace
        The open namespaces; grows.
    clock : callable
        Monotonic; how long stores are refused after the device did not do one.
    """

    def __init__(
        self,
        store: DiskStore,
        queues: Queues,
        labels: Mapping[bytes, Namespace],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._queues = queues
        self._labels = labels
        self._clock = clock
        self._pause_s = _FIRST_PAUSE_S
        self._paused_until = float("-inf")
        self._is_gone = False
        self._due = {"reclaim": 0.0, "uses": 0.0, "durable": 0.0}
        self._settling = Condition()
        self._wanted = 0
        self._settled = 0

    def trouble(self) -> str:
        """Return why nothing is stored now, or ``""``."""
        if self._is_gone:
            return "directory_gone"
        return "device_error" if self._clock() < self._paused_until else ""

    def settle(self, timeout_s: float) -> bool:
        """Wait until all that was published is durable; say whether that was reached."""
        with self._settling:
            self._wanted += 1
            wanted = self._wanted
            return self._settling.wait_for(lambda: self._settled >= wanted, timeout_s)

    def run(self) -> None:
        """Work until the queues close."""
        while not self._queues.closing:
            batch = self._queues.next_stores(BATCH_KEYS, BATCH_BYTES, TICK_S)
            if batch:
                self._store_batch(batch)
            self._keep_house(idle=not batch)
        while batch := self._queues.next_stores(BATCH_KEYS, BATCH_BYTES, 0.0):
            self._queues.end_stores((item, Outcome.CANCELLED, 0, "") for item in batch)

    # ------------------------------------------------------------------ stores

    def _store_batch(self, batch: list[StoreItem]) -> None:
        puts: list[Put] = []
        items: list[StoreItem] = []
        ends: list[StoreEnd] = []
        trouble = self.trouble()
        for item in batch:
            if item.task.cancelled:
                ends.append((item, Outcome.CANCELLED, 0, ""))
            elif trouble:
                ends.append((item, Outcome.REFUSED, 0, trouble))
            elif isinstance(put := self._encode(item), Put):
                puts.append(put)
                items.append(item)
            else:
                ends.append((item, Outcome.FAILED, 0, put))
        if puts:
            ends += self._write(items, puts)
        self._queues.end_stores(ends)

    def _write(self, items: list[StoreItem], puts: list[Put]) -> Iterator[StoreEnd]:
        try:
            self._sweep()
            labels = {put.namespace: self._labels[put.namespace] for put in puts}
            answers = self._store.write(puts, labels)
        except Exception as error:  # noqa: BLE001 - whatever it is: not kept, not the end
            answers = [(Outcome.FAILED, f"{type(error).__name__}: {error}")] * len(puts)
            self._mend(error)
        self._note_trouble(answers)
        for item, put, (outcome, why) in zip(items, puts, answers, strict=True):
            yield item, outcome, put.stored_bytes if outcome is Outcome.DONE else 0, why

    def _encode(self, item: StoreItem) -> Put | str:
        """Return a block ready to be written, or what its codec said."""
        label = item.task.label
        try:
            block = item.job.buffers[item.at]
            return self._store.coder.encode(label, item.key, block, item.meta, item.job.lost)
        except Exception as error:  # noqa: BLE001 - a codec may raise anything
            return f"{type(error).__name__}: {error}"

    def _note_trouble(self, answers: list[tuple[Outcome, str]]) -> None:
        outcomes = {outcome for outcome, _ in answers}
        if Outcome.FAILED in outcomes:
            self._paused_until = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        elif Outcome.DONE in outcomes:
            self._pause_s = _FIRST_PAUSE_S

    # ------------------------------------------------------------------ house-keeping

    def _keep_house(self, *, idle: bool) -> None:
        with self._settling:
            wanted = self._wanted
        settle = wanted > self._settled
        try:
            self._store.ledger.follow()
            if self._is_due("reclaim", _RECLAIM_S):
                # Deleted or moved: it would grow beside the store that others make there.
                self._is_gone = not self._store.slab.is_in_place()
                self._store.ledger.reclaim()
                self._store.ledger.expire()
            self._sweep()
            if settle or self._is_due("uses", _NOTE_USES_S):
                self._store.ledger.note_uses()
            if settle or (idle and self._is_due("durable", _DURABLE_S)):
                self._store.make_durable()
            if settle:
                self._store.ledger.index.checkpoint()
        except Exception as error:  # noqa: BLE001 - without this thread nothing is stored any more
            # Tried again at the next tick; what it costs meanwhile is room, or news of others.
            self._mend(error)
            time.sleep(TICK_S)
            return
        if settle:
            with self._settling:
                self._settled = wanted
                self._settling.notify_all()

    def _mend(self, error: Exception) -> None:
        """Build the index anew if that is what is wrong."""
        if is_damage(error):
            with suppress(sqlite3.Error, OSError, StaleIndexError):
                self._store.ledger.renew()

    def _sweep(self) -> None:
        while self._store.ledger.sweep():
            pass

    def _is_due(self, what: str, every_s: float) -> bool:
        now = time.monotonic()
        if now < self._due[what]:
            return False
        self._due[what] = now + every_s
        return True
