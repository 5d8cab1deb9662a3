"""Random histories of a tier, held against a set of names. Knows no tier by name."""

from __future__ import annotations

from kvist.keys import BlockKey
from kvist.testing.tier_driver import TierDriver, block_bytes, block_key
from kvist.tiers.base import BlockMeta, Namespace

STEPS = ("store", "load", "delete", "lock", "unlock", "touch", "cancel", "wait")
NUM_KEYS = 24

Step = tuple[str, Namespace, list[int]]
"""What to do, where, and with which blocks, by number below `NUM_KEYS`."""


class History:
    """Plays a random history on a tier and holds it against a set of names."""

    def __init__(self, driver: TierDriver) -> None:
        self.driver = driver
        self.under_way: dict[int, tuple[Namespace, list[BlockKey], list[bytearray] | None]] = {}
        self.submitted: set[tuple[bytes, BlockKey]] = set()

    def play(self, steps: list[Step], spaces: tuple[Namespace, ...]) -> None:
        """Play the steps in `spaces`, finish what is under way, and look at what is left."""
        tier = self.driver.tier
        for what, namespace, indexes in steps:
            keys = [block_key(index) for index in indexes]
            if what == "store":
                blocks = {key: self.content(namespace, key) for key in keys}
                job_id = self.driver.begin_store(namespace, blocks, [BlockMeta() for _ in keys])
                self.under_way[job_id] = (namespace, keys, None)
                self.submitted |= {(namespace.digest, key) for key in keys}
            elif what == "load":
                job_id, wholes = self.driver.begin_load(namespace, keys)
                self.under_way[job_id] = (namespace, keys, wholes)
            elif what == "delete":
                tier.delete(namespace.digest, keys)
            elif what == "lock":
                tier.lock(namespace.digest, keys, 0.01)
            elif what == "unlock":
                tier.unlock(namespace.digest, keys)
            elif what == "touch":
                tier.touch(namespace.digest, keys)
            elif what == "cancel":
                for job_id in list(self.under_way)[:1]:
                    tier.cancel(job_id)
            else:
                self.finish()
        self.finish()
        everything = [block_key(index) for index in range(NUM_KEYS)]
        for namespace in spaces:
            hits = self.driver.hits(namespace, everything)
            there = [key for key, hit in zip(everything, hits, strict=True) if hit]
            assert {(namespace.digest, key) for key in there} <= self.submitted
            job_id, wholes = self.driver.begin_load(namespace, there)
            self.under_way[job_id] = (namespace, there, wholes)
            self.finish(must_hit=True)
        tier.check()

    def finish(self, must_hit: bool = False) -> None:
        """Wait for every job and look at what it brought."""
        for job_id, (namespace, keys, wholes) in self.under_way.items():
            done = self.driver.wait(job_id)
            assert len(done.outcomes) == len(keys)
            if wholes is None:
                continue
            for key, got in zip(keys, self.driver.taken(done, wholes), strict=True):
                if isinstance(got, bytes):
                    assert got == self.content(namespace, key), "bytes of another block"
                    assert (namespace.digest, key) in self.submitted
                else:
                    assert not must_hit, f"{got} for a block that is a hit and nobody disturbs"
        self.under_way.clear()
        usage = self.driver.tier.usage()
        assert usage.used_bytes <= usage.capacity_bytes

    @staticmethod
    def content(namespace: Namespace, key: BlockKey) -> bytes:
        """Return what a block holds: another thing in every namespace."""
        return block_bytes(
            BlockKey(bytes(a ^ b for a, b in zip(key, namespace.digest, strict=True)))
        )
