"""Open a model for a benchmark: a pool of exactly so many blocks, and a host over it.

The only place of the benchmarks that knows tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvist.config import EngineConfig
from kvist.engine.assemble import OpenEngine, open_engine
from kvist.engine.weights.source import resolve
from kvist.errors import ConfigError
from kvist.lab.bench.host import Host, Session
from kvist.spec import KVSpec


def open_host(
    model: str,
    slots: int,
    *,
    block_size: int = 16,
    max_num_batched_tokens: int = 2048,
    kernels: str = "auto",
) -> tuple[Host, OpenEngine]:
    """Load a model over a pool of `slots` tokens, or a little more.

    Its window is the model's, or the pool where that is smaller.

    Raises
    ------
    ConfigError, ModelError
        As `open_engine`.
    """
    opened = _open(model, slots, block_size, max_num_batched_tokens, kernels, ())
    host = Host(
        opened.runner,
        opened.bill.num_blocks,
        block_size,
        opened.max_model_len,
        model=opened.bill.model,
        kv_token_bytes=opened.bill.kv_token_bytes,
        kv_format=opened.bill.kv_format,
    )
    return host, opened


def open_tiered(
    model: str, slots: int, host_bytes: int, max_num_seqs: int
) -> tuple[Session, OpenEngine]:
    """Load a model over a pool of `slots` tokens with host memory below it."""
    tier = f"host:{host_bytes >> 20}MiB"
    opened = _open(model, slots, 16, 2048, "auto", (tier,), max_num_seqs)
    return Session(opened.engine, time.perf_counter), opened


def sized_opener(model: str, slots: int) -> Callable[[int], tuple[Host, str, Callable[[], None]]]:
    """Return what opens a model with blocks of any size, as `BlockSizeBench` wants it."""

    def open_sized(block_size: int) -> tuple[Host, str, Callable[[], None]]:
        kernels = "auto" if block_size % 16 == 0 else "reference"
        host, opened = open_host(model, slots, block_size=block_size, kernels=kernels)
        backends = {operation: backend for operation, backend, _ in opened.bill.kernels}
        return host, backends.get("decode", "?"), opened.close

    return open_sized


def _open(
    model: str,
    slots: int,
    block_size: int,
    max_num_batched_tokens: int,
    kernels: str,
    tiers: tuple[str, ...],
    max_num_seqs: int = 64,
) -> OpenEngine:
    spec = KVSpec.from_config(resolve(model).config)
    num_blocks = -(-slots // block_size)
    if spec.max_position is not None and spec.max_position < 256:
        raise ConfigError(
            f"{model} knows {spec.max_position} positions; the benchmarks need 256 or more"
        )
    there = num_blocks * block_size
    window = min(spec.max_position or there, there)
    options = {
        "model": model,
        "block_size": block_size,
        "kv_cache_memory_bytes": spec.token_bytes() * there,
        "max_model_len": window,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": max_num_seqs,
        "kernels": kernels,
        "tiers": tiers,
    }
    return open_engine(EngineConfig.resolve(options))
