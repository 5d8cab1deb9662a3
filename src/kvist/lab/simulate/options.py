"""From options, as people give them, to the machine that is simulated.

Owns the defaults of a simulation. The options are the engine's own, so that a file that `kvist
serve --config` takes can be simulated as it is; those that books do not depend on are let be.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from kvist.config import CacheConfig, EngineConfig, SchedulerConfig, ServerConfig
from kvist.errors import ConfigError
from kvist.formats.registry import planned_format
from kvist.lab.models import find_model
from kvist.lab.plan import Model
from kvist.lab.simulate.books import Machine
from kvist.lab.simulate.timing import StepTiming
from kvist.lab.simulate.workload import Workload
from kvist.options import merge
from kvist.sizes import format_size

DEFAULT_MODEL = "llama-3.1-8b"
DEFAULT_MEMORY_BYTES = 40 << 30
"""KV pool where nobody says: what an 80 GB card has left beside a model of 8 billion parameters."""

_SCHEDULER = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "scheduling_policy",
    "kv_allocation",
    "watermark",
)
_CACHE = ("eviction_policy", "protected_share", "enable_prefix_caching")
_TIERS = ("tiers", "tier_write_policy", "tier_load_policy")


@dataclass(frozen=True, slots=True)
class Asked:
    """Options that somebody gave.

    Attributes
    ----------
    config : EngineConfig
    names : frozenset of str
        Which of them were given; the others are defaults.
    """

    config: EngineConfig
    names: frozenset[str]

    @classmethod
    def of(
        cls,
        options: Mapping[str, Any],
        config_file: Path | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> Asked:
        """Merge the sources as an engine would.

        Raises
        ------
        ConfigError
            As `EngineConfig.resolve`.
        """
        config = EngineConfig.resolve(options, config_file=config_file, environ=environ)
        known = {field.name for field in fields(EngineConfig)}
        others = {field.name for field in fields(ServerConfig)}
        given = set(merge(known, others, options, config_file, environ))
        if config.preset is not None:
            given |= {"max_num_seqs", "max_num_batched_tokens"}
        return cls(config, frozenset(given))

    def picked(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Return those of `names` that were given."""
        return {name: getattr(self.config, name) for name in names if name in self.names}

    @property
    def block_size(self) -> int | None:
        """As asked, or ``None``."""
        return self.config.block_size if "block_size" in self.names else None


def make_machine(
    asked: Asked, workload: Workload, base: Machine | None, memory_scale: float = 1.0
) -> tuple[Machine, Model | None]:
    """Return the machine that options describe, and the model, where one is looked at.

    Parameters
    ----------
    base : Machine or None
        That of a recording; options change it.
    memory_scale : float
        Multiplies the pool.

    Raises
    ------
    ConfigError
        If the pool cannot hold the longest request, or the model is unknown.
    """
    model = None
    if base is None or asked.names & {"model", "kv_cache_dtype"}:
        name = asked.config.model if "model" in asked.names else DEFAULT_MODEL
        model = find_model(name)
        kv_format = planned_format(asked.config.kv_cache_dtype, model.spec.dtype)
        token_bytes = sum(kv_format.token_bytes(group) for group in model.spec.kv_groups)
        block_bytes = round(token_bytes * workload.block_size)
        model_name, format_name = model.name, kv_format.name
    else:
        block_bytes, model_name, format_name = base.block_bytes, base.model, base.kv_format
    memory = asked.config.kv_cache_memory_bytes
    if base is not None and memory is None:
        num_blocks = base.cache.num_blocks
    else:
        num_blocks = (DEFAULT_MEMORY_BYTES if memory is None else memory) // block_bytes
    num_blocks = round(num_blocks * memory_scale)
    longest = max(r.num_prompt + r.max_tokens for r in workload.requests)
    max_len = asked.config.max_model_len
    if max_len is None:
        max_len = longest if base is None else base.scheduler.max_model_len
    needed = -(-max_len // workload.block_size)
    if needed > num_blocks:
        raise ConfigError(
            f"the longest request has {max_len} tokens and needs {needed} blocks"
            f" ({format_size(needed * block_bytes)}), the pool has {num_blocks}"
            f" ({format_size(num_blocks * block_bytes)}); raise --kv-cache-memory-bytes or set"
            f" --max-model-len, which leaves longer requests out"
        )
    scheduler = base.scheduler if base is not None else SchedulerConfig(max_model_len=max_len)
    cache = base.cache if base is not None else CacheConfig(num_blocks=num_blocks)
    machine = Machine(
        model=model_name,
        kv_format=format_name,
        block_bytes=block_bytes,
        cache=replace(
            cache,
            num_blocks=num_blocks,
            block_size=workload.block_size,
            **asked.picked(_CACHE),
        ),
        scheduler=replace(scheduler, max_model_len=max_len, **asked.picked(_SCHEDULER)),
        **{
            **({name: getattr(base, name) for name in _TIERS} if base is not None else {}),
            **asked.picked(_TIERS),
        },
    )
    return machine, model


def make_timing(
    machine: Machine,
    model: Model | None,
    prefill_tokens_per_s: float | None,
    decode_step_ms: float | None,
) -> StepTiming:
    """Return a timing where none was fitted: see `StepTiming.of_model`.

    Raises
    ------
    ConfigError
        If a number is not above 0, or the model is known by name only and no number is given.
    """
    for name, value in (
        ("--prefill-tokens-per-s", prefill_tokens_per_s),
        ("--decode-step-ms", decode_step_ms),
    ):
        if value is not None and not value > 0:
            raise ConfigError(f"{name}={value} must be above 0")
    if model is None:
        model = find_model(machine.model)
    decode_s = None if decode_step_ms is None else decode_step_ms / 1000
    return StepTiming.of_model(
        model, machine.block_bytes / machine.block_size, prefill_tokens_per_s, decode_s
    )
