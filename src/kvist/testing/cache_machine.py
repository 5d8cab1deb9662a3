"""A state machine over `KVCacheManager` alone, against lists of tokens.

Owns the plain truth about tables: which tokens each holds, and who could find them. The bytes are
stood in for by one word a slot, the tokens up to and including it, so that a block reused too early
or a copy left out shows at once. `kvist.testing.loading_machine` adds transfers. Needs hypothesis;
no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvist.blocks.table import BlockTable
from kvist.cache import NO_MATCH, Allocation, KVCacheManager, PrefixMatch
from kvist.events import BlockEvicted, BlockStored, Event, EventLog
from kvist.keys import BlockKey, HashChain, RootKey, lane_key
from kvist.policies.registry import POLICIES, make_policy

ROOT = RootKey(bytes(32))
_Word = tuple[str, tuple[int, ...]]


@dataclass(slots=True)
class Holder:
    """One table and what it must hold.

    Attributes
    ----------
    lane : str
        Salt. ``"hidden"`` has no chain: its blocks are never to be found.
    promised : int
        Tokens up to which it may write in the step that is in flight.
    """

    table: BlockTable
    chain: HashChain | None
    lane: str
    tokens: list[int] = field(default_factory=list)
    promised: int = 0


class CacheMachine(RuleBasedStateMachine):
    """Tables grow, fork, shrink and go; every slot must hold what its table thinks it holds."""

    cache: KVCacheManager

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.sampled_from((1, 2, 4)),
        caching=st.sampled_from((True, True, True, False)),
        policy=st.sampled_from(sorted(POLICIES)),
    )
    def build(self, num_blocks: int, block_size: int, caching: bool, policy: str) -> None:
        """Choose the sizes."""
        events = EventLog()
        self.cache = KVCacheManager(
            num_blocks,
            block_size,
            make_policy(policy, num_blocks),
            events,
            enable_prefix_caching=caching,
        )
        self.memory: dict[tuple[int, int], _Word] = {}
        self.findable: dict[BlockKey, int] = {}
        self.holders: list[Holder] = []
        events.subscribe(self._witness)

    def _witness(self, event: Event) -> None:
        if isinstance(event, BlockStored):
            assert event.key not in self.findable, "one key, two blocks"
            assert event.block_id not in self.findable.values()
            self.findable[event.key] = event.block_id
        elif isinstance(event, BlockEvicted):
            assert self.findable.pop(event.key) == event.block_id

    def _has_holders(self) -> bool:
        return bool(self.holders)

    def _pick(self, n: int) -> Holder:
        return self.holders[n % len(self.holders)]

    def _used(self) -> set[int]:
        """Blocks that anybody refers to."""
        tables = [h.table for h in self.holders]
        sources = {source for table in tables for _, source in table.copies}
        return sources.union(*(table.ids for table in tables))

    # ------------------------------------------------------------------ rules

    @precondition(lambda self: len(self.holders) < 6)
    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        lane=st.sampled_from(("", "", "", "other", "hidden")),
        written=st.integers(0, 20),
        reserved=st.integers(0, 6),
        fails=st.sampled_from((False, False, False, True)),
    )
    def open(self, tokens: list[int], lane: str, written: int, reserved: int, fails: bool) -> None:
        """Match a prompt, take room for some of it or more than it, and write that."""
        chain = None
        match = NO_MATCH
        if lane != "hidden":
            chain = HashChain(ROOT, lane_key(ROOT, salt=lane), self.cache.block_size)
            chain.extend(tokens)
            match = self.cache.match(chain.keys, len(tokens))
            self._check_match(match, chain, len(tokens))
        written = max(match.num_tokens + 1, min(written, len(tokens)))
        if chain is not None:
            # What comes behind the written tokens may be others than the prompt's.
            chain.truncate(written)
        holder = Holder(self.cache.open_table(), chain, lane)
        allocation = self._allocate(holder, written + reserved, match)
        if allocation is None:
            self.cache.release(holder.table)
            return
        self.holders.append(holder)
        holder.tokens = tokens[: match.num_tokens]
        self._check_holder(holder)
        if fails:
            self._do(holder, allocation, [9] * (written - match.num_tokens))
            self.cache.cancel(holder.table, allocation)
            self._check_holder(holder)
            self.cache.release(holder.table)
            self.holders.remove(holder)
            return
        self._write(holder, allocation, tokens[match.num_tokens : written])

    @precondition(_has_holders)
    @rule(
        n=st.integers(0, 5),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        reserved=st.sampled_from((0, 0, 5)),
    )
    def grow(self, n: int, tokens: list[int], reserved: int) -> None:
        """Write more tokens behind a table's own."""
        holder = self._pick(n)
        allocation = self._allocate(holder, len(holder.tokens) + len(tokens) + reserved)
        if allocation is not None:
            self._write(holder, allocation, tokens)

    @precondition(_has_holders)
    @rule(n=st.integers(0, 5), more=st.integers(0, 9), release=st.booleans())
    def cancel(self, n: int, more: int, release: bool) -> None:
        """Reserve, write rubbish, and take it back; or let go in the middle of it."""
        holder = self._pick(n)
        table = holder.table
        before = (self.cache.num_available_blocks, table.ids.tobytes(), table.num_sealed)
        allocation = self._allocate(holder, len(holder.tokens) + more)
        if allocation is None:
            return
        self._do(holder, allocation, [9] * more)
        if release:
            self._let_go(holder)
            return
        self.cache.cancel(table, allocation)
        after = (self.cache.num_available_blocks, table.ids.tobytes(), table.num_sealed)
        assert after == before

    @precondition(_has_holders)
    @rule(
        order=st.permutations(range(6)),
        tokens=st.lists(
            st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=6, max_size=6
        ),
        ends=st.one_of(
            st.just(("commit",) * 6),
            st.just(("cancel",) * 6),
            st.lists(
                st.sampled_from(("commit", "cancel", "release", "preempt")), min_size=6, max_size=6
            ),
        ),
        written=st.booleans(),
    )
    def step(
        self, order: list[int], tokens: list[list[int]], ends: list[str], written: bool
    ) -> None:
        """Several reserve before any writes; then each is recorded, taken back, or goes away.

        ``"preempt"``: before it reserves, who did so first is sent away; then it is recorded.
        """
        flight: list[tuple[Holder, Allocation, list[int], str]] = []
        for holder, new, end in [
            (self.holders[n], tokens[n], ends[n]) for n in order if n < len(self.holders)
        ]:
            if end == "preempt" and flight:
                self._let_go(flight.pop(0)[0])
            promised = len(holder.tokens) + len(new)
            allocation = self._allocate(holder, promised)
            if allocation is not None:
                holder.promised = promised
                flight.append((holder, allocation, new, end))
        self.cache.check()
        written = written or "commit" in ends or "preempt" in ends
        for _, allocation, _, _ in flight:
            if written:
                self._copy(allocation)
        for holder, _, new, end in flight:
            if written:
                self._fill(holder, new if end in ("commit", "preempt") else [9] * len(new))
        for holder, allocation, new, end in flight:
            holder.promised = 0
            if end in ("commit", "preempt"):
                self._record(holder, new)
            elif end == "cancel":
                self.cache.cancel(holder.table, allocation)
            else:
                self._let_go(holder)
            self.cache.check()

    @precondition(lambda self: 0 < len(self.holders) < 6)
    @rule(n=st.integers(0, 5))
    def fork(self, n: int) -> None:
        """A second table over the same tokens takes no room."""
        parent = self._pick(n)
        before = self.cache.num_available_blocks
        table = self.cache.fork(parent.table)
        assert self.cache.num_available_blocks == before
        chain = parent.chain.fork() if parent.chain else None
        self.holders.append(Holder(table, chain, parent.lane, list(parent.tokens)))

    @precondition(_has_holders)
    @rule(n=st.integers(0, 5), keep=st.integers(0, 30))
    def truncate(self, n: int, keep: int) -> None:
        """Forget the last tokens."""
        holder = self._pick(n)
        keep %= len(holder.tokens) + 1
        self.cache.truncate(holder.table, keep)
        if holder.chain is not None:
            holder.chain.truncate(keep)
        del holder.tokens[keep:]

    @precondition(_has_holders)
    @rule(n=st.integers(0, 5))
    def release(self, n: int) -> None:
        """Let go of a table."""
        self._let_go(self._pick(n))

    def _let_go(self, holder: Holder) -> None:
        self.cache.release(holder.table)
        self.holders.remove(holder)

    @rule()
    def reset(self) -> None:
        """Forget what nobody uses."""
        used = self.cache.num_used_blocks
        self.cache.reset_prefix_cache()
        assert self.cache.num_used_blocks == used
        assert self.cache.num_available_blocks == self.cache.stats().num_free_blocks

    # ------------------------------------------------------------------ truth

    @invariant()
    def books_agree(self) -> None:
        """The books hold, every slot has its token, and queries changed nothing."""
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        cache.check()
        used = self._used()
        stats = cache.stats()
        assert stats == cache.stats()
        assert stats.num_used_blocks == len(used) == cache.num_used_blocks
        assert stats.filled_slots <= stats.allocated_slots == len(used) * cache.block_size
        for holder in self.holders:
            assert holder.table.num_tokens == len(holder.tokens)
            self._check_holder(holder)

    def _check_holder(self, holder: Holder) -> None:
        for position in range(len(holder.tokens)):
            word = (holder.lane, tuple(holder.tokens[: position + 1]))
            assert self.memory.get(self._slot(holder.table, position)) == word, (
                f"{holder.table!r} reads {self.memory.get(self._slot(holder.table, position))}"
                f" at {position}, wrote {word}"
            )

    def _check_match(self, match: PrefixMatch, chain: HashChain, num_tokens: int) -> None:
        """The longest run of findable keys that leaves a token to compute."""
        expected = []
        for key in chain.keys[: (num_tokens - 1) // self.cache.block_size]:
            if key not in self.findable:
                break
            expected.append(self.findable[key])
        assert match.block_ids == tuple(expected)
        assert match.num_tokens == len(expected) * self.cache.block_size < num_tokens

    def _allocate(
        self, holder: Holder, num_tokens: int, match: PrefixMatch = NO_MATCH
    ) -> Allocation | None:
        """Allocate, and see that room is refused exactly when there is none."""
        cache, table = self.cache, holder.table
        used = self._used()
        kept = table.ids if not match.block_ids else match.block_ids
        need = max(0, cache.blocks_for(num_tokens) - len(kept))
        need += sum(block_id not in used for block_id in match.block_ids)
        need += self._must_copy(holder, num_tokens)
        before = cache.stats()
        allocation = cache.allocate(table, num_tokens, match)
        assert (allocation is None) == (need > cache.num_blocks - len(used))
        if allocation is None:
            assert cache.stats() == before
            return None
        assert len(table.ids) >= cache.blocks_for(num_tokens)
        for block_id in allocation.fresh:
            self._wipe(block_id)
        return allocation

    def _wipe(self, block_id: int) -> None:
        """A block is handed out: nothing in it means anything."""
        for slot in range(self.cache.block_size):
            self.memory.pop((block_id, slot), None)

    def _must_copy(self, holder: Holder, num_tokens: int) -> bool:
        """Whether the next token falls where others hold one, or will, or into what is findable."""
        tokens, size = holder.table.num_tokens, self.cache.block_size
        if num_tokens <= tokens or tokens % size == 0:
            return False
        index = tokens // size
        block_id = holder.table.ids[index]
        if block_id in self.findable.values():
            return True
        for other in self.holders:
            if other is holder:
                continue
            if block_id in other.table.ids and max(len(other.tokens), other.promised) > tokens:
                return True
            if (index, block_id) in other.table.copies and len(other.tokens) > tokens:
                return True  # should its step fail, it reads that block again
        return False

    def _do(self, holder: Holder, allocation: Allocation, tokens: list[int]) -> None:
        """What a runner does: the copies, then the new slots."""
        self._copy(allocation)
        self._fill(holder, tokens)

    def _copy(self, allocation: Allocation) -> None:
        for copy in allocation.copies:
            for slot in range(self.cache.block_size):
                word = self.memory.get((copy.source, slot))
                if word is not None:
                    self.memory[copy.target, slot] = word

    def _fill(self, holder: Holder, tokens: list[int]) -> None:
        known = list(holder.tokens)
        for token in tokens:
            known.append(token)
            slot_of = self._slot(holder.table, len(known) - 1)
            self.memory[slot_of] = (holder.lane, tuple(known))

    def _write(self, holder: Holder, allocation: Allocation, tokens: list[int]) -> None:
        self._do(holder, allocation, tokens)
        self._record(holder, tokens)

    def _record(self, holder: Holder, tokens: list[int]) -> None:
        holder.tokens.extend(tokens)
        full = self.cache.commit(holder.table, len(holder.tokens), holder.tokens, holder.chain)
        assert full == len(holder.tokens) // self.cache.block_size

    def _slot(self, table: BlockTable, position: int) -> tuple[int, int]:
        block, slot = divmod(position, self.cache.block_size)
        return table.ids[block], slot

    def teardown(self) -> None:
        """When all have let go nothing is in use."""
        if not hasattr(self, "cache"):
            return
        for holder in self.holders:
            self.cache.release(holder.table)
        assert self.cache.num_used_blocks == 0
        self.cache.check()
