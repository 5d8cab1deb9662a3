"""Flags made of options: one for every option of a config, with the same name.

Owns what ``--help`` says of them. Names, types, ranges and defaults are `kvist.config`'s; a flag
that is not given is ``None``, so that environment and file are asked next.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any

import typer

from kvist.config import EngineConfig, ServerConfig

ENGINE_HELP: Mapping[str, str] = MappingProxyType(
    {
        "dtype": "Compute dtype: auto, bfloat16, float16, float32.",
        "device": "auto, cpu, cuda, cuda:1 …",
        "max_model_len": "Prompt and output at most, in tokens. Default: the model's context.",
        "max_num_seqs": "Sequences that run side by side at most. Default: 64.",
        "max_num_batched_tokens": "Tokens in one step at most; longer prompts are chunked."
        " Default: 2048.",
        "block_size": "Tokens a KV block. Default: 16.",
        "kv_cache_dtype": "KV format; auto is the compute dtype.",
        "kv_cache_memory_bytes": "Size of the KV pool, such as 4GiB. Default: what memory allows.",
        "gpu_memory_utilization": "Share of a GPU that the process may use. Default: 0.9.",
        "enable_prefix_caching": "Share the KV of equal prefixes. Default: on.",
        "scheduling_policy": "fcfs or priority.",
        "kv_allocation": "paged; or a baseline: reserve (room for max_model_len up front), none"
        " (no KV cache: every token computes its context again; --no-enable-prefix-caching).",
        "eviction_policy": "Which cached blocks leave first: lfu-da (default), lru, arc, s3-fifo,"
        " sieve, cost.",
        "protected_share": "Share of the pool that only blocks in repeated use may hold, so that"
        " one-off prompts cannot wash them out. Default: 0.",
        "seed": "Base of the seeds of requests that bring none.",
        "kernels": "Backend to prefer: auto, cpp, torch, sdpa, reference.",
        "weights": "Form of the weights: auto (the compute dtype), int8, int4.",
        "batch_invariant": "Bitwise the same results in any batch; several times slower."
        " Default: off.",
        "watermark": "Share of the pool kept free when a request comes in. Default: 0.05.",
        "max_num_queued_reqs": "Requests that wait at most; more get 503. Default: no limit.",
        "max_num_queued_tokens": "Their tokens at most; more get 503. Default: no limit.",
        "request_timeout": "Seconds that a request gets at most. Default: no limit.",
        "tiers": "Place for copies of KV below the device, the fastest first; may be given several"
        " times: host:4GiB, disk:20GiB:/path:zstd, redis://host:6379/0.",
        "tier_key": "Secret for checksums on shared disks and servers. Also KVIST_TIER_KEY.",
        "tier_write_policy": "When copies go down: through, hits:K, evict. Default: through.",
        "tier_load_policy": "Load or recompute: auto, always, never. Default: auto.",
        "event_log": "File that is told what happens, as JSON lines.",
        "record": "File that is told what comes in, without text, for kvist simulate.",
        "preset": "latency or throughput: batch and chunk sizes; explicit options win.",
        "profile_steps": "Steps to record into a Chrome trace that the log names. Default: 0.",
        "max_logprobs": "Log probabilities a position that a request may ask for. Default: 20.",
    }
)

SIMULATED = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "kv_cache_dtype",
    "kv_cache_memory_bytes",
    "enable_prefix_caching",
    "scheduling_policy",
    "kv_allocation",
    "eviction_policy",
    "protected_share",
    "watermark",
    "tiers",
    "tier_write_policy",
    "tier_load_policy",
)
"""Options of an engine that need no model to mean something."""

SERVER_HELP: Mapping[str, str] = MappingProxyType(
    {
        "host": "Address to listen on. Default: 127.0.0.1.",
        "port": "Port to listen on; 0 lets the system choose. Default: 8000.",
        "api_key": "Ask clients for this bearer token. Also KVIST_API_KEY.",
        "shutdown_timeout": "Seconds that running requests get to finish on SIGTERM. Default: 30.",
        "context_overflow": "Prompts that do not fit: error, truncate, drop-oldest-turns."
        " Default: error.",
        "chat_template": "File with a Jinja template, instead of the model's own.",
        "tool_call_parser": "Form of the model's tool calls: auto (by the chat template), hermes,"
        " llama3_json, mistral.",
        "enable_auto_tool_choice": "Always on; taken for vLLM's sake.",
        "engine_timeout": "Seconds that one step of the engine may take; then it is taken to hang,"
        " and those who wait get 503. Default: 120.",
        "max_body_bytes": "Size of a request at most, such as 16MiB (the default).",
    }
)

_FLAG_TYPES: Mapping[str, type] = MappingProxyType({"int": int, "float": float, "bool": bool})


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a flag for every engine option; they arrive as one mapping, `engine_args`."""
    return _with_options(command, EngineConfig, ENGINE_HELP, "engine_args", "Engine")


def with_simulated_options(command: Callable[..., None]) -> Callable[..., None]:
    """As `with_engine_options`, of those that the books depend on."""
    helps = {name: ENGINE_HELP[name] for name in SIMULATED}
    return _with_options(command, EngineConfig, helps, "engine_args", "Engine")


def with_server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a flag for every server option; they arrive as one mapping, `server_args`."""
    return _with_options(command, ServerConfig, SERVER_HELP, "server_args", "Server")


def _with_options(
    command: Callable[..., None],
    config: type[EngineConfig] | type[ServerConfig],
    helps: Mapping[str, str],
    argument: str,
    panel: str,
) -> Callable[..., None]:
    own = inspect.signature(command, eval_str=True)
    fields = config.__dataclass_fields__
    parameters = [p for p in own.parameters.values() if p.name != argument]
    for name, text in helps.items():
        kind = str(fields[name].type).split(" | ")[0]
        flag_type: Any = str if name.endswith("_bytes") else _FLAG_TYPES.get(kind, str)
        spelled: tuple[str, ...] = ()
        if kind.startswith("tuple[str"):
            # Given once for each value, so in the singular.
            flag_type, spelled = list[str], ("--" + name.removesuffix("s"),)
        option = typer.Option(*spelled, help=text, show_default=False, rich_help_panel=panel)
        annotation: Any = Annotated[flag_type | None, option]
        parameters.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
            )
        )

    def wrapped(**given: Any) -> None:
        # A flag that may come several times and did not is an empty list: not given.
        options = {name: given.pop(name) for name in helps}
        options = {name: None if value == [] else value for name, value in options.items()}
        command(**{argument: options}, **given)

    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    wrapped.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapped
