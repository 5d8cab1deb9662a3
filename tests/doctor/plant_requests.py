"""Planted request logs: chats, agents, documents; as bodies, as batch lines and as traces."""
# ruff: noqa: E501  (templates are as long as they are)

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable
from typing import Any

from plant_case import Case, prose
from plant_exporters import page, vllm

_Body = dict[str, Any]


def _policy(words: int, seed: int = 7) -> str:
    return prose(random.Random(seed), words)


def _lines(count: int, make: Callable[[random.Random, int], _Body], seed: int) -> str:
    rng = random.Random(seed)
    return "".join(json.dumps(make(rng, i)) + "\n" for i in range(count))


def _chat(system: str, *turns: str, **more: Any) -> _Body:
    messages = [{"role": "system", "content": system}]
    messages += [
        {"role": "assistant" if i % 2 else "user", "content": turn} for i, turn in enumerate(turns)
    ]
    return {
        "model": "assistant-8b",
        "messages": messages,
        "temperature": 0.2,
        "max_tokens": 256,
    } | more


def _batch(body: _Body, number: int) -> _Body:
    return {
        "custom_id": f"req-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body,
    }


def _tool(rng: random.Random, name: str) -> _Body:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": prose(rng, 40),
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
                "required": ["query"],
            },
        },
    }


def _timestamp(rng: random.Random, i: int) -> _Body:
    stamp = f"2026-11-21T09:{i:02d}:{rng.randrange(60):02d}.{rng.randrange(1000):03d}Z"
    return _chat(
        f"Current time: {stamp}\nYou are the support assistant.\n{_policy(500)}", prose(rng, 25)
    )


def _session(rng: random.Random, i: int) -> _Body:
    ident = uuid.UUID(int=rng.getrandbits(128), version=4)
    return _batch(
        _chat(f"<session id={ident}>\nFollow the handbook.\n{_policy(600)}", prose(rng, 40)), i
    )


def _gateway(rng: random.Random, i: int) -> _Body:
    ident = uuid.UUID(int=rng.getrandbits(128), version=4)
    body = _chat(
        f"[trace {ident}] Answer as the bank's assistant.\n{_policy(550)}",
        prose(rng, 30),
        stream=True,
    )
    return {
        "ts": f"2026-11-21T09:00:{i:02d}.113Z",
        "level": "info",
        "msg": "upstream",
        "request_id": str(ident),
        "status": 200,
        "request": body,
    }


def _agent() -> str:
    """Agents whose system prompt begins with a counter, so that no turn extends the one before."""
    rng = random.Random(22)
    lines = []
    for task in range(5):
        talk: list[str] = []
        for turn in range(8):
            talk.append(prose(rng, 40))
            head = (
                f"Step {turn + 1} of 20, task {task}. Budget left: {20000 - 913 * turn} tokens.\n"
            )
            lines.append(json.dumps(_chat(head + _policy(350), *talk)))
            talk.append(prose(rng, 80))
    return "\n".join(lines) + "\n"


def _name_first(rng: random.Random, i: int) -> _Body:
    name = (
        rng.choice(("Ada", "Bo", "Cyd", "Dov", "Eve", "Fay", "Gus", "Hal", "Ida", "Jon"))
        + f" {rng.randrange(10000)}"
    )
    return _chat(
        f"You are talking to {name}, customer number {rng.randrange(10**8)}. {_policy(450)}",
        prose(rng, 30),
    )


def _tools_shuffled(rng: random.Random, i: int) -> _Body:
    fixed = random.Random(3)
    tools = [_tool(fixed, f"tool_{k}") for k in range(12)]
    rng.shuffle(tools)
    return _chat(_policy(300), prose(rng, 30), tools=tools, tool_choice="auto")


def _tools_stable(rng: random.Random, i: int) -> _Body:
    fixed = random.Random(3)
    tools = [_tool(fixed, f"tool_{k}") for k in range(12)]
    return _chat(_policy(300), prose(rng, 30), tools=tools, tool_choice="auto")


def _date_last(rng: random.Random, i: int) -> _Body:
    return _chat(
        _policy(500),
        f"{prose(rng, 60)}\n\n(sent 2026-11-21T10:{i:02d}:09Z, id {uuid.UUID(int=rng.getrandbits(128))})",
    )


def _salted(rng: random.Random, i: int) -> _Body:
    return _chat(_policy(700), prose(rng, 25), cache_salt=f"{rng.getrandbits(96):024x}")


def _shared(rng: random.Random, i: int) -> _Body:
    return _chat(_policy(700), prose(rng, 25), user=f"user-{i % 7}")


def _alone(rng: random.Random, i: int) -> _Body:
    return {"model": "base-8b", "prompt": prose(rng, 180), "max_tokens": 128}


def _short_system(rng: random.Random, i: int) -> _Body:
    return _chat(
        "You are a helpful assistant. Answer shortly, name your sources, and never invent numbers.",
        prose(rng, 220),
    )


def _conversations(seed: int) -> str:
    rng = random.Random(seed)
    system = _policy(180)
    talks: list[list[str]] = [[] for _ in range(6)]
    lines = []
    for turn in range(5):
        for talk in talks:
            talk.append(prose(rng, 30))
            lines.append(json.dumps(_chat(system, *talk, stream=True, user=f"user-{turn % 3}")))
            talk.append(prose(rng, 60))
    return "\n".join(lines) + "\n"


def _trace(requests: list[tuple[int, int, int, list[int]]]) -> str:
    return "".join(
        json.dumps({"timestamp": t, "input_length": n, "output_length": out, "hash_ids": ids})
        + "\n"
        for t, n, out, ids in requests
    )


def _cycle() -> str:
    """Forty documents of eight blocks, asked about in turn, five times over: 164k tokens."""
    rows = []
    for turn in range(5):
        for doc in range(40):
            ids = [doc * 8 + k for k in range(8)] + [1000 + turn * 40 + doc]
            rows.append(((turn * 40 + doc) * 900, 9 * 512 - 200, 120, ids))
    return _trace(rows)


def _scan() -> str:
    """Four prompts of 4 blocks, each again after four documents of 12 blocks that never return."""
    rows, fresh = [], 10_000
    for turn in range(60):
        hot = turn % 4
        ids = [100 * hot + k for k in range(4)] + [fresh]
        rows.append((len(rows) * 700, 5 * 512 - 90, 60, ids))
        fresh += 1
        rows.append((len(rows) * 700, 12 * 512 - 11, 60, list(range(fresh, fresh + 12))))
        fresh += 12
    return _trace(rows)


def _busy_but_fits() -> str:
    rows = []
    for turn in range(4):
        for doc in range(20):
            ids = [doc * 8 + k for k in range(8)] + [1000 + turn * 20 + doc]
            rows.append(((turn * 20 + doc) * 900, 9 * 512 - 200, 120, ids))
    return _trace(rows)


def cases() -> list[Case]:
    """Return the cases with a request log, some with metrics of the same server."""
    shared = _lines(40, _shared, 21)
    misses = vllm(
        model="assistant-8b",
        queries=41_201,
        hits=210,
        usage=0.12,
        stop=40,
        length=0,
        prompt=1030,
        output=80,
    )
    finds = vllm(
        model="assistant-8b",
        queries=41_201,
        hits=38_800,
        usage=0.12,
        stop=40,
        length=0,
        prompt=1030,
        output=80,
    )
    return [
        Case(
            "requests-timestamp-first",
            "prefix-differs-early",
            "'Current time:' with milliseconds opens the system prompt",
            {"requests.jsonl": _lines(40, _timestamp, 11)},
        ),
        Case(
            "requests-session-first",
            "prefix-differs-early",
            "a UUID of the session opens the system prompt; batch format",
            {"requests.jsonl": _lines(40, _session, 12)},
        ),
        Case(
            "requests-name-first",
            "prefix-differs-early",
            "name and number of the customer before the policy",
            {"requests.jsonl": _lines(40, _name_first, 13)},
        ),
        Case(
            "requests-tools-shuffled",
            "prefix-differs-early",
            "tools come out of a set: another order in each request",
            {"requests.jsonl": _lines(30, _tools_shuffled, 14)},
        ),
        Case(
            "requests-gateway",
            "prefix-differs-early",
            "a gateway's log around the body; a trace id opens the system prompt",
            {"gateway.jsonl": _lines(40, _gateway, 23)},
        ),
        Case(
            "requests-agent-counter",
            "prefix-differs-early",
            "a step counter and a budget open the system prompt of agents",
            {"requests.jsonl": _agent()},
        ),
        Case(
            "requests-salt-each",
            "salt-or-hash-differs",
            "a proxy gives every request its own cache_salt",
            {"requests.jsonl": _lines(40, _salted, 15)},
        ),
        Case(
            "requests-not-found",
            "salt-or-hash-differs",
            "prompts share 95 %, the server found half a percent",
            {"requests.jsonl": shared, "metrics.txt": page(misses)["metrics.txt"]},
        ),
        Case(
            "requests-block-128",
            "block-larger-than-prefix",
            "a system prompt of one line, blocks of 128 tokens",
            {"requests.jsonl": _lines(40, _short_system, 16)},
            ("--block-size", "128"),
        ),
        Case(
            "requests-all-different",
            "prompts-share-nothing",
            "raw completions, every prompt another",
            {"requests.jsonl": _lines(40, _alone, 17)},
        ),
        Case(
            "trace-cycle",
            "cache-too-small",
            "164k tokens of documents in turn, a pool of 32k",
            {"trace.jsonl": _cycle()},
            ("--pool-tokens", "32768"),
        ),
        Case(
            "trace-scan",
            "hot-prefixes-evicted",
            "four prompts that always come back, 8k together, and scans between; a pool of 20k",
            {"trace.jsonl": _scan()},
            ("--pool-tokens", "20480"),
        ),
        Case(
            "healthy-conversations",
            None,
            "chats that grow, interleaved: each extends itself",
            {"requests.jsonl": _conversations(18)},
        ),
        Case(
            "healthy-tools-stable",
            None,
            "twelve tools, always in the same order",
            {"requests.jsonl": _lines(30, _tools_stable, 19)},
        ),
        Case(
            "healthy-date-last",
            None,
            "timestamp and UUID at the end of the question",
            {"requests.jsonl": _lines(40, _date_last, 20)},
        ),
        Case(
            "healthy-found",
            None,
            "prompts share 95 %, the server found 94 %",
            {"requests.jsonl": shared, "metrics.txt": page(finds)["metrics.txt"]},
        ),
        Case(
            "healthy-trace-fits",
            None,
            "documents in turn, and a pool that holds them",
            {"trace.jsonl": _busy_but_fits()},
            ("--pool-tokens", "262144"),
        ),
    ]
