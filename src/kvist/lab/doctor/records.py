"""Request logs: what was asked, when, by whom, and what it cost. One JSON object a line.

Owns the shapes that such logs come in: OpenAI requests, bare or under ``body``, ``request`` or
``input``; beside them what a proxy notes (time, duration, usage). Knows no symptoms. A line that
holds no prompt, or is cut off, is counted and passed over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

_TIMES = ("timestamp", "time", "ts", "created", "arrival_s", "t")
_DURATIONS = ("duration_s", "latency_s", "elapsed_s", "e2e_s", "duration", "latency")
_DURATIONS_MS = ("duration_ms", "latency_ms", "elapsed_ms")


@dataclass(frozen=True, slots=True)
class Record:
    """One request.

    Attributes
    ----------
    prompt : str
        Tools and messages in order, each with its role.
    scope : tuple of str
        Model, adapter and salt: K and V are only shared within one.
    time_s : float or None
        Of its arrival, since whenever.
    duration_s : float or None
    prompt_tokens, cached_tokens, output_tokens : int or None
        From the usage of its answer.
    """

    prompt: str
    scope: tuple[str, str, str] = ("", "", "")
    time_s: float | None = None
    duration_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None

    @property
    def salt(self) -> str:
        """What keeps its blocks apart from others'."""
        return self.scope[2]


def read_records(lines: Iterable[str]) -> tuple[list[Record], int]:
    """Read requests in order of arrival.

    Returns
    -------
    tuple
        Records, and how many lines held none. A last line that is cut off counts among those.
    """
    records: list[Record] = []
    bad = 0
    for line in lines:
        if not line.strip():
            continue
        try:
            record = _record(json.loads(line))
        except ValueError:
            record = None
        if record is None:
            bad += 1
        else:
            records.append(record)
    if records and all(record.time_s is not None for record in records):
        records.sort(key=lambda record: record.time_s or 0.0)
    return records, bad


def _record(line: Any) -> Record | None:
    if not isinstance(line, dict):
        return None
    request = next(
        (line[name] for name in ("body", "request", "input") if isinstance(line.get(name), dict)),
        line,
    )
    prompt = _prompt(request)
    if prompt is None:
        return None
    usage = _usage(line)
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    extra = request.get("extra_body")
    extra = extra if isinstance(extra, dict) else {}
    salt = request.get("cache_salt", extra.get("cache_salt", line.get("cache_salt")))
    adapter = request.get("lora", request.get("adapter"))
    return Record(
        prompt,
        (str(request.get("model") or ""), str(adapter or ""), str(salt or "")),
        _time(line),
        _duration(line),
        _count(usage.get("prompt_tokens")),
        _count(cached if cached is not None else usage.get("cached_tokens")),
        _count(usage.get("completion_tokens", usage.get("output_tokens"))),
    )


def _prompt(request: Mapping[str, Any]) -> str | None:
    messages = request.get("messages")
    if isinstance(messages, list):
        parts = [_message(message) for message in messages if isinstance(message, dict)]
        if isinstance(tools := request.get("tools"), list) and tools:
            # Chat templates put them first; in the order that they were sent in.
            parts.insert(0, "tools\n" + "\n".join(map(json.dumps, tools)))
        return "\n".join(parts)
    prompt = request.get("prompt", request.get("input"))
    return prompt if isinstance(prompt, str) else None


def _message(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        texts = (part.get("text", "") for part in content if isinstance(part, dict))
        content = "\n".join(map(str, texts))
    return f"{message.get('role', '')}\n{content or ''}"


def _usage(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """Find the usage: beside the request, in its response, or in the response's body."""
    place: Any = line
    for name in ("", "response", "body"):
        place = place.get(name) if name else place
        if not isinstance(place, dict):
            return {}
        if isinstance(place.get("usage"), dict):
            found: Mapping[str, Any] = place["usage"]
            return found
    return {}


def _time(line: Mapping[str, Any]) -> float | None:
    for name in _TIMES:
        value = line.get(name)
        if isinstance(value, str):
            try:
                return datetime.fromisoformat(value).timestamp()
            except ValueError:
                continue
        if (number := _number(value)) is not None:
            return number / 1000 if number > 1e11 else number
    return None


def _duration(line: Mapping[str, Any]) -> float | None:
    for names, scale in ((_DURATIONS, 1.0), (_DURATIONS_MS, 1e-3)):
        for name in names:
            if (number := _number(line.get(name))) is not None:
                return number * scale
    return None


def _count(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) and value >= 0 else None
