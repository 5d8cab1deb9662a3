"""Tiers below the device, put under an engine: identity, namespaces, memory, notes.

Owns how blocks are cut into segments, how much memory copies on their way may take, and what is
said of tiers at start-up. Knows every option of tiers and no kind of tier.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvist.cache import KVCacheManager
from kvist.config import EngineConfig
from kvist.engine.loads import PrefixLoads
from kvist.events import EventLog
from kvist.keys import RootKey
from kvist.sizes import format_size
from kvist.spec import BlockLayout
from kvist.tiers.base import Tier
from kvist.tiers.demotion import WritePolicy
from kvist.tiers.device import DevicePool
from kvist.tiers.manager import Identity, TierManager
from kvist.tierspec import parse_tier

SEGMENT_BYTES = 128 << 10
"""A segment, the unit of a checksum and of reading, is as many layers as make this much."""

STAGING_BYTES = 64 << 20
LEAST_STAGING_BLOCKS = 16


def segment_bytes(layout: BlockLayout) -> tuple[int, ...]:
    """Cut a block into ranges of layers of about `SEGMENT_BYTES`."""
    layer = layout.layer_elements * layout.itemsize
    each = max(1, SEGMENT_BYTES // layer)
    whole, rest = divmod(layout.num_layers, each)
    return (each * layer,) * whole + ((rest * layer,) if rest else ())


def staging_blocks(layout: BlockLayout) -> int:
    """Copies on their way down at most."""
    return max(LEAST_STAGING_BLOCKS, STAGING_BYTES // layout.block_bytes)


def reserved_bytes(config: EngineConfig, layout: BlockLayout) -> int:
    """Host memory that the tiers of an engine may take, staging included."""
    if not config.tiers:
        return 0
    host = sum(spec.capacity_bytes for spec in map(parse_tier, config.tiers) if spec.kind == "host")
    return host + staging_blocks(layout) * layout.block_bytes


def put_tiers(
    tiers: Sequence[Tier],
    config: EngineConfig,
    cache: KVCacheManager,
    device: DevicePool,
    layout: BlockLayout,
    events: EventLog,
    *,
    root: RootKey,
    model: str,
    kv_format: str,
) -> PrefixLoads | None:
    """Put opened tiers under a cache; ``None`` where there are none.

    Raises
    ------
    ConfigError
        If a tier holds this identity with other sizes, or the write policy is unknown.
    """
    if not tiers:
        return None
    manager = TierManager(
        tiers,
        device,
        Identity(root, model, kv_format, segment_bytes(layout), layout.itemsize),
        events,
        write_policy=WritePolicy.parse(config.tier_write_policy),
        load_policy=config.tier_load_policy,
        staging_blocks=staging_blocks(layout),
        in_place=device.is_host,
        block_tokens=layout.block_size,
    )
    manager.namespace("")  # what cannot be used is told of now
    return PrefixLoads(cache, manager, events)


def describe_tiers(tiers: Sequence[Tier], config: EngineConfig) -> tuple[tuple[str, int, str], ...]:
    """Return (name, capacity in bytes, remark) of every tier, for the bill."""
    rows = []
    codecs = [spec.codec for spec in map(parse_tier, config.tiers)]
    for number, tier in enumerate(tiers):
        usage = tier.usage()
        codec = f", {codecs[number]}" if number < len(codecs) else ""
        remark = f"{tier.medium}{codec}, {config.tier_write_policy}"
        if usage.num_blocks:
            remark += f"; {usage.num_blocks:,} blocks there, {format_size(usage.used_bytes)}"
        rows.append((tier.name, usage.capacity_bytes, remark))
    return tuple(rows)
