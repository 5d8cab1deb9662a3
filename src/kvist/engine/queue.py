"""The waiting room: who is next, and who waits for another's prefix.

Owns the order of waiting sequences and the promises of running ones. Knows neither room nor budget.
Threads: step thread only.

A running sequence *promises* the keys of the blocks it is about to fill. A waiting sequence whose
next missing block is promised *follows*: it is parked on the last key of the promised run, so that
it is looked at once, when that block is sealed or its promise falls, and not in every step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence

from kvist.engine.sequence import Sequence as KVSequence
from kvist.engine.sequence import SequenceStatus
from kvist.errors import IntegrityError
from kvist.keys import BlockKey


class OrderedSequences:
    """Sequences in the order in which they should run.

    Parameters
    ----------
    by_priority : bool
        Order by (priority, arrival) instead of arrival.

    Notes
    -----
    A sorted list: O(log n) comparisons and a memmove a change, which for thousands of entries is
    quicker than any tree in Python.
    """

    def __init__(self, *, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._list: list[KVSequence] = []

    def _order(self, seq: KVSequence) -> tuple[int, int]:
        return (seq.priority if self._by_priority else 0, seq.arrival)

    def __len__(self) -> int:
        return len(self._list)

    def __iter__(self) -> Iterator[KVSequence]:
        return iter(self._list)

    def add(self, seq: KVSequence) -> None:
        """Put a sequence in its place."""
        insort(self._list, seq, key=self._order)

    def remove(self, seq: KVSequence) -> None:
        """Take a sequence out.

        Raises
        ------
        IntegrityError
            If it is not there.
        """
        index = bisect_left(self._list, self._order(seq), key=self._order)
        if index == len(self._list) or self._list[index] is not seq:
            raise IntegrityError(f"{seq!r} is not in its place")
        del self._list[index]

    def victim(self) -> KVSequence:
        """The one that should give its blocks up. REQUIRES there is one.

        The last, except that one which was preempted before and has said nothing since is left
        alone while another can go, whatever the ranks: else it could read its prompt again and
        again and never answer. What that costs a higher rank is one turn, until the lower one has
        said a token. The guarantee is ours; vLLM always takes the last.
        """
        return next((s for s in reversed(self._list) if not s.owes_a_token), self._list[-1])

    def check(self) -> None:
        """Raise `IntegrityError` unless the order holds."""
        orders = [self._order(seq) for seq in self._list]
        if orders != sorted(orders):
            raise IntegrityError(f"out of order: {self._list!r}")


class WaitingQueue:
    """Waiting sequences in order, and those that follow another.

    Parameters
    ----------
    by_priority : bool
        See `OrderedSequences`.
    """

    def __init__(self, *, by_priority: bool) -> None:
        self._queue = OrderedSequences(by_priority=by_priority)
        self._followers: dict[BlockKey, list[KVSequence]] = {}
        self._parked: dict[str, BlockKey] = {}
        self._promises: dict[BlockKey, KVSequence] = {}

    def __len__(self) -> int:
        return len(self._queue) + len(self._parked)

    def __iter__(self) -> Iterator[KVSequence]:
        """Iterate over the sequences that may run now, first one first. A snapshot."""
        return iter(tuple(self._queue))

    @property
    def num_following(self) -> int:
        """Sequences that wait for the prefix of another."""
        return len(self._parked)

    def everyone(self) -> Iterator[KVSequence]:
        """Iterate over all that wait, in no order. REQUIRES no change meanwhile."""
        yield from self._queue
        for followers in self._followers.values():
            yield from followers

    def push(self, seq: KVSequence) -> None:
        """Put a sequence in its place."""
        seq.status = SequenceStatus.WAITING
        self._queue.add(seq)

    def remove(self, seq: KVSequence) -> None:
        """Take a waiting or following sequence out."""
        key = self._parked.pop(seq.request_id, None)
        if key is not None:
            followers = self._followers[key]
            followers.remove(seq)
            if not followers:
                del self._followers[key]
            return
        self._queue.remove(seq)

    # ------------------------------------------------------------------ following

    def promise(self, seq: KVSequence, first: int, last: int) -> None:
        """Announce that `seq` will fill its blocks ``first .. last - 1``.

        Blocks that another one promised already stay with that one.
        """
        if seq.chain is None:
            return
        seq.promised = range(first, last)
        for key in seq.chain.keys[first:last]:
            self._promises.setdefault(key, seq)

    def fulfil(self, seq: KVSequence, num_full: int) -> None:
        """The first `num_full` blocks of `seq` are sealed: wake who waited for them."""
        done = range(seq.promised.start, min(num_full, seq.promised.stop))
        if done:
            self._drop_promises(seq, done)
            seq.promised = range(done.stop, seq.promised.stop)

    def break_promises(self, seq: KVSequence) -> None:
        """`seq` stops before it filled what it promised: wake who waited for it."""
        self._drop_promises(seq, seq.promised)
        seq.promised = range(0)

    def leader_key(self, keys: Sequence[BlockKey], first: int, limit: int) -> BlockKey | None:
        """Return the last key of the run of promised blocks that starts at `first`, or ``None``."""
        last = None
        for index in range(first, min(limit, len(keys))):
            if keys[index] not in self._promises:
                break
            last = keys[index]
        return last

    def follow(self, seq: KVSequence, key: BlockKey) -> None:
        """Park a waiting sequence until the block `key` is sealed or its promise falls."""
        self.remove(seq)
        seq.status = SequenceStatus.FOLLOWING
        self._parked[seq.request_id] = key
        self._followers.setdefault(key, []).append(seq)

    def _drop_promises(self, seq: KVSequence, blocks: range) -> None:
        if seq.chain is None:
            return
        for key in seq.chain.keys[blocks.start : blocks.stop]:
            if self._promises.get(key) is seq:
                del self._promises[key]
                for follower in self._followers.pop(key, ()):
                    del self._parked[follower.request_id]
                    self.push(follower)

    # ------------------------------------------------------------------ check

    def check(self, running: Iterable[KVSequence]) -> None:
        """Raise `IntegrityError` unless order, parking and promises agree."""
        self._queue.check()
        for seq in self._queue:
            if seq.status is not SequenceStatus.WAITING or seq.table is not None:
                raise IntegrityError(f"in the waiting queue: {seq!r}")
        parked = [s.request_id for group in self._followers.values() for s in group]
        if sorted(parked) != sorted(self._parked):
            raise IntegrityError(f"parked {sorted(self._parked)}, following {sorted(parked)}")
        for key in self._followers:
            if key not in self._promises:
                raise IntegrityError(f"followers of {key.hex()[:8]}, which nobody promises")
        leaders = {seq.request_id for seq in self._promises.values()}
        if not leaders <= {seq.request_id for seq in running}:
            raise IntegrityError("a promise of a sequence that is not running")
