"""Options of `kvist plan` as typed, to a demand. Owns spellings and defaults; computes nothing."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from kvist.errors import ConfigError
from kvist.lab.plan import DEFAULT_TIERS, Demand, Model, TierSpeed
from kvist.process import available_memory_bytes
from kvist.sizes import parse_size

_UNLIMITED_CONTEXT = 32_768
"""Planned for where a model names no longest context and nobody asks for one."""


def read_demand(
    model: Model,
    *,
    context: int | None = None,
    concurrency: int = 1,
    kv_cache_dtype: str = "auto",
    memory: str | None = None,
    num_gpus: int = 1,
    utilization: float = 0.9,
    block_size: int = 16,
    bandwidth: str = "2TB",
    prefill_tokens_per_s: float | None = None,
    tiers: Sequence[str] = (),
) -> Demand:
    """Return what is asked of a model.

    Raises
    ------
    ConfigError
        Naming the option, if one cannot be read or makes no sense.
    """
    if context is None:
        context = model.spec.max_position or _UNLIMITED_CONTEXT
    memory_bytes = None
    if memory is not None:
        memory_bytes = device_memory_bytes() if memory == "auto" else parse_size(memory, "--memory")
    return Demand(
        context=context,
        concurrency=concurrency,
        kv_cache_dtype=kv_cache_dtype,
        memory_bytes=memory_bytes,
        num_gpus=num_gpus,
        utilization=utilization,
        block_size=block_size,
        bandwidth_bytes_per_s=float(parse_size(bandwidth.removesuffix("/s"), "--bandwidth")),
        prefill_tokens_per_s=prefill_tokens_per_s,
        tiers=tuple(map(_tier, tiers)) or DEFAULT_TIERS,
    )


def read_number(text: str, option: str) -> float:
    """Read ``8.03e9`` or ``8.03B``.

    Raises
    ------
    ConfigError
        If it is no number.
    """
    factors = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    factor = factors.get(text[-1:].upper(), 1.0)
    try:
        return float(text[:-1] if factor != 1.0 else text) * factor
    except ValueError as error:
        raise ConfigError(f"{option}={text!r} is no number; write 8.03e9 or 8.03B") from error


def device_memory_bytes() -> int:
    """Bytes of this machine's first GPU, or of its memory that can still be taken."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        asked = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits", "--id=0"]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
        if answer.returncode == 0 and answer.stdout.strip().isdecimal():
            return int(answer.stdout) << 20
    return available_memory_bytes()


def _tier(text: str) -> TierSpeed:
    name, colon, speed = text.rpartition(":")
    if not colon or not name:
        raise ConfigError(f"--tier={text!r} is no NAME:BYTES_PER_S, such as nvme:6GB")
    bytes_per_s = parse_size(speed.removesuffix("/s"), "--tier")
    if bytes_per_s <= 0:
        raise ConfigError(f"--tier={text!r}: nothing is loaded at {speed} a second")
    return TierSpeed(name, float(bytes_per_s))
