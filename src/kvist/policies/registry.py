"""Name of an eviction policy -> the policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from kvist.errors import ConfigError
from kvist.policies.arc import ARCPolicy
from kvist.policies.base import EvictionPolicy
from kvist.policies.cost import CostAwarePolicy
from kvist.policies.lfu_da import LFUDAPolicy
from kvist.policies.lru import LRUPolicy
from kvist.policies.protected import ProtectedPolicy
from kvist.policies.s3_fifo import S3FIFOPolicy
from kvist.policies.sieve import SievePolicy

PolicyFactory = Callable[[int], EvictionPolicy]
"""Builds a policy from a capacity: the sum of the sizes of the blocks that there is room for."""

POLICIES: Mapping[str, PolicyFactory] = MappingProxyType(
    {
        "arc": ARCPolicy,
        "cost": CostAwarePolicy,
        "lfu-da": LFUDAPolicy,
        "lru": lambda capacity: LRUPolicy(),
        "s3-fifo": S3FIFOPolicy,
        "sieve": lambda capacity: SievePolicy(),
    }
)

DEFAULT_POLICY = "lfu-da"
"""Most hits over LRU's on real traces, on average, and nowhere fewer: `kvist bench policies`."""


def policy_factory(name: str, protected_share: float = 0.0) -> PolicyFactory:
    """Return what builds the policy called `name`.

    Parameters
    ----------
    protected_share : float
        Share of the capacity that only blocks in repeated use may hold; see `ProtectedPolicy`.

    Raises
    ------
    ConfigError
        If there is no such policy, or no such share.
    """
    factory = POLICIES.get(name)
    if factory is None:
        raise ConfigError(f"--eviction-policy {name!r} is unknown; there is: {', '.join(POLICIES)}")
    if not 0 <= protected_share < 1:
        raise ConfigError(f"--protected-share {protected_share} must be at least 0 and below 1")
    if protected_share:
        return partial(ProtectedPolicy, factory, share=protected_share)
    return factory


def make_policy(name: str, capacity: int, protected_share: float = 0.0) -> EvictionPolicy:
    """Build the policy called `name` for `capacity`. See `policy_factory`."""
    return policy_factory(name, protected_share)(capacity)
