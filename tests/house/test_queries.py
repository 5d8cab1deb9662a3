"""Queries change nothing: asked twice they say the same, and the books stay as they are."""

from __future__ import annotations

import inspect

import pytest

from kvist.cache import KVCacheManager
from kvist.keys import HashChain, RootKey, lane_key
from kvist.testing.disturbed import RigConfig
from kvist.testing.rig import ROOT, EngineRig

CHANGES = {
    "adopt",
    "evict_ahead",
    "allocate",
    "cancel",
    "commit",
    "fork",
    "open_table",
    "release",
    "reset_prefix_cache",
    "truncate",
}
QUERIES = {
    name
    for name, member in inspect.getmembers(KVCacheManager)
    if not name.startswith("_") and name not in CHANGES
}
KNOWN = {
    "blocks_for",
    "blocks_taken",
    "check",
    "match",
    "num_available_blocks",
    "num_blocks",
    "num_used_blocks",
    "stats",
}


def busy_cache() -> KVCacheManager:
    """Blocks in every state: in use, shared by a fork, cached, free."""
    rig = EngineRig(RigConfig(num_blocks=32, max_num_batched_tokens=40))
    rig.add(tuple(range(13)), 2)
    rig.drain()
    rig.add((*range(9), 50), 9)
    rig.step()
    rig.fork("r1")
    rig.step()
    stats = rig.cache.stats()
    assert stats.num_cached_blocks > 0
    assert stats.num_used_blocks > 0
    assert stats.num_free_blocks > 0
    return rig.cache


def test_every_query_is_asked_below():
    assert QUERIES == KNOWN, "add the new one to CHANGES, or ask it in `ask`"


def ask(cache: KVCacheManager, name: str, root: RootKey) -> str:
    chain = HashChain(root, lane_key(root), cache.block_size)
    chain.extend(range(13))
    match = cache.match(chain.keys, 13)
    assert match.num_tokens == 12
    arguments = {
        "blocks_for": (7,),
        "blocks_taken": (13, match),
        "match": (chain.keys, 13),
        "check": (),
        "stats": (),
    }
    if name in arguments:
        return repr(getattr(cache, name)(*arguments[name]))
    return repr(getattr(cache, name))


def books(cache: KVCacheManager) -> str:
    pool = cache._pool
    return repr(
        (
            cache.stats(),
            [(b.state, b.refs, b.key) for b in pool.blocks],
            pool._free,
            sorted(pool._policy.offered()),
            sorted(pool.index.items()),
            sorted((t.ids.tolist(), t.num_tokens, t.num_sealed, t.copies) for t in cache._tables),
        )
    )


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_asked_twice_a_query_says_the_same_and_changes_nothing(name: str):
    cache = busy_cache()
    before = books(cache)
    first = ask(cache, name, ROOT)
    assert ask(cache, name, ROOT) == first
    assert books(cache) == before
