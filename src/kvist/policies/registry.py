"""Name of an eviction policy -> the policy."""

from __future__ import annotations

from kvist.errors import ConfigError
from kvist.policies.base import EvictionPolicy
from kvist.policies.lru import LRUPolicy


def make_policy(name: str) -> EvictionPolicy:
    """Build the policy called `name`.

    Raises
    ------
    ConfigError
        If there is no such policy.
    """
    if name == "lru":
        return LRUPolicy()
    raise ConfigError(f"--eviction-policy {name!r} is unknown; there is: lru")
