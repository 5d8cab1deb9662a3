"""The books of an engine, opened: events, cache, scheduler; the assembly's part without tensors.

Owns how `EngineConfig` becomes the configs below it. Knows no model and no device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvist.build import open_cache
from kvist.cache import KVCacheManager
from kvist.config import CacheConfig, EngineConfig, SchedulerConfig
from kvist.engine.engine import Engine, Runner
from kvist.engine.event_file import EventFile
from kvist.engine.grammar import GrammarSpec, Matcher
from kvist.engine.loads import PrefixLoads
from kvist.engine.recording import Recorder
from kvist.engine.scheduler import Scheduler
from kvist.events import EventLog
from kvist.keys import RootKey
from kvist.tierspec import parse_tier

_DECIDING = (
    "num_blocks",
    "max_model_len",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "scheduling_policy",
    "kv_allocation",
    "watermark",
    "eviction_policy",
    "protected_share",
    "enable_prefix_caching",
    "tier_write_policy",
    "tier_load_policy",
)


@dataclass(frozen=True, slots=True)
class Books:
    """A cache and what it tells.

    Attributes
    ----------
    cache : KVCacheManager
    events : EventLog
    max_model_len : int
    event_file : EventFile or None
        Where the events are written.
    """

    cache: KVCacheManager
    events: EventLog
    max_model_len: int
    event_file: EventFile | None = None

    def open_engine(
        self,
        config: EngineConfig,
        root: RootKey,
        runner: Runner,
        compile_grammar: Callable[[GrammarSpec], Matcher] | None,
        loads: PrefixLoads | None = None,
        recorder: Recorder | None = None,
    ) -> Engine:
        """Put a scheduler and an engine over the cache."""
        scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=self.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                scheduling_policy=config.scheduling_policy,
                kv_allocation=config.kv_allocation,
                max_logprobs=config.max_logprobs,
                watermark=config.watermark,
                max_num_queued_reqs=config.max_num_queued_reqs,
                max_num_queued_tokens=config.max_num_queued_tokens,
            ),
            self.cache,
            self.events,
            root,
            config.seed,
            loads,
            recorder,
        )
        return Engine(
            scheduler,
            runner,
            self.events,
            compile_grammar,
            request_timeout_s=config.request_timeout,
        )


def recording_facts(
    names: tuple[str, str],
    block_bytes: int,
    options: Mapping[str, Any],
    tiers: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the header of a recording: of all options those that decide.

    `names` are those of model and KV format.
    """
    return {
        "model": names[0],
        "kv_format": names[1],
        "block_bytes": block_bytes,
        **{name: options[name] for name in _DECIDING},
        "tiers": list(tiers),
    }


def open_recorder(
    config: EngineConfig,
    num_blocks: int,
    max_model_len: int,
    names: tuple[str, str],
    block_bytes: int,
) -> Recorder | None:
    """Open the recording that the options name, if they name one: its header is what decides.

    `names` are those of model and KV format.
    """
    if config.record is None:
        return None
    # Of a tier only what it is and how large: a path or an address may be nobody's business.
    tiers = [f"{t.kind}:{t.capacity_bytes}" for t in map(parse_tier, config.tiers)]
    options = {**asdict(config), "num_blocks": num_blocks, "max_model_len": max_model_len}
    facts = recording_facts(names, block_bytes, options, tiers)
    return Recorder(Path(config.record), facts)


def open_books(config: EngineConfig, num_blocks: int, max_model_len: int) -> Books:
    """Open a cache of `num_blocks` blocks and the log of its events."""
    events = EventLog()
    event_file = EventFile(Path(config.event_log)) if config.event_log is not None else None
    if event_file is not None:
        events.subscribe(event_file)
    cache = open_cache(
        CacheConfig(
            num_blocks=num_blocks,
            block_size=config.block_size,
            eviction_policy=config.eviction_policy,
            protected_share=config.protected_share,
            enable_prefix_caching=config.enable_prefix_caching,
        ),
        events,
    )
    return Books(cache, events, max_model_len, event_file)
