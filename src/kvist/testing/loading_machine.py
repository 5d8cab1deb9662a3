"""The cache machine with a tier below: blocks come from elsewhere, in parts, damaged, or too late.

Owns the transfers and what they write. Transfers write their words whenever they like until they
are over, so that a block reused under one shows. Needs hypothesis; no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvist.blocks.loading import LoadingRun
from kvist.keys import HashChain, lane_key
from kvist.testing.cache_machine import ROOT, CacheMachine, Holder


@dataclass(slots=True)
class Transfer:
    """A run that is being loaded, for a holder or for nobody any more.

    Attributes
    ----------
    tokens : list of int
        Of the sequence, up to the end of the run at least.
    parts : list of range
        Blocks of the run that are still to arrive.
    """

    run: LoadingRun
    lane: str
    tokens: list[int]
    parts: list[range]
    holder: Holder | None


class LoadingMachine(CacheMachine):
    """What `CacheMachine` does, and loads that are adopted, given up, lost and late."""

    def __init__(self) -> None:
        super().__init__()
        self.transfers: list[Transfer] = []

    @precondition(lambda self: len(self.holders) < 6 and self.cache.enable_prefix_caching)
    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=4, max_size=20),
        head=st.integers(0, 2),
        cut=st.integers(1, 3),
    )
    def load(self, tokens: list[int], head: int, cut: int) -> None:
        """A lower tier has what the device lacks, but for some blocks to be computed before it."""
        cache = self.cache
        chain = HashChain(ROOT, lane_key(ROOT), cache.block_size)
        chain.extend(tokens)
        match = cache.match(chain.keys, len(tokens))
        limit = (len(tokens) - 1) // cache.block_size
        first = len(match.block_ids) + head
        if first >= limit:
            return
        holder = Holder(cache.open_table(), chain, "")
        if self._allocate(holder, match.num_tokens, match) is None:
            cache.release(holder.table)
            return
        holder.tokens = tokens[: match.num_tokens]
        self.holders.append(holder)
        before = cache.stats()
        run = cache.loading.begin(first, chain.keys[first:limit], chain.parent(first), tokens)
        room = cache.num_blocks - len(self._used())
        assert (run is None) == (limit - first > room)
        chain.truncate(match.num_tokens)
        if run is None:
            assert cache.stats() == before
            return
        for block_id in run.block_ids:
            self._wipe(block_id)
        bounds = [*range(0, limit - first, cut), limit - first]
        parts = [range(a, b) for a, b in pairwise(bounds)]
        self.transfers.append(Transfer(run, "", tokens, parts, holder))

    @precondition(lambda self: any(t.parts for t in self.transfers))
    @rule(
        n=st.integers(0, 5),
        parts=st.lists(st.sampled_from((0, 0, 0, 1, 5)), min_size=1, max_size=8),
        lost=st.sampled_from((-1, -1, -1, 0, 1, 4)),
    )
    def arrive(self, n: int, parts: list[int], lost: int) -> None:
        """Parts of a transfer are over; until now it wrote what it liked."""
        under_way = [t for t in self.transfers if t.parts]
        self._arrive(under_way[n % len(under_way)], parts, lost)
        self._forget_transfers()

    def _arrive(self, transfer: Transfer, parts: list[int], lost: int) -> None:
        for part in parts[: len(transfer.parts)]:
            blocks = transfer.parts.pop(part % len(transfer.parts))
            for index in blocks:
                self._land(transfer, index, is_good=index != lost)
            self.cache.loading.arrive(transfer.run, blocks.start, [i != lost for i in blocks])

    @precondition(lambda self: any(t.holder for t in self.transfers))
    @rule(n=st.integers(0, 5), whole=st.booleans())
    def adopt(self, n: int, whole: bool) -> None:
        """The head is computed: what is ready comes behind it, the rest is given up."""
        held = [t for t in self.transfers if t.holder is not None]
        transfer = held[n % len(held)]
        holder, run, size = transfer.holder, transfer.run, self.cache.block_size
        assert holder is not None
        assert holder.chain is not None
        start = run.first * size
        if holder.tokens != transfer.tokens[: len(holder.tokens)] or len(holder.tokens) > start:
            return
        if holder.table.ids.buffer_info()[1] > run.first:
            return  # it reserved more than the head
        if len(holder.tokens) < start:
            allocation = self._allocate(holder, start)
            if allocation is None:
                return
            self._write(holder, allocation, transfer.tokens[len(holder.tokens) : start])
        if whole:
            self._arrive(transfer, [0] * len(transfer.parts), -1)
        ready = run.num_ready
        self.cache.adopt(holder.table, run, ready)
        holder.chain.extend(transfer.tokens[: start + ready * size])
        holder.tokens = transfer.tokens[: start + ready * size]
        transfer.holder = None
        self._forget_transfers()

    # ------------------------------------------------------------------ truth

    def _used(self) -> set[int]:
        used = super()._used()
        for transfer in self.transfers:
            run = transfer.run
            if run.is_open:
                used.update(run.block_ids)
            used.update(run.block_ids[i] for part in transfer.parts for i in part)
        return used

    def _let_go(self, holder: Holder) -> None:
        for transfer in self.transfers:
            if transfer.holder is holder:
                self.cache.loading.close(transfer.run)
                transfer.holder = None
        super()._let_go(holder)
        self._forget_transfers()

    def _land(self, transfer: Transfer, index: int, *, is_good: bool) -> None:
        """Write one block of a run, as the transfer does just before it is over."""
        block_id = transfer.run.block_ids[index]
        start = (transfer.run.first + index) * self.cache.block_size
        for slot in range(self.cache.block_size):
            known = tuple(transfer.tokens[: start + slot + 1])
            self.memory[block_id, slot] = (transfer.lane if is_good else "damaged", known)

    def _forget_transfers(self) -> None:
        self.transfers = [t for t in self.transfers if t.parts or t.holder is not None]

    def teardown(self) -> None:
        """Loads end too before nothing is in use."""
        for transfer in self.transfers:
            if transfer.holder is not None:
                self.cache.loading.close(transfer.run)
            for part in transfer.parts:
                self.cache.loading.arrive(transfer.run, part.start, [False] * len(part))
        self.transfers = []
        super().teardown()
