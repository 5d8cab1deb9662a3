"""The contract of a tier: a place below the device where the bytes of blocks are kept.

Owns the words that cache, transfers and tiers speak with each other, and nothing that runs. A tier
knows opaque keys, opaque bytes and a budget; it knows no model, no tokens and no block tables.

Every call returns at once. Work with bytes is *submitted* as a job and told by `Tier.poll`::

    lookup(namespace, keys) ──▶ HIT · MISS · PENDING · RETRY          (changes nothing)
    submit_load(job) ─┐
    submit_store(job) ┴─▶ threads of the tier ─▶ poll() ─▶ JobDone(job_id, an outcome a key)

A job's buffers belong to the caller and are lent to the tier from `submit` until its `JobDone` was
polled: no block is reused under a transfer, but for those that `StoreJob.lost` names. Everything
that goes wrong with stored bytes (gone, damaged, late, device dead) is an outcome, never an
exception: *a failed load is a miss*.

The contract is kept so that it maps onto the tiers of other engines (vLLM's SecondaryTierManager,
SGLang's HiCacheStorage, LMCache's L2 adapters); `kvist.testing` has a client shaped like each. It
differs in two things: a lookup says why it missed, and a load names the segments it wants.

Threads: one thread, the caller's, makes every call except `set_waker`'s callback, which comes from
the tier's own threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvist.errors import IntegrityError
from kvist.keys import BlockKey

NAMESPACE_BYTES = 32

LOST = "lost"
"""Reason of a store that `StoreJob.lost` came before."""


class LookupStatus(StrEnum):
    """What a tier knows of a key now.

    ======= ====================================================================================
    HIT     whole and readable; may still be gone when it is loaded
    MISS    not there, or not to be used; the reason says which
    PENDING being written: ask again, or compute
    RETRY   the answer is on its way (a server across a network): ask again after the next `poll`
    ======= ====================================================================================
    """

    HIT = "hit"
    MISS = "miss"
    PENDING = "pending"
    RETRY = "retry"


class Outcome(StrEnum):
    """How it went with one key of a job.

    ========= ==================================================================================
    DONE      loaded and verified; or stored and findable
    MISS      a load found nothing
    DAMAGED   a load found bytes that are not what was stored; they are dropped
    LATE      a load was not done by its deadline
    CANCELLED `Tier.cancel` came first, or a store's buffer was lost
    REFUSED   a store was not admitted: policy, budget, quota, or it is there already
    FAILED    the device or server did not do it; the reason says what it said
    ========= ==================================================================================

    After anything but DONE the content of the buffer means nothing.
    """

    DONE = "done"
    MISS = "miss"
    DAMAGED = "damaged"
    LATE = "late"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Namespace:
    """What all blocks of one model, format and tenant have in common. Stored once, beside them.

    Attributes
    ----------
    digest : bytes
        32 bytes: identity. Two namespaces share nothing, whatever their keys.
    model, format : str
        For people; the digest is what counts.
    tenant : str
        Label under which bytes are counted and limited; ``""`` for the default tenant. Not a
        secret: a digest of the salt, never the salt.
    segment_bytes : tuple of int
        Raw length of each segment of a block, in order. A segment is a range of layers; the whole
        block is their concatenation.
    itemsize : int
        Bytes of one stored number, for codecs that work on byte planes.
    """

    digest: bytes
    model: str
    format: str
    tenant: str
    segment_bytes: tuple[int, ...]
    itemsize: int = 2

    @property
    def block_bytes(self) -> int:
        """Raw bytes of a whole block."""
        return sum(self.segment_bytes)

    def span(self, segments: range) -> tuple[int, int]:
        """First byte of these segments in the block, and the first byte behind them."""
        start = sum(self.segment_bytes[: segments.start])
        return start, start + sum(self.segment_bytes[segments.start : segments.stop])

    def check_load(self, job: LoadJob) -> None:
        """Raise `IntegrityError` unless the buffers of a load fit what it asks for."""
        wanted = range(len(self.segment_bytes))[job.segments.start : job.segments.stop]
        if wanted != job.segments or not wanted:
            raise IntegrityError(
                f"load {job.job_id} asks for segments {job.segments} of {len(self.segment_bytes)}"
            )
        start, end = self.span(job.segments)
        _check_buffers(job, end - start)
        if any(buffer.readonly for buffer in job.buffers):
            raise IntegrityError(f"load {job.job_id} lends a buffer that cannot be written")

    def check_store(self, job: StoreJob) -> None:
        """Raise `IntegrityError` unless a store brings whole blocks."""
        _check_buffers(job, self.block_bytes)
        if len(job.meta) != len(job.keys):
            raise IntegrityError(
                f"store {job.job_id} has {len(job.keys)} keys and {len(job.meta)} meta"
            )


@dataclass(frozen=True, slots=True)
class Lookup:
    """Answer for one key.

    Attributes
    ----------
    status : LookupStatus
    stored_bytes : int
        What a load would read, after encoding; 0 unless HIT.
    exact : bool
        False for a copy that a lossy codec made.
    reason : str
        Why not HIT, in the words of `Tier`'s events: ``"absent"``, ``"breaker_open"``, ...
    """

    status: LookupStatus
    stored_bytes: int = 0
    exact: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """What is known of a block besides its bytes, for eviction and for `Tier.entries`.

    `recompute_s` is what computing it again would take, 0 where unknown.
    """

    parent: bytes = b""
    depth: int = 0
    recompute_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class LoadJob:
    """Read blocks into memory of the caller.

    Attributes
    ----------
    job_id : int
        Chosen by the caller, not in use in this tier.
    namespace : bytes
        Digest of an open namespace.
    keys : tuple of BlockKey
        In the order in which they are wanted: head first.
    segments : range
        Which segments of each block.
    buffers : tuple of memoryview
        One writable, contiguous view of bytes a key, exactly as long as these segments are raw.
    deadline_s : float or None
        On the clock of the tier (monotonic): keys not read by then are LATE.
    allow_lossy : bool
        Whether a copy that a lossy codec made will do; else it is a MISS, whatever a lookup said
        when another copy was there.
    """

    job_id: int
    namespace: bytes
    keys: tuple[BlockKey, ...]
    segments: range
    buffers: tuple[memoryview, ...]
    deadline_s: float | None = None
    allow_lossy: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class StoreJob:
    """Keep copies of whole blocks.

    Attributes
    ----------
    job_id : int
    namespace : bytes
    keys : tuple of BlockKey
        Parents before children.
    buffers : tuple of memoryview
        One contiguous view of bytes a key: the whole block, raw. Read only.
    meta : tuple of BlockMeta
        One a key.
    lost : container of BlockKey
        Keys whose buffers have, or will soon have, other bytes in them. It grows while the job is
        under way, always before the bytes change: who looks after the last byte was read knows
        whether all of them were the block's. Empty unless `Tier.reads_in_place`.
    """

    job_id: int
    namespace: bytes
    keys: tuple[BlockKey, ...]
    buffers: tuple[memoryview, ...]
    meta: tuple[BlockMeta, ...]
    lost: Container[BlockKey] = frozenset()


def _check_buffers(job: LoadJob | StoreJob, nbytes: int) -> None:
    if len(job.buffers) != len(job.keys):
        raise IntegrityError(
            f"job {job.job_id} has {len(job.keys)} keys and {len(job.buffers)} buffers"
        )
    for buffer in job.buffers:
        if buffer.nbytes != nbytes or buffer.itemsize != 1 or not buffer.c_contiguous:
            raise IntegrityError(
                f"job {job.job_id} lends {buffer.nbytes} bytes in items of {buffer.itemsize};"
                f" {nbytes} contiguous single bytes are due"
            )


@dataclass(frozen=True, slots=True)
class JobDone:
    """A job is over and its buffers are the caller's again.

    Attributes
    ----------
    outcomes : tuple of Outcome
        One a key.
    stored_bytes : int
        Bytes that went to or came from the device, after encoding.
    seconds : float
        From the start of the work, not from `submit`.
    reason : str
        Of the first outcome that is not DONE.
    """

    job_id: int
    outcomes: tuple[Outcome, ...]
    stored_bytes: int = 0
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """One block in a tier, for people: `Tier.entries`."""

    key: BlockKey
    stored_bytes: int
    age_s: float
    hits: int


@dataclass(frozen=True, slots=True)
class Usage:
    """How full a tier is. `used_bytes` counts all it occupies, index and journals included."""

    capacity_bytes: int
    used_bytes: int
    num_blocks: int
    by_tenant: dict[str, int] = field(default_factory=dict)


class Tier(ABC):
    """A place for copies of blocks. See the module's description for the rules of its calls."""

    name: str
    """Unique in a process and short, such as ``"disk"``: events and metrics bear it."""

    medium: str
    """``"host"``, ``"disk"`` or ``"remote"``: what kind of cost a load has."""

    lossless: bool = True
    """Whether copies made from now on are bit for bit what they are copies of."""

    reads_in_place: bool = False
    """Whether it looks at `StoreJob.lost` between reading a block and letting it be found.

    If so, stores lend it the blocks themselves and not copies of them.
    """

    @abstractmethod
    def open_namespace(self, namespace: Namespace) -> None:
        """Make a namespace usable; doing it again is harmless. To be done before any other call.

        Raises
        ------
        ConfigError
            If the tier holds that digest with other segment lengths: an identity that lies.
        """

    @abstractmethod
    def lookup(self, namespace: bytes, keys: Sequence[BlockKey]) -> list[Lookup]:
        """Say for each key what is known of it now. Changes neither order nor counts. O(keys)."""

    @abstractmethod
    def submit_load(self, job: LoadJob) -> None:
        """Begin to read.

        Raises
        ------
        IntegrityError
            If the buffers do not fit what is asked for, or the namespace is not open.
        """

    @abstractmethod
    def submit_store(self, job: StoreJob) -> None:
        """Begin to keep. Never waits for room: what is not admitted is REFUSED.

        Raises
        ------
        IntegrityError
            If the buffers are no whole blocks, or the namespace is not open.
        """

    @abstractmethod
    def cancel(self, job_id: int) -> None:
        """Ask a job to end early. Its `JobDone` still comes, and only then its buffers are free."""

    @abstractmethod
    def poll(self) -> list[JobDone]:
        """Return the jobs that ended since the last call."""

    def set_waker(self, waker: Callable[[], None]) -> None:  # noqa: B027 - optional by contract
        """Let `waker` be called, from a thread of the tier, when `poll` has something to tell."""

    @abstractmethod
    def lock(self, namespace: bytes, keys: Sequence[BlockKey], ttl_s: float) -> list[bool]:
        """Keep blocks from being evicted for a while; say which were there to be kept."""

    @abstractmethod
    def unlock(self, namespace: bytes, keys: Sequence[BlockKey]) -> None:
        """Undo one `lock` of each key. Unknown keys are ignored: a lock may have run out."""

    @abstractmethod
    def touch(self, namespace: bytes, keys: Sequence[BlockKey]) -> None:
        """Tell that blocks were of use just now, head first. Unknown keys are ignored."""

    @abstractmethod
    def delete(self, namespace: bytes, keys: Sequence[BlockKey]) -> int:
        """Drop blocks; return how many were there. A block being read goes when that is done."""

    @abstractmethod
    def entries(self, namespace: bytes) -> Iterator[Entry]:
        """Iterate over what a namespace holds, as of about now."""

    @abstractmethod
    def usage(self) -> Usage:
        """Say how full the tier is."""

    def trouble(self) -> str:
        """Say, for people, what keeps the tier from working now; ``""`` if nothing does."""
        return ""

    @abstractmethod
    def drain(self, timeout_s: float) -> bool:
        """Wait until every job is over and durable; say whether that was reached in time."""

    @abstractmethod
    def close(self) -> None:
        """Cancel what is under way, wait for it, and let go of files, sockets and threads."""

    def check(self) -> None:  # noqa: B027 - a tier without books of its own has nothing to check
        """Raise `IntegrityError` unless the books of the tier hold. For tests and idle moments."""
