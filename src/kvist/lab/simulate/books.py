"""The real scheduler over the real cache, opened for a replay.

Owns which options a replay has, and how a recording's header becomes them. Knows neither traces nor
time. Threads: one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvist.cache import KVCacheManager
from kvist.config import CacheConfig, KVAllocation, SchedulerConfig
from kvist.engine.loads import PrefixLoads
from kvist.engine.scheduler import Scheduler
from kvist.errors import ConfigError
from kvist.events import EventLog
from kvist.keys import RootKey
from kvist.policies.registry import make_policy

_ROOT = RootKey(b"kvist.simulate".ljust(32, b"\0"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What decisions depend on besides the requests.

    Attributes
    ----------
    model, kv_format : str
        For people.
    block_bytes : int
        Raw bytes of a block, all layers.
    cache : CacheConfig
    scheduler : SchedulerConfig
    tiers : tuple of str
        As `kvist.tierspec` says; where one lies does not matter.
    tier_write_policy, tier_load_policy : str
    """

    model: str
    kv_format: str
    block_bytes: int
    cache: CacheConfig
    scheduler: SchedulerConfig
    tiers: tuple[str, ...] = ()
    tier_write_policy: str = "through"
    tier_load_policy: str = "auto"

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self.cache.block_size

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool."""
        return self.cache.num_blocks * self.block_bytes

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> Machine:
        """Return the machine that a recording was made on.

        Raises
        ------
        ConfigError
            If the header lacks something.
        """
        try:
            return cls(
                model=header["model"],
                kv_format=header["kv_format"],
                block_bytes=header["block_bytes"],
                cache=CacheConfig(
                    num_blocks=header["num_blocks"],
                    block_size=header["block_size"],
                    eviction_policy=header["eviction_policy"],
                    protected_share=header["protected_share"],
                    enable_prefix_caching=header["enable_prefix_caching"],
                ),
                scheduler=SchedulerConfig(
                    max_model_len=header["max_model_len"],
                    max_num_seqs=header["max_num_seqs"],
                    max_num_batched_tokens=header["max_num_batched_tokens"],
                    scheduling_policy=header["scheduling_policy"],
                    kv_allocation=KVAllocation(header["kv_allocation"]),
                    watermark=header["watermark"],
                ),
                tiers=tuple(_spelled(tier) for tier in header["tiers"]),
                tier_write_policy=header["tier_write_policy"],
                tier_load_policy=header["tier_load_policy"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"the header of the recording is damaged: {error!r}") from error


def _spelled(tier: str) -> str:
    """Write a tier of a header as `kvist.tierspec` reads it; where it lay nobody knows."""
    kind, _, size = tier.partition(":")
    return {"host": tier, "redis": "redis://nowhere"}.get(kind, f"disk:{size}:/nowhere")


def open_scheduler(
    machine: Machine,
    events: EventLog,
    make_loads: Callable[[KVCacheManager], PrefixLoads | None] = lambda cache: None,
) -> Scheduler:
    """Open a scheduler over an empty cache.

    Parameters
    ----------
    make_loads : callable
        Puts tiers below the cache, if there are any.

    Raises
    ------
    CapacityError
        If the pool cannot hold one request of the longest kind.
    """
    options = machine.cache
    cache = KVCacheManager(
        options.num_blocks,
        options.block_size,
        make_policy(options.eviction_policy, options.num_blocks, options.protected_share),
        events,
        enable_prefix_caching=options.enable_prefix_caching,
    )
    return Scheduler(machine.scheduler, cache, events, _ROOT, loads=make_loads(cache))
