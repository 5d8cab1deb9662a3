"""Kvist: a KV-cache memory system for LLM inference.

How big is the KV cache? Where does it live? Is it being reused?

The names below are loaded when they are first used, so that ``import kvist`` is instant and works
without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvist.build import open_cache
    from kvist.config import CacheConfig, EngineConfig
    from kvist.engine.llm import LLM
    from kvist.engine.outputs import CompletionOutput, RequestOutput
    from kvist.engine.sampling import SamplingParams
    from kvist.spec import KVSpec

__version__ = "0.1.0"

_HOMES = {
    "LLM": "kvist.engine.llm",
    "CacheConfig": "kvist.config",
    "CompletionOutput": "kvist.engine.outputs",
    "EngineConfig": "kvist.config",
    "KVSpec": "kvist.spec",
    "RequestOutput": "kvist.engine.outputs",
    "SamplingParams": "kvist.engine.sampling",
    "open_cache": "kvist.build",
}

__all__ = [
    "LLM",
    "CacheConfig",
    "CompletionOutput",
    "EngineConfig",
    "KVSpec",
    "RequestOutput",
    "SamplingParams",
    "open_cache",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kvist' has no attribute {name!r}")
    return getattr(import_module(home), name)
