"""The Redis tier: blocks shared by machines, on a server or a cluster.

Owns its threads, what it knows for a moment, and what becomes of a job. What lies on the servers is
in `layout`, the order of commands in `blocks`, sockets and breakers in `node` and `servers`.

Nothing here waits on the caller's thread. A lookup is RETRY until the answer has come, and that is
remembered for about a second; `delete`, `touch` and `lock` are done behind the scenes. So they say
what was known, not what is: the count of `delete` is of blocks that were hits when last asked for.

The server keeps to its own budget, by its own policy (``maxmemory``); here blocks are given a time
to live, which `touch` renews. A lock renews it too, for as long as it is to hold, and cannot keep
the server from evicting. A store that finds the server full is REFUSED, and so are those of the
next seconds.

A server that is dead, slow or talks nonsense is found out by one exchange that takes
``limit_s`` at most. From then on its blocks are misses at once, until a probe, sent beside all
requests, is answered.

Whoever can write to the server can write blocks: give a tier key where that is not only you.

Threads: the caller's for every call, but `entries`, which waits for servers while it is iterated.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvist.codecs.base import Codec
from kvist.codecs.raw import RawCodec
from kvist.errors import ConfigError, IntegrityError
from kvist.keys import BlockKey
from kvist.tiers.base import (
    NAMESPACE_BYTES,
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
from kvist.tiers.jobs import JobThreads, Report, Ticket
from kvist.tiers.redis.answers import Answers, ShortMemory
from kvist.tiers.redis.blocks import ABSENT, RedisBlocks
from kvist.tiers.redis.layout import CHUNK_BYTES, Header
from kvist.tiers.redis.node import BREAKER_OPEN
from kvist.tiers.redis.servers import RedisServers
from kvist.tiers.redis.survey import memory, scan
from kvist.tiers.redis.talker import Talker
from kvist.tiers.redis.work import RedisWork

DEFAULT_TTL_S = 7 * 86_400.0
DEFAULT_TIMEOUT_S = 1.0
CONFLICT = "namespace_conflict"

_LIMIT_IN_TIMEOUTS = 5
_USAGE_S = 5.0
_WATCH_S = 0.5
_TOUCHES_A_TTL = 10
_TOUCHES_REMEMBERED = 1 << 16

_BREAKER = Lookup(LookupStatus.MISS, reason=BREAKER_OPEN)
_MISS = Lookup(LookupStatus.MISS, reason=ABSENT)
_PENDING = Lookup(LookupStatus.PENDING, reason="being_written")
_RETRY = Lookup(LookupStatus.RETRY, reason="asked")
_CONFLICT = Lookup(LookupStatus.MISS, reason=CONFLICT)


class RedisTier(Tier):
    """Blocks on a server that speaks Redis' protocol, or a cluster of them.

    Parameters
    ----------
    url : str
        ``redis://[user:password@]host:6379[/db]``, ``rediss://`` for TLS, ``unix://path``; options
        of the client library after ``?``. Several hosts with commas between them.
    codec : Codec, optional
        Raw by default.
    tier_key : str
        Secret shared by all who use the server; see `SegmentChecksum`.
    ttl_s : float
        How long a block stays without being of use.
    timeout_s : float
        Of silence on a connection, and of connecting.
    num_threads : int
        For the bytes of jobs.
    chunk_bytes : int
        Longest string that is written.
    name : str
    clock, wall : callable
        Seconds, monotonic, and since 1970.

    Raises
    ------
    ConfigError
        If the URL is none, or a number is not positive. A server that does not answer is no error.
    """

    def __init__(
        self,
        url: str,
        *,
        codec: Codec | None = None,
        tier_key: str = "",
        ttl_s: float = DEFAULT_TTL_S,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        num_threads: int = 2,
        chunk_bytes: int = CHUNK_BYTES,
        name: str = "redis",
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        if not (ttl_s > 0 and timeout_s > 0 and chunk_bytes > 0 and num_threads > 0):
            raise ConfigError(
                f"redis tier: ttl {ttl_s} s, timeout {timeout_s} s, chunks of {chunk_bytes} bytes,"
                f" {num_threads} threads: all must be above 0"
            )
        self.name = name
        self.medium = "remote"
        self._ttl_s = ttl_s
        self._clock = clock
        self._wall = wall
        self._codec = codec if codec is not None else RawCodec()
        self.lossless = self._codec.lossless
        self._spaces: dict[bytes, Namespace] = {}
        self._conflicts: set[bytes] = set()
        self._claimed_s: dict[bytes, float] = {}
        # The caller's thread's: blocks on their way in, by the job that brings them.
        self._pending: dict[bytes, int] = {}
        self._stores: dict[int, list[bytes]] = {}
        self._answers = Answers(clock)
        self._touched: ShortMemory[bool] = ShortMemory(
            _TOUCHES_REMEMBERED, ttl_s / _TOUCHES_A_TTL, clock
        )
        self._deletes: deque[tuple[bytes, tuple[BlockKey, ...]]] = deque()
        self._deleting = threading.Lock()
        self._chores: deque[Callable[[], None]] = deque()
        self._usage = Usage(0, 0, 0)
        self._usage_s = float("-inf")
        limit_s = _LIMIT_IN_TIMEOUTS * timeout_s
        self._servers = RedisServers(url, timeout_s, limit_s, clock, on_down=self._wake_talker)
        checksum = SegmentChecksum(tier_key)
        self._blocks = RedisBlocks(self._servers, self._codec, checksum, ttl_s, chunk_bytes, wall)
        self._work = RedisWork(self._blocks, clock)
        self._waker: Callable[[], None] | None = None
        self._closed = False
        self._threads = JobThreads(name, num_threads, clock)
        watch_every_s = min(timeout_s, _WATCH_S)
        self._talker = Talker(name, self._talk, self._due, self._servers.watch, watch_every_s)

    def open_namespace(self, namespace: Namespace) -> None:
        """See `Tier.open_namespace`. What others say of it on the server is looked at later."""
        known = self._spaces.setdefault(namespace.digest, namespace)
        if known.segment_bytes != namespace.segment_bytes:
            raise ConfigError(
                f"namespace {namespace.digest.hex()[:12]} is open with segments of"
                f" {known.segment_bytes} bytes, not {namespace.segment_bytes}"
            )
        self._claim(namespace)

    def lookup(self, namespace: bytes, keys: Sequence[BlockKey]) -> list[Lookup]:
        """See `Tier.lookup`. RETRY until the server was asked: one round trip to each node."""
        if namespace in self._conflicts:
            return [_CONFLICT] * len(keys)
        unreachable = bool(self._servers.unreachable())
        answers = []
        for key in keys:
            name = namespace + key
            answer = self._answers.get(name)
            if answer is None and name in self._pending:
                answer = _PENDING
            if answer is None:
                if unreachable or self._is_down(namespace, key):
                    answer = _BREAKER
                else:
                    answer = self._answers.ask(name) or _RETRY
            answers.append(answer)
        if _RETRY in answers:
            self._talker.wake()
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
        self._stores[job.job_id] = [
            name
            for name in (job.namespace + key for key in job.keys)
            if self._pending.setdefault(name, job.job_id) == job.job_id
        ]
        self._threads.submit(job, lambda ticket: self._store(ticket, job, space))
        if self._clock() - self._claimed_s[job.namespace] > self._ttl_s / 2:
            self._claim(space)

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
        """See `Tier.set_waker`. Called for answers to lookups too."""
        self._waker = waker
        self._threads.set_waker(waker)

    def lock(self, namespace: bytes, keys: Sequence[BlockKey], ttl_s: float) -> list[bool]:
        """See `Tier.lock`. Lets blocks live for `ttl_s` at least; the server may still evict."""
        known = [self._answers.get(namespace + key) for key in keys]
        there = [answer is not None and answer.status is LookupStatus.HIT for answer in known]
        held = [key for key, hit in zip(keys, there, strict=True) if hit]
        if held:
            self._later(lambda: self._blocks.extend(namespace, held, ttl_s))
        return there

    def unlock(self, namespace: bytes, keys: Sequence[BlockKey]) -> None:
        """See `Tier.unlock`. Nothing to undo: a longer life does no harm."""

    def touch(self, namespace: bytes, keys: Sequence[BlockKey]) -> None:
        """See `Tier.touch`. Renews the time to live, ten times in it at most."""
        due = [key for key in keys if self._touched.get(namespace + key) is None]
        for key in due:
            self._touched.put(namespace + key, True)
        if due:
            self._later(lambda: self._blocks.extend(namespace, due))

    def delete(self, namespace: bytes, keys: Sequence[BlockKey]) -> int:
        """See `Tier.delete`. Behind the scenes; counts those that were last heard of as hits."""
        count = sum(self._answers.deleted(namespace + key, _MISS) for key in keys)
        self._deletes.append((namespace, tuple(keys)))
        self._talker.wake()
        return count

    def entries(self, namespace: bytes) -> Iterator[Entry]:
        """See `Tier.entries`. Waits for the servers, and knows no hits."""
        self._servers.learn()
        now = self._wall()
        for key, header in scan(self._servers, self._blocks, namespace):
            yield Entry(key, header.stored_bytes, max(0.0, now - header.created_s), 0)

    def usage(self) -> Usage:
        """See `Tier.usage`. The memory of the servers, as of some seconds ago; counts no blocks."""
        if self._clock() - self._usage_s > _USAGE_S:
            self._usage_s = self._clock()
            self._later(self._measure)
        return self._usage

    def trouble(self) -> str:
        """See `Tier.trouble`."""
        if self._conflicts:
            return f"{CONFLICT}: another model, or another layout, stored under this identity"
        return self._servers.trouble() or self._talker.trouble

    def drain(self, timeout_s: float) -> bool:
        """See `Tier.drain`. Durable is what the server makes of it."""
        give_up = time.monotonic() + timeout_s
        reached = self._threads.drain(timeout_s)
        return self._talker.drain(max(0.0, give_up - time.monotonic())) and reached

    def close(self) -> None:
        """See `Tier.close`."""
        if self._closed:
            return
        self._closed = True
        self._servers.close()
        self._threads.close()
        self._talker.close()

    # ------------------------------------------------------------------ on the threads for jobs

    def _load(self, ticket: Ticket, job: LoadJob, space: Namespace) -> Report:
        self._servers.learn()
        if job.namespace in self._conflicts:
            return _all(job, Outcome.MISS, CONFLICT)
        self._delete_now()
        report = self._work.load(ticket, job, space)
        for key, outcome in zip(job.keys, report.outcomes, strict=True):
            if outcome in (Outcome.MISS, Outcome.DAMAGED):
                self._answers.gone(job.namespace + key)
        return report

    def _store(self, ticket: Ticket, job: StoreJob, space: Namespace) -> Report:
        self._servers.learn()
        if job.namespace in self._conflicts:
            return _all(job, Outcome.REFUSED, CONFLICT)
        self._delete_now()
        report, sizes = self._work.store(ticket, job, space)
        for key, size in zip(job.keys, sizes, strict=True):
            if size:
                hit = Lookup(LookupStatus.HIT, size, self._codec.lossless)
                self._answers.stored(job.namespace + key, hit)
        return report

    # ------------------------------------------------------------------ on the talker's thread

    def _due(self) -> bool | None:
        """Whether a probe is due; None if no server is down."""
        probe_s = self._servers.probe_s()
        return None if probe_s is None else self._clock() >= probe_s

    def _talk(self) -> None:
        self._servers.learn()
        self._servers.probe()
        self._delete_now()
        self._answer_lookups()
        while self._chores:
            self._chores.popleft()()

    def _answer_lookups(self) -> None:
        wanted = self._answers.wanted()
        by_space: dict[bytes, list[BlockKey]] = {}
        for name in wanted:
            key = BlockKey(name[NAMESPACE_BYTES:])
            by_space.setdefault(name[:NAMESPACE_BYTES], []).append(key)
        for namespace, keys in by_space.items():
            for key, found in zip(keys, self._blocks.headers(namespace, keys), strict=True):
                if isinstance(found, Header):
                    answer = Lookup(LookupStatus.HIT, found.stored_bytes, found.exact)
                else:
                    answer = Lookup(LookupStatus.MISS, reason=found.reason)
                self._answers.heard(namespace + key, answer)
        if wanted and self._waker is not None:
            self._waker()

    def _delete_now(self) -> None:
        """Do the deletes that were asked for, before anything that was asked for later."""
        with self._deleting:
            while self._deletes:
                self._blocks.drop(*self._deletes.popleft())

    def _claim(self, namespace: Namespace) -> None:
        self._claimed_s[namespace.digest] = self._clock()

        def claim() -> None:
            if not self._blocks.claim(namespace):
                self._conflicts.add(namespace.digest)

        self._later(claim)

    def _measure(self) -> None:
        measured = memory(self._servers)
        if measured is not None:
            self._usage = Usage(*measured, 0)

    def _wake_talker(self) -> None:
        self._talker.wake()

    def _later(self, chore: Callable[[], None]) -> None:
        self._chores.append(chore)
        self._talker.wake()

    # ------------------------------------------------------------------ inside

    def _is_down(self, namespace: bytes, key: BlockKey) -> bool:
        node = self._servers.node_for(self._blocks.name(namespace, key))
        return node is not None and node.breaker.is_open

    def _space(self, job: LoadJob | StoreJob) -> Namespace:
        space = self._spaces.get(job.namespace)
        if space is None:
            raise IntegrityError(f"job {job.job_id} names a namespace that is not open")
        return space


def _all(job: LoadJob | StoreJob, outcome: Outcome, reason: str) -> Report:
    report = Report()
    for _ in job.keys:
        report.add(outcome, reason=reason)
    return report
