"""Planted event logs of kvist, as `kvist serve --event-log` writes them."""

# ruff: noqa: E501  (lines of metrics and events are as long as they are)

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

from plant_case import Case

_START = 1_795_251_000.0


class _Log:
    """Lines with a clock."""

    def __init__(self) -> None:
        self.now = _START
        self.rows: list[tuple[float, str]] = []

    def say(self, event: str, /, at: float | None = None, **fields: Any) -> None:
        when = self.now if at is None else at
        line = {"t": round(when, 6), "event": event, **fields}
        self.rows.append((when, json.dumps(line, separators=(",", ":"))))

    def text(self) -> str:
        return "\n".join(row for _, row in sorted(self.rows, key=lambda r: r[0])) + "\n"


def _key(*what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def _request(
    log: _Log,
    name: str,
    at: float,
    prompt: int,
    output: int,
    wait: float,
    per_token: float,
    cached: int = 0,
    waiting: int = 0,
) -> float:
    """Tell of one request that runs alone; return when it is done."""
    log.say("RequestAdded", at=at, request_id=name, num_prompt_tokens=prompt, arrived_s=None)
    begin = at + wait
    log.say(
        "RequestScheduled",
        at=begin,
        request_id=name,
        num_cached_tokens=cached,
        num_tokens=prompt,
        resumed=False,
        num_queried_tokens=prompt,
        num_reused_tokens=cached,
    )
    now = begin + 0.0002 * (prompt - cached)
    log.say(
        "StepDone",
        at=now,
        num_tokens=prompt - cached,
        num_sequences=1,
        num_waiting=waiting,
        num_prompt_tokens=prompt - cached,
        num_recomputed_tokens=0,
        sampled=[name],
    )
    for _ in range(output - 1):
        now += per_token
        log.say(
            "StepDone",
            at=now,
            num_tokens=1,
            num_sequences=1,
            num_waiting=waiting,
            num_prompt_tokens=0,
            num_recomputed_tokens=0,
            sampled=[name],
        )
    log.say(
        "RequestFinished",
        at=now,
        request_id=name,
        reason="stop",
        num_prompt_tokens=prompt,
        num_output_tokens=output,
        num_cached_tokens=cached,
    )
    return now


def _slows() -> str:
    log = _Log()
    for i, prompt in enumerate((220, 6200, 310, 7400, 260, 6900, 240, 7100, 300, 6600)):
        log.now = _request(
            log, f"cmpl-{i}", log.now + 0.1, prompt, 24, 0.001, 0.008 + prompt * 7e-6
        )
    return log.text()


def _calm() -> str:
    log = _Log()
    for i in range(20):
        log.now = _request(
            log, f"cmpl-{i}", log.now + 0.3, 900 + i, 12, 0.001, 0.011, 0 if i == 0 else 864
        )
    return log.text()


def _preempts() -> str:
    log, rng = _Log(), random.Random(31)
    for i in range(30):
        name, prompt = f"chat-{i}", 1500 + rng.randrange(400)
        log.say("RequestAdded", request_id=name, num_prompt_tokens=prompt, arrived_s=None)
        log.say(
            "RequestScheduled",
            request_id=name,
            num_cached_tokens=0,
            num_tokens=prompt,
            resumed=False,
            num_queried_tokens=prompt,
            num_reused_tokens=0,
        )
        for _ in range(3):
            log.now += 0.4
            log.say(
                "StepDone",
                num_tokens=prompt + 3,
                num_sequences=4,
                num_waiting=1,
                num_prompt_tokens=0,
                num_recomputed_tokens=prompt,
                sampled=[name],
            )
            log.say("RequestPreempted", request_id=name, num_computed_tokens=prompt + 30)
            log.say(
                "RequestScheduled",
                request_id=name,
                num_cached_tokens=16,
                num_tokens=prompt + 31,
                resumed=True,
                num_queried_tokens=0,
                num_reused_tokens=0,
            )
        log.say(
            "RequestFinished",
            request_id=name,
            reason="stop",
            num_prompt_tokens=prompt,
            num_output_tokens=80,
            num_cached_tokens=0,
        )
    return log.text()


def _blocks(hot_chains: int, hot_blocks: int, cold_blocks: int, turns: int, pool: int) -> str:
    """Chains that come again and are gone each time, since others came in between: plain LRU."""
    log, held = _Log(), dict[str, int]()
    for turn in range(turns):
        hot = [_key("hot", turn % hot_chains, k) for k in range(hot_blocks)]
        cold = [_key("cold", turn, k) for k in range(cold_blocks)]
        prompt = 16 * (hot_blocks + cold_blocks) + 5
        name = f"chat-{turn}"
        log.say("RequestAdded", request_id=name, num_prompt_tokens=prompt, arrived_s=None)
        log.say(
            "RequestScheduled",
            request_id=name,
            num_cached_tokens=0,
            num_tokens=prompt,
            resumed=False,
            num_queried_tokens=prompt,
            num_reused_tokens=0,
        )
        log.now += 0.2
        parent = _key("root")
        for depth, key in enumerate([*hot, *cold]):
            block = len(held)
            if len(held) == pool:
                oldest = next(iter(held))
                block = held.pop(oldest)
                log.say("BlockEvicted", block_id=block, key=oldest)
            held[key] = block
            log.say("BlockStored", block_id=block, key=key, parent=parent, depth=depth)
            parent = key
        log.say(
            "StepDone",
            num_tokens=prompt,
            num_sequences=1,
            num_waiting=0,
            num_prompt_tokens=prompt,
            num_recomputed_tokens=0,
            sampled=[name],
        )
        log.say(
            "RequestFinished",
            request_id=name,
            reason="stop",
            num_prompt_tokens=prompt,
            num_output_tokens=1,
            num_cached_tokens=0,
        )
        log.now += 0.5
    return log.text()


def _crowd() -> str:
    """Three requests a second for 20 s, two more always waiting for a place; each is quick."""
    log, now = _Log(), _START
    for i in range(60):
        now = _request(log, f"cmpl-{i}", now + 0.002, 400, 10, 0.7, 0.02, 384, 2)
    return log.text()


def cases() -> list[Case]:
    """Return the cases whose evidence is an event log."""
    return [
        Case(
            "events-slows",
            "decode-slows-with-context",
            "10 ms a token behind 250 tokens, 55 ms behind 7000",
            {"events.jsonl": _slows()},
        ),
        Case(
            "events-preempts",
            "preemption-storm",
            "every request is thrown out three times",
            {"events.jsonl": _preempts()},
        ),
        Case(
            "events-hot-evicted",
            "hot-prefixes-evicted",
            "four prompts of 20 blocks come again and again; 40 blocks of others that never return push them out of a pool of 200",
            {"events.jsonl": _blocks(4, 20, 40, 24, 200)},
        ),
        Case(
            "events-crowd",
            "throughput-low",
            "one at a time, three a second, two always wait",
            {"events.jsonl": _crowd()},
        ),
        Case(
            "healthy-events",
            None,
            "a long shared prompt, found each time",
            {"events.jsonl": _calm()},
        ),
    ]
