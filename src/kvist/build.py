"""The one assembly of the cache: knows every concrete class below it.

The engine's own assembly, which adds model, runner and scheduler, is `kvist.engine.assemble`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvist.cache import KVCacheManager
from kvist.codecs.registry import make_codec
from kvist.config import CacheConfig
from kvist.errors import ConfigError
from kvist.events import EventLog
from kvist.policies.keeper import Keeper
from kvist.policies.registry import DEFAULT_POLICY, make_policy, policy_factory
from kvist.tiers.base import Tier
from kvist.tierspec import TierSpec, parse_tier


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
        make_policy(config.eviction_policy, config.num_blocks, config.protected_share),
        events if events is not None else EventLog(),
        enable_prefix_caching=config.enable_prefix_caching,
    )


def open_tiers(texts: Sequence[str], tier_key: str | None = None) -> list[Tier]:
    """Open the tiers below the device, in their order.

    Parameters
    ----------
    texts : sequence of str
        As `kvist.tierspec` says.
    tier_key : str or None
        Makes the checksums keyed.

    Raises
    ------
    ConfigError
        If one of them cannot be used, and why; those before it are closed.
    """
    opened: list[Tier] = []
    try:
        for spec in map(parse_tier, texts):
            taken = {tier.name for tier in opened}
            if spec.name in taken:
                raise ConfigError(f"--tier: two tiers are called {spec.name!r}")
            numbered = (f"{spec.kind}{n}" for n in range(2, len(texts) + 2))
            free = next(name for name in (spec.kind, *numbered) if name not in taken)
            opened.append(_open_tier(spec, spec.name or free, tier_key or ""))
    except Exception:
        for tier in opened:
            tier.close()
        raise
    return opened


def _open_tier(spec: TierSpec, name: str, tier_key: str) -> Tier:
    """Build one tier. What a kind needs is imported by who asks for it."""
    codec = make_codec(spec.codec)
    # An unknown name is told of before anything is opened.
    policy = policy_factory(spec.policy or DEFAULT_POLICY, spec.protected_share)

    def keeper(capacity: int) -> Keeper:
        return Keeper(
            capacity,
            policy,
            tenant_quota=spec.tenant_quota_bytes,
            min_hits=spec.min_hits,
            max_idle_s=spec.ttl_s,
        )

    if spec.kind == "host":
        from kvist.tiers.host import HostTier

        return HostTier(spec.capacity_bytes, keeper, codec=codec, name=name)
    if spec.kind == "disk":
        from kvist.tiers.disk.tier import DiskTier

        return DiskTier(
            Path(spec.path).expanduser(),
            spec.capacity_bytes,
            name=name,
            codec=codec,
            keeper=keeper,
            tier_key=tier_key,
        )
    try:
        from kvist.tiers.redis.tier import DEFAULT_TTL_S, RedisTier
    except ImportError as error:
        raise ConfigError(
            f"--tier redis needs {error.name}, which is not installed; pip install 'kvist[redis]'"
        ) from error

    ttl_s = spec.ttl_s or DEFAULT_TTL_S
    return RedisTier(spec.url, codec=codec, tier_key=tier_key, ttl_s=ttl_s, name=name)
