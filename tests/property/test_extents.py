"""The arena against a set of integers: nothing is given twice, nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvist.errors import IntegrityError
from kvist.tiers.extents import EXTENT_BYTES, ExtentArena, Run, extents_for


def extents_of(runs: tuple[Run, ...]) -> set[int]:
    return {extent for start, length in runs for extent in range(start, start + length)}


class ArenaMachine(RuleBasedStateMachine):
    """Records come and go, some placed by somebody else."""

    @initialize(size=st.integers(0, 40))
    def make(self, size: int) -> None:
        self.arena = ExtentArena(size)
        self.free = set(range(size))
        self.records: list[tuple[Run, ...]] = []

    @rule(count=st.integers(1, 20), max_runs=st.none() | st.integers(1, 4))
    def allocate(self, count: int, max_runs: int | None) -> None:
        runs = self.arena.allocate(count, max_runs)
        if runs is None:
            assert count > len(self.free) or max_runs is not None
            return
        assert max_runs is None or len(runs) <= max_runs
        extents = extents_of(runs)
        assert len(extents) == count
        assert extents <= self.free
        self.free -= extents
        self.records.append(runs)

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        runs = self.records.pop(data.draw(st.integers(0, len(self.records) - 1)))
        self.arena.release(runs)
        self.free |= extents_of(runs)
        with pytest.raises(IntegrityError):
            self.arena.release(runs)

    @rule(start=st.integers(0, 45), length=st.integers(1, 6))
    def claim(self, start: int, length: int) -> None:
        wanted = extents_of(((start, length),))
        if wanted <= self.free:
            self.arena.claim([(start, length)])
            self.free -= wanted
            self.records.append(((start, length),))
        else:
            with pytest.raises(IntegrityError):
                self.arena.claim([(start, length)])

    @invariant()
    def books_hold(self) -> None:
        if hasattr(self, "arena"):
            self.arena.check(self.records)
            assert self.arena.num_free == len(self.free)
            assert self.arena.num_used == self.arena.num_extents - len(self.free)


TestArena = ArenaMachine.TestCase


def test_records_stay_whole_where_a_hole_is_long_enough() -> None:
    arena = ExtentArena(64)
    first, second = arena.allocate(12), arena.allocate(12)
    assert first == ((0, 12),)
    assert second == ((12, 12),)
    arena.release(first)
    assert arena.allocate(12) == first  # not cut from the long hole behind
    assert arena.allocate(40) == ((24, 40),)


def test_a_full_room_of_scattered_holes_still_takes_a_record() -> None:
    arena = ExtentArena(32)
    singles = [arena.allocate(1) for _ in range(32)]
    for runs in singles[::2]:
        assert runs is not None
        arena.release(runs)
    assert arena.allocate(16, max_runs=15) is None
    assert arena.num_free == 16
    runs = arena.allocate(16)
    assert runs is not None
    assert len(runs) == 16
    assert arena.num_free == 0


def test_check_sees_an_extent_of_nobody_and_one_of_two() -> None:
    arena = ExtentArena(8)
    runs = arena.allocate(3)
    assert runs is not None
    with pytest.raises(IntegrityError, match=r"0\.\.2 belong to nobody"):
        arena.check([])
    with pytest.raises(IntegrityError, match="belong to two"):
        arena.check([runs, ((2, 1),)])


def test_bytes_to_extents() -> None:
    assert [extents_for(n) for n in (0, 1, EXTENT_BYTES, EXTENT_BYTES + 1)] == [1, 1, 1, 2]
