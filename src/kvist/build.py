"""The one assembly of the cache: knows every concrete class below it.

The engine's own assembly, which adds model, runner and scheduler, is `kvist.engine.assemble`.
"""

from __future__ import annotations

from kvist.cache import KVCacheManager
from kvist.config import CacheConfig
from kvist.events import EventLog
from kvist.policies.registry import make_policy


def open_cache(config: CacheConfig, events: EventLog | None = None) -> KVCacheManager:
    """Build the books of a cache.

    Parameters
    ----------
    config : CacheConfig
    events : EventLog, optional
        Told what happens; a log of its own when left out.

    Raises
    ------
    ConfigError
        For an unknown policy.
    """
    return KVCacheManager(
        config.num_blocks,
        config.block_size,
        make_policy(config.eviction_policy, config.num_blocks),
        events if events is not None else EventLog(),
        enable_prefix_caching=config.enable_prefix_caching,
    )
