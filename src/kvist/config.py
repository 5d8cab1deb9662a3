"""Options, resolved once, before anything is built.

Owns the names, defaults and ranges of every option, and the order in which sources win: flags and
keyword arguments over ``KVIST_…`` environment variables over a TOML file over defaults. Knows no
model: what depends on one (dtype, context length, pool size) is resolved by `kvist.build`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from kvist.errors import ConfigError
from kvist.options import coerce, merge, require
from kvist.policies.registry import DEFAULT_POLICY
from kvist.tierspec import parse_tier

PRESETS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "latency": MappingProxyType({"max_num_seqs": 16, "max_num_batched_tokens": 512}),
        "throughput": MappingProxyType({"max_num_seqs": 256, "max_num_batched_tokens": 8192}),
    }
)
"""What ``--preset`` sets where nothing else does. Small chunks keep the gaps between the tokens of
those that decode short; large ones read prompts with fewer passes over the weights."""


MAX_BATCHED_TOKENS = 1 << 20


class KVAllocation(StrEnum):
    """How much room a sequence takes when it starts to run."""

    PAGED = "paged"
    """Blocks as they are needed."""
    RESERVE = "reserve"
    """Room for `max_model_len` up front: the baseline that paging is measured against."""
    NONE = "none"
    """No K and V outlive the token they were computed for: the baseline that caching is measured
    against. Every token computes its whole context again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Options of a cache by itself."""

    num_blocks: int
    block_size: int = 16
    eviction_policy: str = DEFAULT_POLICY
    protected_share: float = 0.0
    enable_prefix_caching: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Options of the scheduler, with the model's numbers filled in."""

    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    scheduling_policy: str = "fcfs"
    kv_allocation: KVAllocation = KVAllocation.PAGED
    max_logprobs: int = 20
    watermark: float = 0.05
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an engine as people give them. Names are vLLM's where they mean the same.

    Parameters
    ----------
    model : str
        Registry name, local directory, ``.gguf`` file, or hub id.
    dtype : str
        Compute dtype: ``auto``, ``bfloat16``, ``float16``, ``float32``.
    device : str
        ``auto``, ``cpu``, ``cuda``, ``cuda:1`` …
    max_model_len : int or None
        Prompt and output at most; ``None`` for the model's context length.
    max_num_seqs : int
        Sequences that run side by side at most.
    max_num_batched_tokens : int
        Tokens through the model in one step at most; longer prompts are cut into chunks.
    block_size : int
        Tokens a block.
    kv_cache_dtype : str
        KV format; ``auto`` is the compute dtype.
    kv_cache_memory_bytes : int or None
        Size of the block pool; ``None`` chooses one.
    gpu_memory_utilization : float
        Share of a GPU's memory that the process may use, when the pool is sized by itself.
    enable_prefix_caching : bool
    scheduling_policy : {"fcfs", "priority"}
    kv_allocation : {"paged", "reserve", "none"}
        See `KVAllocation`; the last two are baselines to measure against.
    eviction_policy : str
        Which cached blocks leave first; see `kvist.policies.registry`.
    protected_share : float
        Share of the pool that only blocks in repeated use may hold, whatever else comes by.
    seed : int
        Base of the seeds of requests that bring none.
    served_model_name : str or None
        Name of the model in the API; the model argument when ``None``.
    kernels : str
        ``auto``, or a backend to prefer: ``cpp``, ``torch``, ``sdpa`` (bits of transformers, for
        a prompt that runs alone), ``reference``.
    weights : {"auto", "int8", "int4"}
        Form of the weights in memory; ``auto`` is the compute dtype.
    batch_invariant : bool
        Bitwise the same results whatever else is in the batch and however prompts are cut, in any
        dtype. Several times slower.
    max_logprobs : int
        Log probabilities a position that a request may ask for.
    watermark : float
        Share of the pool that stays free when a waiting sequence is let in beside others.
    max_num_queued_reqs, max_num_queued_tokens : int or None
        Requests that wait, and their tokens, at most; further ones are told to come back later.
    request_timeout : float or None
        Seconds from a request's arrival to its last token; a request may ask for less.
    preset : {"latency", "throughput"} or None
        See `PRESETS`.
    tiers : tuple of str
        Places below the device that copies of blocks go to and come back from, the fastest first;
        see `kvist.tierspec`.
    tier_key : str or None
        Secret that makes checksums keyed, for shared disks and servers.
    tier_write_policy : str
        When copies go down: ``through``, ``hits:K`` or ``evict``.
    tier_load_policy : {"auto", "always", "never"}
        Whether what a tier has is loaded or computed; ``auto`` goes by measured speeds.
    event_log : str or None
        File that is told, as JSON lines, what happens.
    record : str or None
        File that is told, as JSON lines, what the engine is given: `kvist simulate` runs it again.
    profile_steps : int
        Record so many steps from the first on, and write a Chrome trace that the log names.
    poison_fresh_blocks : bool
        Fill newly handed out blocks with NaN, so that reading a slot nobody wrote shows. For tests.
    """

    model: str = "smollm2-135m-instruct"
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    kv_allocation: KVAllocation = KVAllocation.PAGED
    eviction_policy: str = DEFAULT_POLICY
    protected_share: float = 0.0
    seed: int = 0
    served_model_name: str | None = None
    kernels: str = "auto"
    weights: str = "auto"
    batch_invariant: bool = False
    max_logprobs: int = 20
    watermark: float = 0.05
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    request_timeout: float | None = None
    preset: str | None = None
    tiers: tuple[str, ...] = ()
    tier_key: str | None = None
    tier_write_policy: str = "through"
    tier_load_policy: str = "auto"
    event_log: str | None = None
    record: str | None = None
    profile_steps: int = 0
    poison_fresh_blocks: bool = False

    def __post_init__(self) -> None:
        def check(ok: bool, option: str, allowed: str) -> None:
            require(self, ok, option, allowed)

        check(self.max_model_len is None or self.max_model_len >= 2, "max_model_len", "at least 2")
        check(self.max_num_seqs >= 1, "max_num_seqs", "at least 1")
        check(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "max_num_batched_tokens",
            f"at least max_num_seqs={self.max_num_seqs}, so that every running sequence can decode",
        )
        check(
            self.max_num_batched_tokens <= MAX_BATCHED_TOKENS,
            "max_num_batched_tokens",
            f"at most {MAX_BATCHED_TOKENS}; start-up runs a step of that size",
        )
        check(self.max_logprobs >= 0, "max_logprobs", "at least 0")
        check(1 <= self.block_size <= 256, "block_size", "from 1 to 256")
        check(0 <= self.protected_share < 1, "protected_share", "at least 0, below 1")
        check(0 <= self.watermark < 1, "watermark", "at least 0, below 1")
        for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
            check(getattr(self, name) is None or getattr(self, name) >= 1, name, "at least 1")
        timeout = self.request_timeout
        check(timeout is None or timeout > 0, "request_timeout", "above 0")
        check(self.preset is None or self.preset in PRESETS, "preset", " or ".join(PRESETS))
        memory = self.kv_cache_memory_bytes
        check(memory is None or memory > 0, "kv_cache_memory_bytes", "above 0")
        check(0 < self.gpu_memory_utilization <= 1, "gpu_memory_utilization", "above 0, at most 1")
        check(
            self.scheduling_policy in ("fcfs", "priority"), "scheduling_policy", "fcfs or priority"
        )
        check(
            self.kernels in ("auto", "cpp", "torch", "sdpa", "reference"),
            "kernels",
            "auto, cpp, torch, sdpa or reference",
        )
        for tier in self.tiers:
            parse_tier(tier)
        if self.kv_allocation is KVAllocation.NONE:
            check(not self.enable_prefix_caching, "enable_prefix_caching", "off without a KV cache")
        if self.tiers:
            check(self.enable_prefix_caching, "enable_prefix_caching", "on with --tier")
            check(self.kv_allocation is KVAllocation.PAGED, "kv_allocation", "paged with --tier")
        check(
            re.fullmatch(r"through|evict|hits:[1-9][0-9]*", self.tier_write_policy) is not None,
            "tier_write_policy",
            "through, hits:K (K of 1 or more) or evict",
        )
        check(
            self.tier_load_policy in ("auto", "always", "never"),
            "tier_load_policy",
            "auto, always or never",
        )
        check(self.profile_steps >= 0, "profile_steps", "0 or more")
        check(self.weights in ("auto", "int8", "int4"), "weights", "auto, int8 or int4")

    @classmethod
    def resolve(
        cls,
        options: Mapping[str, Any],
        *,
        config_file: Path | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> EngineConfig:
        """Merge the sources: `options` that are not ``None``, then environment, then TOML file.

        Raises
        ------
        ConfigError
            For an unknown option, an unreadable file, or a value that cannot be used.
        """
        return _resolve(cls, options, config_file, environ)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of the HTTP server as people give them. Names are vLLM's where they mean the same.

    Parameters
    ----------
    host : str
    port : int
        0 lets the system choose; the address is printed.
    api_key : str or None
        Clients must send it as a bearer token.
    shutdown_timeout : float
        Seconds that open requests get to finish after the first signal.
    context_overflow : {"error", "truncate", "drop-oldest-turns"}
        What happens with a prompt that does not fit: a refusal, or its oldest tokens, or the oldest
        turns of a conversation are left out, and the answer says so.
    chat_template : str or None
        File with a Jinja template, instead of the model's own.
    tool_call_parser : {"auto", "hermes", "llama3_json", "mistral"}
        The form in which the model writes tool calls; ``auto`` goes by the chat template.
    enable_auto_tool_choice : bool
        Taken for vLLM's sake: a request with tools says it all.
    max_body_bytes : int
        Of one request.
    engine_timeout : float
        Seconds in which the engine must end a step; after that it is taken to hang.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    shutdown_timeout: float = 30.0
    context_overflow: str = "error"
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    enable_auto_tool_choice: bool = True
    max_body_bytes: int = 16 << 20
    engine_timeout: float = 120.0

    def __post_init__(self) -> None:
        require(self, 0 <= self.port <= 65_535, "port", "from 0 to 65535")
        require(self, self.shutdown_timeout >= 0, "shutdown_timeout", "at least 0")
        require(self, self.engine_timeout >= 2, "engine_timeout", "at least 2")
        require(self, self.api_key != "", "api_key", "a key that is not empty, or none")
        require(
            self,
            self.context_overflow in ("error", "truncate", "drop-oldest-turns"),
            "context_overflow",
            "error, truncate or drop-oldest-turns",
        )
        require(
            self,
            self.tool_call_parser in ("auto", "hermes", "llama3_json", "mistral"),
            "tool_call_parser",
            "auto, hermes, llama3_json or mistral",
        )
        require(self, self.max_body_bytes >= 1 << 10, "max_body_bytes", "at least 1KiB")

    def read_chat_template(self) -> str | None:
        """Return the text of the chat template's file, if one is named.

        Raises
        ------
        ConfigError
            If it cannot be read.
        """
        if self.chat_template is None:
            return None
        try:
            return Path(self.chat_template).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"--chat-template={self.chat_template}: {reason}; name a file with a Jinja template"
            ) from error

    @classmethod
    def resolve(
        cls,
        options: Mapping[str, Any],
        *,
        config_file: Path | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> ServerConfig:
        """Merge the sources, as `EngineConfig.resolve` does. Both read the same file."""
        return _resolve(cls, options, config_file, environ)


_Config = TypeVar("_Config", EngineConfig, ServerConfig)


def _resolve(
    cls: type[_Config],
    options: Mapping[str, Any],
    config_file: Path | None,
    environ: Mapping[str, str],
) -> _Config:
    known = {field.name: field.type for field in fields(cls)}
    other = EngineConfig if cls is ServerConfig else ServerConfig
    others = {field.name for field in fields(other)}
    merged = merge(known, others, options, config_file, environ)
    # What a preset sets gives way to everything that somebody asked for.
    merged = {**PRESETS.get(str(merged.get("preset")), {}), **merged}
    for name in merged:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}; known: {', '.join(sorted(known))}")
    enums = {"KVAllocation": KVAllocation}
    return cls(**{name: coerce(name, value, known[name], enums) for name, value in merged.items()})
