"""Name of an eviction policy -> the policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvist.errors import ConfigError
from kvist.policies.base import EvictionPolicy
from kvist.policies.lfu_da import LFUDAPolicy
from kvist.policies.lru import LRUPolicy

POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = MappingProxyType(
    {
        "lru": lambda capacity: LRUPolicy(),
        "lfu-da": LFUDAPolicy,
    }
)
"""Name -> what builds it from a capacity."""


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """Build the policy called `name`.

    Parameters
    ----------
    capacity : int
        Sum of the sizes of the blocks that there is room for: blocks on the device, bytes in a
        tier. Policies size their queues and their memory of what left by it.

    Raises
    ------
    ConfigError
        If there is no such policy.
    """
    build = POLICIES.get(name)
    if build is None:
        raise ConfigError(
            f"--eviction-policy {name!r} is unknown; there is: {', '.join(sorted(POLICIES))}"
        )
    return build(capacity)
