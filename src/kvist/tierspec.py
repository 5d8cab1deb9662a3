"""How people write a tier: ``host:4GiB``, ``disk:20GiB:/path:zstd``, ``redis://host:6379/0``.

Owns the spelling and nothing of what a tier does. ::

    host:SIZE[:CODEC][,OPTION=VALUE ...]
    disk:SIZE:PATH[:CODEC][,OPTION=VALUE ...]
    redis://…  rediss://…  unix://…  valkey://…  valkeys://…[,OPTION=VALUE ...]

Options: ``policy`` (who leaves first), ``protect`` (share that only blocks in repeated use may
hold), ``quota`` (size that each tenant may hold), ``hits`` (admitted when offered for that time),
``ttl`` (seconds a block stays without being of use), ``codec``, ``name`` (in metrics and events).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kvist.errors import ConfigError
from kvist.sizes import parse_size

_OPTION = re.compile(r",(policy|protect|quota|hits|ttl|codec|name)=([^,]*)$")
_CODEC = re.compile(r"^(.*):(raw|zstd(?::-?[0-9]+)?)$", re.DOTALL)
_SCHEMES: Mapping[str, str] = MappingProxyType(
    {
        "redis": "redis",
        "rediss": "rediss",
        "unix": "unix",
        "valkey": "redis",
        "valkeys": "rediss",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec:
    """One tier as it was asked for.

    Attributes
    ----------
    kind : {"host", "disk", "redis"}
    capacity_bytes : int
        0 where the server has the budget.
    path, url : str
        Where it is; ``""`` where that does not apply.
    codec : str
    policy : str or None
        Eviction order; ``None``: the default.
    protected_share : float
    tenant_quota_bytes : int or None
    min_hits : int
    ttl_s : float or None
    name : str
        ``""``: the kind, made unique.
    """

    kind: str
    capacity_bytes: int = 0
    path: str = ""
    url: str = ""
    codec: str = "raw"
    policy: str | None = None
    protected_share: float = 0.0
    tenant_quota_bytes: int | None = None
    min_hits: int = 1
    ttl_s: float | None = None
    name: str = ""


def parse_tier(text: str) -> TierSpec:
    """Read a tier.

    Raises
    ------
    ConfigError
        Saying what is wrong and how it is written.
    """
    rest, options = _split_options(text)
    scheme, separator, tail = rest.partition("://")
    if separator:
        if scheme not in _SCHEMES or not tail:
            raise _wrong(text, f"no tier speaks {scheme!r}")
        return TierSpec(kind="redis", url=f"{_SCHEMES[scheme]}://{tail}", **options)
    kind, _, tail = rest.partition(":")
    if kind not in ("host", "disk"):
        raise _wrong(text, f"there is no tier {kind!r}")
    found = _CODEC.match(tail)
    if found is not None:
        tail, codec = found.groups()
        options.setdefault("codec", codec)
    size, _, path = tail.partition(":")
    if not size:
        raise _wrong(text, "the size is missing")
    capacity = parse_size(size, "--tier")
    if capacity <= 0:
        raise _wrong(text, "a size is above 0")
    if kind == "host" and path:
        raise _wrong(text, f"host memory has no path, and {path!r} is no codec")
    if kind == "disk" and not path:
        raise _wrong(text, "the directory is missing")
    return TierSpec(kind=kind, capacity_bytes=capacity, path=path, **options)


def _split_options(text: str) -> tuple[str, dict[str, Any]]:
    options: dict[str, Any] = {}
    rest = text.strip()
    while (found := _OPTION.search(rest)) is not None:
        name, value = found.groups()
        rest = rest[: found.start()]
        try:
            if name == "hits":
                options["min_hits"] = int(value)
            elif name == "ttl":
                options["ttl_s"] = float(value)
            elif name == "protect":
                options["protected_share"] = float(value)
            elif name == "quota":
                options["tenant_quota_bytes"] = parse_size(value, "--tier quota")
            else:
                options[name] = value
        except ValueError as error:
            raise _wrong(text, f"{name}={value!r} is no number") from error
        if not value or options.get("min_hits", 1) < 1 or options.get("ttl_s", 1.0) <= 0:
            raise _wrong(text, f"{name}={value!r} is not above 0")
        if options.get("tenant_quota_bytes", 1) < 1:
            raise _wrong(text, f"{name}={value!r} is not above 0")
        if not 0 <= options.get("protected_share", 0.0) < 1:
            raise _wrong(text, f"{name}={value!r} is not from 0 to below 1")
    return rest, options


def _wrong(text: str, why: str) -> ConfigError:
    return ConfigError(
        f"--tier {_without_password(text)}: {why}; write host:4GiB, disk:20GiB:/path:zstd or"
        " redis://host:6379/0"
    )


def _without_password(text: str) -> str:
    """Return what may be shown of a tier: all but what stands before the host."""
    return re.sub(r"(://)[^@/]*@", r"\1…@", text)
